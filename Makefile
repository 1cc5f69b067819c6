# Two commands do everything on a fresh machine with Python 3.11 to 3.14: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= torchvision:googlenet
BUNDLE ?= googlenet.autosched
# What CI tests with: not all that pyproject.toml names, so that where an index has a build for the CPU it is taken, and no newer release
# with its gigabytes of CUDA. `make TORCH='torch==2.15.*'` takes another.
TORCH ?= torch>=2.11,<2.14
# A folder named datasets/ in the working directory must never shadow the Hugging Face package of that name.
export PYTHONSAFEPATH = 1
# Images for containers set it, and each of the hundreds of processes that the tests start would translate this package for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test install clean emulate

install: $(VENV)/.installed

# torch comes first, and is named again: whatever is installed later then keeps the build that fits this machine. Python translates what it
# imports when it first does: of these packages, a third.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --no-compile '$(TORCH)'
	$(VENV)/bin/python -m pip install --quiet --no-compile -e '.[zoo,exact,report,test]' '$(TORCH)'
	touch $@

demo: install
	$(VENV)/bin/autosched tune $(MODEL) --device auto --effort quick -o $(BUNDLE)

# Most tests keep one core busy, so one process for each core takes half the time on two of them; more than four gain little and each of
# them has a PyTorch of its own in memory. GNU's OpenMP spins for milliseconds after each operator, which here is the time of another
# process's tests: a thirtieth of that still meets the next operator of a running model awake, as the tests of lanes expect.
test: install
	GOMP_SPINCOUNT=10000 $(VENV)/bin/python -m pytest -q -m "not gpu" -n auto --maxprocesses 4 --dist worksteal

# The CUDA side on a machine without a GPU: see tools/cuda_emulator/README.md. Not part of `make test`.
EMULATOR_TORCH ?= 2.11.*
EMULATOR_VENV ?= .venv-emulator
EMULATE = $(EMULATOR_VENV)/bin/python tools/cuda_emulator/run.py
EMULATED_PYTEST = $(EMULATOR_VENV)/bin/python -m pytest -q -p no:cacheprovider
EMULATED = $(EMULATE) -- $(EMULATED_PYTEST)

$(EMULATOR_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(EMULATOR_VENV)
	$(EMULATOR_VENV)/bin/python -m pip install --quiet 'torch==$(EMULATOR_TORCH)' setuptools
	$(EMULATOR_VENV)/bin/python -m pip install --quiet -e '.[test]'
	touch $@

emulate: $(EMULATOR_VENV)/.installed
	$(EMULATED) --noconftest -c /dev/null --rootdir tools/cuda_emulator \
		tools/cuda_emulator/test_emulator.py tools/cuda_emulator/test_triton_values.py
	$(EMULATE) --values zeros -- $(EMULATED_PYTEST) --noconftest -c /dev/null --rootdir tools/cuda_emulator tools/cuda_emulator/test_zeros.py
	$(EMULATE) --late -- $(EMULATED_PYTEST) --noconftest -c /dev/null --rootdir tools/cuda_emulator tools/cuda_emulator/test_late.py
	$(EMULATE) --devices 2 -- $(EMULATED_PYTEST) --noconftest -c /dev/null --rootdir tools/cuda_emulator tools/cuda_emulator/test_two_devices.py
	$(EMULATE) --device h200,l4 -- $(EMULATED_PYTEST) --noconftest -c /dev/null --rootdir tools/cuda_emulator \
		tools/cuda_emulator/test_different_devices.py
	$(EMULATED) -m gpu --gpu-budget 7200 tests/gpu
	$(EMULATE) --late -- $(EMULATED_PYTEST) -m gpu --gpu-budget 7200 $(addprefix tests/gpu/test_gpu_,streams.py memory.py state.py serving.py)

clean:
	rm -rf $(VENV) $(EMULATOR_VENV) build dist *.egg-info
