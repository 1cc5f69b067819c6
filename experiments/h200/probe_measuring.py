"""Measuring itself: P9 the noise floor, P11 who of a pair is slowed, P12 what a candidate costs, P14 what idling does to the clock."""

from __future__ import annotations

import itertools
import random
import time
from statistics import median
from typing import Any

from probe_bench import Answer, Bench, chains, spread

from autosched.core.records import PairRecord
from autosched.core.schedule import sequential
from autosched.device.base import Pair
from autosched.device.cuda.pairs import measure_pair
from autosched.device.cuda.waking import Waker
from autosched.device.timing import noise_floor_pct
from autosched.runtime.cuda.key import fastest_clock_mhz
from autosched.runtime.cuda.runner import GraphRunner


def p9(bench: Bench) -> Answer:
    measurer = bench.program()
    rounds = 60 if not bench.smoke else 7
    schedule = chains(measurer.graph, 3)
    data: dict[str, Any] = {}
    for label, plan in (("one_stream", sequential(measurer.graph)), ("three_lanes", schedule)):
        first, second = (measurer.capture(plan) for _ in range(2))
        assert isinstance(first, GraphRunner), first
        assert isinstance(second, GraphRunner), second
        columns: list[list[float]] = [[], []]
        rng = random.Random(1)
        for runner in (first, second):
            bench.replay_us(runner._graph, 20, 3)
        for _ in range(rounds):
            for place in rng.sample(range(2), 2):
                runner = (first, second)[place]
                columns[place] += bench.replay_us(runner._graph, 10, 1)
        floor = noise_floor_pct(columns[0], columns[1])
        data[label] = {"floor_pct": floor, "first": spread(columns[0]), "second": spread(columns[1]), "times_us": columns}
        first.close()
        second.close()
    floors = {label: round(item["floor_pct"], 3) for label, item in data.items()}
    return f"two captures of one schedule, {rounds} interleaved rounds of ten replays: floor {floors} %", data


def p11(bench: Bench) -> Answer:
    measurer = bench.program()
    graph = measurer.graph
    count = 6 if bench.smoke else 40
    free = [(a, b) for a in range(len(graph)) for b in range(a + 1, len(graph)) if graph.independent(a, b)]
    free.sort(key=lambda pair: -min(graph.operators[pair[0]].flops, graph.operators[pair[1]].flops))
    rows, failures = [], 0
    begin = time.monotonic()
    for a, b in free[:count]:
        if time.monotonic() - begin > 30:
            break
        for first, last in ((a, b), (b, a)):
            made = measure_pair(measurer, Pair(first, last), 7)
            if isinstance(made, PairRecord):
                rows.append(
                    {
                        "first": graph.operators[first].kind,
                        "last": graph.operators[last].kind,
                        "solo_first_us": made.solo_first_us,
                        "solo_last_us": made.solo_last_us,
                        "slowdown_first": made.slowdown_first,
                        "slowdown_last": made.slowdown_last,
                        "makespan_ratio": made.makespan_ratio,
                    }
                )
            else:
                failures += 1
    data: dict[str, Any] = {"pairs": rows, "failures": failures}
    if not rows:
        return "no pair could be measured", data
    firsts, lasts = [row["slowdown_first"] for row in rows], [row["slowdown_last"] for row in rows]
    worse = sum(last > first for first, last in zip(firsts, lasts, strict=True)) / len(rows)
    ratio = median(row["makespan_ratio"] for row in rows)
    return (
        f"median slowdown of the first {median(firsts):.2f}, of the last {median(lasts):.2f}; the last is slowed more in {worse:.0%} of "
        f"{len(rows)} runs; median makespan ratio {ratio:.2f}"
    ), data


def p12(bench: Bench) -> Answer:
    measurer = bench.program()
    schedule = chains(measurer.graph, 4)
    backend = bench.backend
    captures, measured, calls, bare = [], [], [], []
    for _ in range(5):
        begin = time.perf_counter()
        runner = measurer.capture(schedule)
        captures.append((time.perf_counter() - begin) * 1e6)
        assert isinstance(runner, GraphRunner), runner
        runner.close()
    for _ in range(3):
        begin = time.perf_counter()
        list(measurer.schedules([schedule], 7, False, 0.0, 0))
        measured.append((time.perf_counter() - begin) * 1e6)
    runner = measurer.capture(schedule)
    assert isinstance(runner, GraphRunner), runner
    with backend.on(measurer.replay_stream):
        # A caller's own: a tensor that is copied to itself is not copied.
        inputs = backend.clone(measurer.static)
        for turn in range(220):
            for column, run in ((calls, lambda: runner(inputs)), (bare, runner.replay)):
                backend.synchronize()
                begin = time.perf_counter()
                run()
                backend.synchronize()
                if turn >= 20:
                    column.append((time.perf_counter() - begin) * 1e6)
    runner.close()
    data = {"operators": len(measurer.graph), "capture_us": captures, "candidate_us": measured, "call_us": calls, "bare_replay_us": bare}
    over = median(calls) - median(bare)
    return (
        f"{len(measurer.graph)} operators: capture and instantiation {median(captures) / 1e3:.1f} ms, one candidate measured in "
        f"{median(measured) / 1e3:.0f} ms, a call with copies in and out takes {over:.1f} us more than the bare graph"
    ), data


def p14(bench: Bench) -> Answer:
    backend, stream = bench.backend, bench.capturer.streams.named("replay")
    fastest_mhz = fastest_clock_mhz()

    def clocks_mhz(spins: int, spin_us: float = 500.0) -> list[float]:
        """Of kernels one after the other that each count as many cycles as the fastest clock makes in ``spin_us``."""
        events = [backend.new_event(timing=True) for _ in range(spins + 1)]
        with backend.on(stream):
            backend.record(events[0], stream)
            for event in events[1:]:
                backend.sleep(spin_us)
                backend.record(event, stream)
        backend.synchronize()
        pairs = itertools.pairwise(events)
        return [fastest_mhz * spin_us / backend.elapsed_us(before, after) for before, after in pairs]

    data: dict[str, Any] = {"fastest_mhz": fastest_mhz, "after_work": clocks_mhz(10), "idle": {}, "woken": {}}
    for idle_s in (0.03, 0.1, 0.3, 1.0, 3.0):
        for label in ("idle", "woken"):
            clocks_mhz(400)
            time.sleep(idle_s)
            if label == "woken":
                Waker(backend, lambda: stream, 0.0).wake()
            data[label][str(idle_s)] = clocks_mhz(10)
    time.sleep(3.0)
    data["rising"] = clocks_mhz(400)
    steady = median(data["after_work"])
    shares = {label: {idle: round(row[0] / steady, 2) for idle, row in data[label].items()} for label in ("idle", "woken")}
    slow = [place for place, clock in enumerate(data["rising"]) if clock < 0.98 * steady]
    return (
        f"{steady:.0f} MHz of {fastest_mhz:.0f} right after heavy work; the first half millisecond after so many idle seconds runs at "
        f"{shares['idle']} of that, after waking at {shares['woken']}; spinning alone it is there after "
        f"{(slow[-1] + 1 if slow else 0) * 0.5:.0f} ms"
    ), data
