"""What a tuned step is worth in ``generate`` of transformers: tokens a second of a whole answer, prompt included.

    python experiments/serve/generate.py [--device cuda]

writes ``results/<device>/generate.json``. Models of the shape of Llama with random weights. Answers are made in rounds, in random order
within each, in one process, all greedy and of the same length: the model as it comes with the cache that ``generate`` makes by itself, the
same again (A/A) and with a ``StaticCache``; ``torch.compile`` of the model with a ``StaticCache``, on a GPU as ``generate`` does it by
itself; and a step tuned by ``autosched.tune`` from a call that was recorded. That all give the same tokens is checked first. ``--smoke``
does it with a small model and writes nothing unless told where.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from experiments.devices import results_of  # noqa: E402
from experiments.serve.common import interval, keep, parser_of  # noqa: E402

EAGER = "as it comes"
_PROMPT = 16


@dataclass(frozen=True, slots=True)
class Size:
    """Of a decoder, and of an answer.

    Args:
        name: for people.
        layers, width, heads, shared_heads, inner, words: as Llama's configuration has them.
        tokens: how many an answer has beside its prompt.
    """

    name: str
    layers: int
    width: int
    heads: int
    shared_heads: int
    inner: int
    words: int
    tokens: int = 64


SIZES = (
    Size("4 layers of 256", 4, 256, 8, 4, 512, 1000),
    # As SmolLM2-135M (its published configuration).
    Size("30 layers of 576", 30, 576, 9, 3, 1536, 49152),
)


def decoder(size: Size, device: str) -> Any:
    from autosched.zoo_models.torchvision_schemas import import_torchvision

    import_torchvision()  # transformers imports it
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.words,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.shared_heads,
        intermediate_size=size.inner,
        eos_token_id=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LlamaForCausalLM(config).eval().to(device)


class Answers:
    """How one model is made to answer, each time with its ``forward`` as the contestant has it."""

    def __init__(self, size: Size, device: str) -> None:
        from transformers import StaticCache

        self.model = decoder(size, device)
        self.tokens = size.tokens
        self.prompt = torch.randint(3, size.words, (1, _PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
        self._cache = StaticCache(config=self.model.config, max_cache_len=_PROMPT + size.tokens)

    def growing(self) -> torch.Tensor:
        """With the cache that ``generate`` makes by itself."""
        return self._answer({})

    def fixed(self, *, compiled: bool = False) -> torch.Tensor:
        """With a ``StaticCache``. ``compiled``: on a GPU, ``generate`` compiles the step."""
        self._cache.reset()
        return self._answer({"past_key_values": self._cache, "disable_compile": not compiled})

    def _answer(self, options: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = self.model.generate(
            self.prompt, min_new_tokens=self.tokens, max_new_tokens=self.tokens, do_sample=False, **options
        )
        # Waits for the device.
        return result.cpu()


@contextmanager
def instead(model: Any, forward: Callable[..., Any] | None) -> Iterator[None]:
    """``forward`` in the place of the model's own."""
    if forward is not None:
        model.forward = forward
    try:
        yield
    finally:
        if forward is not None:
            del model.forward


def contestants(answers: Answers, device: str, budget_s: float) -> tuple[dict[str, Callable[[], torch.Tensor]], Any]:
    """By name, what makes an answer; and the loaded step."""
    import autosched

    model = answers.model
    _, step = autosched.record_calls(model, answers.fixed)
    tuned = autosched.tune(model, step.args, step.kwargs, device=device, budget_s=budget_s)
    print(tuned.summary().splitlines()[0])
    fast = autosched.load(tuned.to_bytes(), model)
    compiled = torch.compile(model.forward) if device == "cpu" else None

    def made(forward: Callable[..., Any] | None, answer: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with instead(model, forward):
                return answer()

        return run

    return {
        EAGER: answers.growing,
        f"{EAGER} again": answers.growing,
        "StaticCache": answers.fixed,
        "StaticCache, torch.compile": made(compiled, lambda: answers.fixed(compiled=True)),
        "StaticCache, autosched": made(fast, answers.fixed),
    }, fast


def measure(size: Size, device: str, budget_s: float, rounds: int) -> dict[str, Any]:
    """One model."""
    torch._dynamo.reset()
    answers = Answers(size, device)
    runs, fast = contestants(answers, device, budget_s)
    expected = answers.growing()
    same = {}
    for name, run in runs.items():
        # The first compiles, the second is of a settled process.
        run()
        same[name] = bool(torch.equal(run(), expected))
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        order = list(runs)
        rng.shuffle(order)
        for name in order:
            began = time.perf_counter_ns()
            runs[name]()
            times[name].append((time.perf_counter_ns() - began) / 1e3)
    rows = []
    for name, column in times.items():
        ratios = [before / after for before, after in zip(times[EAGER], column, strict=True)]
        rows.append(
            {
                "name": name,
                "median_us": statistics.median(column),
                "ci_us": interval(column),
                "tokens_per_s": size.tokens / statistics.median(column) * 1e6,
                "speedup": statistics.median(ratios),
                "speedup_ci": interval(ratios),
                "same_tokens": same[name],
            }
        )
        print(f"{size.name}, {name}: {rows[-1]['tokens_per_s']:,.0f} tokens/s, {rows[-1]['speedup']:.2f}x, same tokens: {same[name]}")
    report = fast.report()
    return {
        **asdict(size),
        "prompt": _PROMPT,
        "rounds": rounds,
        "schedule": report.schedule,
        "steps_on_schedule": report.calls,
        "copied_back_bytes": report.shapes[0].copied_back_bytes,
        "rows": rows,
    }


def main() -> None:
    parser = parser_of(__doc__, models=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tuning for each model")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    sizes, budget_s, rounds = SIZES, arguments.budget, arguments.rounds
    if arguments.smoke:
        sizes, budget_s, rounds = (Size("2 layers of 32", 2, 32, 4, 2, 64, 50, tokens=4),), 4.0, 2
    if arguments.out is None and arguments.device == "cuda":
        arguments.out = results_of("cuda") / "generate.json"
    cases = [measure(size, arguments.device, budget_s, rounds) for size in sizes]
    keep(arguments, "generate.json", {"device": arguments.device, "threads": torch.get_num_threads(), "cases": cases})


if __name__ == "__main__":
    main()
