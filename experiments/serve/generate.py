"""What a tuned step is worth in ``generate`` of transformers: tokens a second of a whole answer, prompt included.

    python experiments/serve/generate.py [--device cuda]

writes ``results/<device>/generate.json``. Models of the shape of Llama with random weights, on a CPU also one with the weights of its
linear layers in eight bits. Answers are made in rounds, in random order within each, in one process, all greedy and of the same length:
the model as it comes with the cache that ``generate`` makes by itself, the same again (A/A), and with a ``StaticCache``; ``torch.compile``
of the model with a ``StaticCache``, with its defaults and in the mode max-autotune, on a GPU as ``generate`` does it by itself, on a CPU
the latter with frozen weights (Inductor's templates need them); and a step tuned by ``autosched.tune`` from a call that was recorded, on a
CPU also with little effort, which tries no mode of ``torch.compile``. All but the first two have a copy of the model. Whether they give
the same tokens is recorded. With ``--deadline`` models that the file has are left out, and exit status 10 says that some are left;
what tuning compiles for comparison is held to that time, and a few rounds without what ``torch.compile`` has yet to compile are recorded
first: who stops a call while it compiles has those, and the next call measures that model again. One that fails keeps no other from its
turn, and makes the exit status 1. ``--smoke`` does it with a small model and writes nothing unless told where.
"""

from __future__ import annotations

import inspect
import math
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.core.variants import Lowering  # noqa: E402
from autosched.runtime.inductor.modes import mode_options  # noqa: E402
from experiments.calls import LEFT, Call, compile_total_s, read_json  # noqa: E402
from experiments.devices import results_of  # noqa: E402
from experiments.serve.common import beside, parser_of, record  # noqa: E402

EAGER, AGAIN = "as it comes", "as it comes, again"
AUTOTUNED = "StaticCache, torch.compile, max-autotune"
OURS = "StaticCache, autosched"
QUICK = "StaticCache, autosched, --effort quick"
_PROMPT = 16
# Need no compiler once a step is tuned.
_AT_ONCE = (EAGER, "StaticCache", OURS)
_FIRST_ROUNDS = 3
UNFINISHED = "unfinished"
"""Of a case in the file: it has only the first rounds."""
# Of a call, for what is not tuning: ``generate`` compiles its step in two ways, and the rounds.
_ANSWERS_S = 70.0


@dataclass(frozen=True, slots=True)
class Size:
    """Of a decoder, and of an answer.

    Args:
        name: for people.
        layers, width, heads, shared_heads, inner, words: as Llama's configuration has them.
        tokens: how many an answer has beside its prompt.
        eight_bit: whether linear layers have their weights in eight bits, as quantizing weights alone leaves them.
    """

    name: str
    layers: int
    width: int
    heads: int
    shared_heads: int
    inner: int
    words: int
    tokens: int = 64
    eight_bit: bool = False


SIZES = (
    Size("4 layers of 256", 4, 256, 8, 4, 512, 1000),
    # As SmolLM2-135M (its published configuration).
    Size("30 layers of 576", 30, 576, 9, 3, 1536, 49152),
)
ON_CPU = (*SIZES, Size("30 layers of 576, eight bits", 30, 576, 9, 3, 1536, 49152, eight_bit=True))


def decoder(size: Size, device: str) -> Any:
    from autosched.zoo_models.torchvision_schemas import import_torchvision

    import_torchvision()  # transformers imports it
    from transformers import LlamaConfig, LlamaForCausalLM

    from autosched.zoo_models.decoder_int8 import to_eight_bits

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
        model = LlamaForCausalLM(config)
    if size.eight_bit:
        to_eight_bits(model)
    return model.eval().to(device)


