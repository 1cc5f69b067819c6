"""The bridge to Opara's published code: what that code expects of PyTorch 2.0, made from what newer versions give."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.h200 import opara
from experiments.h200.opara import module_graph, one_launch_per_kernel, published


class Forked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(4, 4)
        self.right = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x).relu() + self.right(x)


def test_the_graph_has_the_models_inputs_only_and_computes_the_same() -> None:
    model, x = Forked().eval(), torch.randn(2, 4)
    graph = module_graph(model, (x,))
    assert [node.op for node in graph.graph.nodes].count("placeholder") == 1
    assert [node.op for node in graph.graph.nodes].count("call_module") == 2
    answer = graph(x)
    assert torch.equal(answer[0] if isinstance(answer, tuple) else answer, model(x))


def launch(name: str, at: int, correlation: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": at, "dur": 1, "args": {"correlation": correlation}}


def test_every_kernel_follows_the_call_that_launched_it() -> None:
    kernel = {"ph": "X", "name": "gemm", "cat": "kernel", "ts": 9, "dur": 3}
    trace = {
        "deviceProperties": [{"regsPerBlock": 65536}],
        "traceEvents": [
            {**kernel, "args": {"correlation": 8, "block": [64, 1, 1]}},
            {**kernel, "args": {"correlation": 7, "block": [32, 1, 1]}},
            launch("cudaLaunchKernel", 3, 8),
            launch("cuLaunchKernelEx", 2, 7),
            launch("cudaLaunchKernel", 4, 6),  # no kernel came of it
            {"ph": "X", "name": "torch/fx/interpreter.py(1): run_node", "ts": 1, "dur": 9, "args": {}},
            {"ph": "X", "name": "aten::trunc", "ts": 1, "dur": 1, "args": {}},  # "run" is part of its name
            {"ph": "M", "name": "run"},
        ],
    }
    found = one_launch_per_kernel(trace)
    assert found["deviceProperties"] == trace["deviceProperties"]
    assert [event["name"] for event in found["traceEvents"]] == [
        "run",
        "torch/fx/interpreter.py(1): run_node",
        "cudaLaunchKernel",
        "kernel",
        "cudaLaunchKernel",
        "kernel",
    ]
    assert [event["args"]["block"][0] for event in found["traceEvents"] if event["name"] == "kernel"] == [32, 64]


def test_the_published_code_is_used_from_a_copy_and_asks_the_bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "Opara"
    (package / "profile_result").mkdir(parents=True)
    (package / "profile_result" / "old.json").write_text("{}")
    (package / "GraphCapturer.py").write_text(
        "import os\nimport torch._dynamo as dynamo\nfrom Opara import ModelProfiler\n"
        "seen = os.listdir(os.path.dirname(os.path.abspath(__file__)) + '/profile_result')\n"
    )
    (package / "ModelProfiler.py").write_text(
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\ndef profile(graph, inputs, path):\n    raise AssertionError\n"
    )
    model, x = Forked().eval(), torch.randn(2, 4)
    before = list(sys.path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with published(tmp_path) as capturer:
        assert capturer.seen == []
        _, _, graphs, *_ = capturer.dynamo.explain(model, x)
        assert len(graphs) == 1
    assert sys.path == before
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert not any(name == "Opara" or name.startswith("Opara.") for name in sys.modules)


def test_a_model_that_fails_keeps_no_other_from_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def contest(name: str, *_: object) -> dict[str, object]:
        if name == "a:1":
            raise RuntimeError("an illegal memory access")
        return {"rows": {}, "published_failed": ""}

    monkeypatch.setattr(opara, "contest", contest)
    monkeypatch.setattr(opara, "environment", dict)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("sys.argv", ["opara.py", "a:1", "a:2", "--repository", str(tmp_path), "--out", str(tmp_path / "out")])
    assert opara.main() == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a_2.json"]
    assert "an illegal memory access" in capsys.readouterr().err


def test_a_folder_without_the_code_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"holds no Opara/GraphCapturer\.py"), published(tmp_path):
        pass
