# Two commands do everything on a fresh machine with Python 3.11 to 3.13: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= torchvision:googlenet
BUNDLE ?= googlenet.autosched
# A folder named datasets/ in the working directory must never shadow the Hugging Face package of that name.
export PYTHONSAFEPATH = 1

.PHONY: demo test install clean

install: $(VENV)/.installed

# torch comes first: whatever is installed later then keeps the build that fits this machine.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet 'torch>=2.11,<2.14'
	$(VENV)/bin/python -m pip install --quiet -e '.[zoo,exact,report,test]'
	touch $@

demo: install
	$(VENV)/bin/autosched tune $(MODEL) --device auto --effort quick -o $(BUNDLE)

test: install
	$(VENV)/bin/python -m pytest -q -m "not gpu"

clean:
	rm -rf $(VENV) build dist *.egg-info
