"""What the pages of docs/ say is true: their Python runs, their commands exist, their paths and names are those of this checkout."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from autosched.cli import app
from autosched.pipeline.budget import budget_for
from autosched.runtime.load import LoadReport, ShapeReport
from autosched.search.strategy import STRATEGIES
from tests.conformance.caches import own_cache

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "experiments" / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.S | re.M)


def run(page: str, names: dict[str, Any], older: Mapping[str, str] | None = None) -> dict[str, Any]:
    """``older``: what was called otherwise before, as the page says."""
    for number, source in enumerate(blocks(page, "python")):
        for now, before in (older or {}).items():
            assert now in source
            source = source.replace(now, before)
        exec(compile(source, f"{page}, block {number}", "exec"), names)
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_is_tuned_and_served_as_the_pages_say(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_models.py").write_text(blocks("docs/tune.md", "python")[0])
    monkeypatch.syspath_prepend(folder)
    tuned = run("docs/tune.md", {"__name__": "docs"})
    assert (folder / "ranker.autosched").is_file()
    assert tuned["tuned"].report.chosen in capsys.readouterr().out
    given = {name: tuned[name] for name in ("model", "inputs", "kwargs")}
    with warnings.catch_warnings():
        # The default schedule of so small a model may be slower than the model, which is said once.
        warnings.simplefilter("ignore")
        served = run("docs/serve.md", given)
    torch.testing.assert_close(served["result"], tuned["model"](*tuned["inputs"], **tuned["kwargs"]).detach())
    assert served["fast"].report().scheduled
    assert len(set(served["answers"])) == 1


def test_a_part_of_an_application_runs_on_a_schedule_as_the_page_says(folder: Path) -> None:
    pipe = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())).eval()
    part, x = pipe[1], torch.randn(2, 8)

    @torch.no_grad()
    def answer() -> torch.Tensor:
        return pipe(x)

    made = run("docs/libraries.md", {"part": part, "run": answer})
    assert made["fast"].report().calls == 1
    assert "forward" not in vars(part)


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")  # of the prompt
def test_generate_decodes_on_a_schedule_as_the_page_says(folder: Path) -> None:
    pytest.importorskip("transformers")
    from autosched.zoo_models.torchvision_schemas import import_torchvision

    import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "eos_token_id": None,
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    model, prompt = LlamaForCausalLM(LlamaConfig(**sizes)).eval(), torch.tensor([[3, 9, 4]])
    older = "cache" not in inspect.signature(model.forward).parameters
    made = run("docs/decoding.md", {"model": model, "prompt": prompt}, {"cache=cache": "past_key_values=cache"} if older else None)
    assert (made["first"].times, made["step"].times) == (1, 7)
    assert made["fast"].report().calls == 7
    assert torch.equal(made["answered"], made["answer"](prompt))


def test_runs_are_read_with_pandas_as_the_page_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "datasets" / "data" / "cpu_amd_epyc_avx512_48k_2", folder / "runs")
    named = run("docs/retrain.md", {})["named"]
    assert named["first_kind"].notna().all()
    assert "first_kind" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_options_and_links_exist(page: Path) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page.relative_to(ROOT).as_posix(), "bash") for line in block.splitlines()]
    lines += re.findall(r"`(autosched [a-z][^`]*)`", text)
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] != ["autosched"] or words[1].startswith("-"):
            continue
        assert words[1] in commands, line
        command = commands[words[1]]
        inner = getattr(command, "commands", {})
        command = inner[words[2]] if inner and len(words) > 2 and not words[2].startswith("-") else command
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        assert {word for word in words[2:] if word.startswith("-")} <= known | {"-h", "--help"}, line
    for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if link.startswith("https://"):
            continue
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_field_of_a_report_is_explained() -> None:
    cells = re.findall(r"^\| (`[^|]*) \| ([^|]*) \|$", (ROOT / "docs" / "serve.md").read_text(encoding="utf-8"), re.M)
    explained = {name for field, _ in cells for name in re.findall(r"`(\w+)`", field)}
    assert {field.name for field in dataclasses.fields(LoadReport)} <= explained
    (of_shapes,) = (meaning for field, meaning in cells if field == "`shapes`")
    assert {field.name for field in dataclasses.fields(ShapeReport)} == set(re.findall(r"`(\w+)`", of_shapes))


def test_every_strategy_and_its_file_are_in_the_map() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| ([^|]*) \| ([^|]*) \|$", text, re.M)
    named = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert named == {*STRATEGIES.names(), "tuned", "estf_2", "opara_2", "ios_2"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    for path in re.findall(r"`((?:autosched|search|costmodel|datasets)/[\w/.]*)`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists() or (page.parent / path).exists(), path


def test_every_pass_and_every_kernel_has_its_row() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    tables = dict(re.findall(r"^\| [^|]+ \| files? in `([\w/]+)` \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.M))
    assert set(tables) == {"autosched/capture/passes", "autosched/runtime/cpu_kernels"}
    for folder, rows in tables.items():
        named = re.findall(r"`([\w.]+)`", "".join(row.rsplit(" | ", 1)[1] for row in rows.splitlines()))
        there = {path.name for path in (ROOT / folder).iterdir() if path.is_file()} - {"__init__.py"}
        assert sorted(named) == sorted(there), folder


def test_the_table_of_efforts_is_the_presets() -> None:
    text = (ROOT / "docs" / "tune.md").read_text(encoding="utf-8")
    for effort in ("quick", "balanced", "full"):
        budget = budget_for(effort)
        said = "yes" if budget.compiled_baseline else "no"
        assert f"| `{effort}` | {budget.total_s:.0f} | {said} |" in text


def test_every_environment_variable_is_explained() -> None:
    read = set(re.findall(r"AUTOSCHED_[A-Z_]+", (ROOT / "autosched" / "config.py").read_text(encoding="utf-8")))
    text = (ROOT / "docs" / "tune.md").read_text(encoding="utf-8")
    assert {name for name in re.findall(r"^\| `(AUTOSCHED_[A-Z_]+)` \|", text, re.M)} == read