class Answers:
    """A model that answers a prompt, greedily, always with as many tokens."""

    def __init__(self, size: Size, device: str) -> None:
        from transformers import StaticCache

        self.model = decoder(size, device)
        self._tokens = size.tokens
        self._prompt = torch.randint(3, size.words, (1, _PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
        self._cache = StaticCache(config=self.model.config, max_cache_len=_PROMPT + size.tokens)
        # Asked before another forward is in the model's place; the option had another name before transformers 5.24.
        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        self._with_cache = {name: self._cache}

    def growing(self) -> torch.Tensor:
        """With the cache that ``generate`` makes by itself."""
        return self._answer()

    def fixed(self) -> torch.Tensor:
        """With a ``StaticCache``."""
        self._cache.reset()
        return self._answer(**self._with_cache, disable_compile=True)

    def compiled(self) -> torch.Tensor:
        """With a ``StaticCache``; on a GPU, ``generate`` then compiles the step by itself."""
        self._cache.reset()
        return self._answer(**self._with_cache)

    def autotuned(self) -> torch.Tensor:
        """The same, compiled in the mode max-autotune."""
        from transformers.generation import CompileConfig

        self._cache.reset()
        return self._answer(**self._with_cache, compile_config=CompileConfig(mode="max-autotune"))

    def _answer(self, **options: Any) -> torch.Tensor:
        result: torch.Tensor = self.model.generate(
            self._prompt, min_new_tokens=self._tokens, max_new_tokens=self._tokens, do_sample=False, **options
        )
        # Waits for the device.
        return result.cpu()


def compile_on_cpu(compiled: Answers, autotuned: Answers) -> None:
    """``generate`` compiles nothing there by itself: give both the forward of a user who compiles it."""
    compiled.model.forward = torch.compile(compiled.model.forward)
    # As options of its own: of two that are compiled alike, the second would get the code of the first.
    options = mode_options(Lowering.MAX_AUTOTUNE)
    autotuned.model.forward = torch.compile(autotuned.model.forward, options=options)
    # Not among the options, because it decides what is traced as well; code that is compiled stays as it is.
    with torch._inductor.config.patch(freezing=True):
        autotuned.fixed()


def put_on_schedule(answers: Answers, device: str, **options: Any) -> tuple[Any, str]:
    """Tune a recorded step and load it in the model's place; the loaded step, and the lowering of its operators."""
    import autosched

    _, step = autosched.record_calls(answers.model, answers.fixed)
    tuned = autosched.tune(answers.model, step.args, step.kwargs, device=device, **options)
    print(tuned.summary())
    fast = answers.model.forward = autosched.load(tuned.to_bytes(), answers.model)
    return fast, tuned.report.lowering


def contestants(size: Size, device: str, budget_s: float) -> tuple[dict[str, Callable[[], torch.Tensor]], Any, dict[str, str]]:
    """By name, what makes an answer, each with a copy of the model; the loaded step, and by name the lowerings of tuned ones."""
    growing, fixed, compiled, autotuned, scheduled = (Answers(size, device) for _ in range(5))
    quick = Answers(size, device) if device == "cpu" else None
    if device == "cpu":
        compile_on_cpu(compiled, autotuned)
    lowerings: dict[str, str] = {}
    fast, lowerings[OURS] = put_on_schedule(scheduled, device, budget_s=budget_s)
    if quick is not None:
        _, lowerings[QUICK] = put_on_schedule(quick, device, effort="quick", budget_s=budget_s)
    return (
        {
            EAGER: growing.growing,
            AGAIN: growing.growing,
            "StaticCache": fixed.fixed,
            "StaticCache, torch.compile": compiled.compiled,
            AUTOTUNED: autotuned.fixed if device == "cpu" else autotuned.autotuned,
            OURS: scheduled.fixed,
            **({QUICK: quick.fixed} if quick is not None else {}),
        },
        fast,
        lowerings,
    )


def measure(size: Size, device: str, budget_s: float, rounds: int, first: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """One model.

    Args:
        first: told what a few rounds found, before ``torch.compile`` is waited for.
    """
    torch._dynamo.reset()
    runs, fast, lowerings = contestants(size, device, budget_s)
    expected = runs[EAGER]()
    if first is not None:
        some = {name: runs[name] for name in _AT_ONCE}
        rows = _rows(size, settled(size, some)[0], expected, _FIRST_ROUNDS)
        first({**_case(size, _FIRST_ROUNDS, rows, fast, lowerings, {}), UNFINISHED: True})
    runs, failed = settled(size, runs)
    return _case(size, rounds, _rows(size, runs, expected, rounds), fast, lowerings, failed)


def settled(size: Size, runs: dict[str, Callable[[], torch.Tensor]]) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, str]]:
    """Those of ``runs`` that answer, and why the others do not; all have compiled what they compile."""
    failed: dict[str, str] = {}
    for name, run in runs.items():
        try:
            # The first compiles, the second is of a settled process.
            run()
        except Exception as error:
            # What PyTorch cannot compile is no reason to know nothing of the others.
            if name in (EAGER, AGAIN, OURS, QUICK):
                raise
            failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            print(f"{size.name}, {name}: {failed[name]}")
    return {name: run for name, run in runs.items() if name not in failed}, failed


def _rows(size: Size, runs: dict[str, Callable[[], torch.Tensor]], expected: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    same = {name: bool(torch.equal(run(), expected)) for name, run in runs.items()}
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
        row = {"name": name, **beside(times[EAGER], column), "same_tokens": same[name]}
        rows.append({**row, "tokens_per_s": size.tokens / row["median_us"] * 1e6})
        print(f"{size.name}, {name}: {rows[-1]['tokens_per_s']:,.0f} tokens/s, {rows[-1]['speedup']:.2f}x, same tokens: {same[name]}")
    return rows


def _case(
    size: Size, rounds: int, rows: list[dict[str, Any]], fast: Any, lowerings: dict[str, str], failed: dict[str, str]
) -> dict[str, Any]:
    report = fast.report()
    return {
        **asdict(size),
        "prompt": _PROMPT,
        "rounds": rounds,
        "lowering": lowerings[OURS],
        "quick_lowering": lowerings.get(QUICK, ""),
        "schedule": report.schedule,
        "lanes": report.lanes,
        "steps_on_schedule": report.calls,
        "copied_back_bytes": report.shapes[0].copied_back_bytes,
        "failed": failed,
        "rows": rows,
    }


def main() -> int:
    parser = parser_of(__doc__, models=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tuning for each model")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds this call may take; what is left goes to the next call")
    arguments = parser.parse_args()
    sizes, budget_s, rounds = ON_CPU if arguments.device == "cpu" else SIZES, arguments.budget, arguments.rounds
    if arguments.smoke:
        sizes, budget_s, rounds = (Size("1 layer of 32", 1, 32, 4, 2, 64, 50, tokens=4),), 4.0, 2
    target = None if arguments.smoke and arguments.out is None else arguments.out or results_of(arguments.device) / "generate.json"
    call = Call(arguments.deadline, expect_s=4.0 * budget_s)
    limited = arguments.deadline < math.inf
    cases: dict[str, dict[str, Any]] = {}
    failed = False
    if limited and target is not None and (earlier := read_json(target)) is not None:
        cases = {case["name"]: case for case in earlier["cases"]}

    def keep(case: dict[str, Any]) -> None:
        cases[case["name"]] = case
        if target is not None:
            record(target, {"device": arguments.device, "threads": torch.get_num_threads(), "cases": list(cases.values())})

    for size in sizes:
        if size.name in cases and not cases[size.name].get(UNFINISHED):
            continue
        if not call.fits():
            return LEFT
        began = time.monotonic()
        if limited:
            os.environ["AUTOSCHED_COMPILE_TOTAL_S"] = f"{compile_total_s(call.left_s - _ANSWERS_S, budget_s):.0f}"
        try:
            keep(measure(size, arguments.device, budget_s, rounds, keep if limited else None))
        except Exception:
            traceback.print_exc()
            failed = True
            continue
        call.took(time.monotonic() - began)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
