"""The text of kernels: indices out of bounds are exceptions also on several threads, short loads are one instruction."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.variants import Lowering, Variant
from autosched.runtime.inductor import cpp_source
from autosched.runtime.inductor.cpp_source import revised
from autosched.runtime.regions.compile import Code, compile_piece
from autosched.runtime.regions.pieces import pieces_of

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")

_LOOKUP = """extern "C"  void  kernel(const int64_t* in_ptr0,
                       float* out_ptr0)
{
    std::atomic<int> inductor_cpu_integer_div_error{0};
    inductor_cpu_integer_div_error_flag = &inductor_cpu_integer_div_error;
    #pragma omp parallel num_threads(2)
    {
        int tid = omp_get_thread_num();
        {
            #pragma omp for
            for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(8L); x0+=static_cast<int64_t>(1L))
            {
                {
                    auto tmp0 = in_ptr0[x0];
                    TORCH_CHECK((0 <= tmp0) & (tmp0 < 9L), "index out of bounds: 0 <= tmp0 < 9L");
                    out_ptr0[x0] = tmp0;
                }
            }
        }
    }
    inductor_cpu_integer_div_error_flag = nullptr;
    inductor_cpu_throw_if_integer_div_error(inductor_cpu_integer_div_error);
}
"""
_CHECK = 'TORCH_CHECK((0 <= tmp0) & (tmp0 < 9L), "index out of bounds: 0 <= tmp0 < 9L");'
_LOAD = "auto tmp1 = at::vec::Vectorized<int8_t>::loadu(in_ptr1 + static_cast<int64_t>(x1 + 64L*x0), static_cast<int64_t>(8));\n"


def test_a_check_in_a_parallel_loop_skips_and_is_reported_behind_it() -> None:
    made = revised(_LOOKUP)
    assert "TORCH_CHECK" not in made
    assert made.index("std::atomic<const char*> out_of_bounds{nullptr};") < made.index("#pragma omp parallel")
    skips = 'if (C10_UNLIKELY(!((0 <= tmp0) & (tmp0 < 9L)))) { out_of_bounds.store("index out of bounds: 0 <= tmp0 < 9L"); continue; }'
    assert made.index(skips) < made.index("throw std::runtime_error(said);")
    assert made.endswith("throw std::runtime_error(said);\n}\n")


@pytest.mark.parametrize(
    "code",
    [
        _LOOKUP.replace(_CHECK, f"auto tmp3 = [&]\n{{\n{_CHECK}\nreturn 1;\n}}\n;"),
        _LOOKUP.replace("#pragma omp for", "#pragma omp single").replace("for(int64_t x0", "// for(int64_t x0").replace("x0]", "0]"),
    ],
)
def test_a_kernel_that_cannot_skip_runs_on_one_thread_and_throws(code: str) -> None:
    made = revised(code)
    assert _CHECK in made
    assert "#pragma omp" not in made


def test_checks_on_one_thread_stay() -> None:
    code = _LOOKUP.replace("#pragma omp parallel num_threads(2)\n", "").replace("#pragma omp for\n", "")
    assert _CHECK in revised(code)


def test_only_kernels_that_divide_integers_touch_their_pointer() -> None:
    assert "integer_div_error" not in revised(_LOOKUP)
    divides = _LOOKUP.replace("= tmp0;", "= mod(tmp0, 3);")
    assert revised(divides).count("integer_div_error") == divides.count("integer_div_error")


@pytest.mark.parametrize(
    ("capability", "uses", "shortened"),
    [
        ("AVX2", "auto tmp2 = at::vec::convert<float>(tmp1);\n", True),
        ("AVX512", "auto tmp2 = at::vec::convert<float>(tmp1);\n", False),
        # What lies behind the eight numbers is not the same.
        ("AVX2", "auto tmp2 = at::vec::convert<float>(tmp1);\nauto tmp3 = tmp1 * tmp1;\n", False),
        ("AVX2", "auto tmp2 = at::vec::convert<int32_t>(tmp1);\n", False),
        ("AVX2", "auto tmp2 = at::vec::convert<float>(tmp1);\nauto tmp1 = 3;\nauto tmp3 = tmp1 * tmp1;\n", True),
    ],
)
def test_short_loads_are_one_instruction_where_they_are_only_widened(
    monkeypatch: pytest.MonkeyPatch, capability: str, uses: str, shortened: bool
) -> None:
    monkeypatch.setattr(cpp_source.torch.backends.cpu, "get_cpu_capability", lambda: capability)
    made = revised(_LOAD + uses)
    assert (made == _LOAD + uses) != shortened
    assert made.count("loadu_one_fourth(in_ptr1 + static_cast<int64_t>(x1 + 64L*x0));") == shortened


class Lookups(nn.Module):
    """Two embeddings and their normalisation, and rows of a table by an index that may be negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.norm = nn.Embedding(50, 256), nn.Embedding(64, 256), nn.LayerNorm(256)
        self.table = nn.Parameter(torch.randn(50, 256))

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(self.words(words) + self.places(torch.arange(words.shape[1]))), self.table[words[0]] * 2


@needs_compiler
@pytest.mark.parametrize("width", [1, 2])
def test_a_bad_index_is_an_exception_on_any_number_of_threads(width: int) -> None:
    words = torch.randint(0, 50, (1, 64))
    graph = capture(Lookups().eval(), (words,), lowering=Lowering.FUSED).program.graph
    refused = 0
    for piece in (piece for operator in graph.operators for piece in pieces_of(operator, graph) if piece.compiled):
        code = compile_piece(piece, graph, torch.device("cpu"), width=width, variant=Variant.COMPILED)
        assert isinstance(code, Code)
        specs = [graph.values[value].spec for value in piece.reads]
        for bad in (50, -51):
            given = [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]
            indices = [tensor for tensor in given if tensor.dtype == torch.int64]
            code.entry(list(given))
            indices[0][0, 40] = bad
            with pytest.raises(RuntimeError, match="index out of bounds"):
                code.entry(list(given))
            refused += 1
            indices[0].zero_()
            code.entry(list(given))
    assert refused >= 4
