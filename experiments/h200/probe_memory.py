"""Memory of captures: P1 and P7 whose pool it comes from, P2 and P2r how much each rule of freeing holds."""

from __future__ import annotations

import random
from typing import Any

from probe_bench import Answer, Bench, chains

from autosched.core.graph import OpGraph
from autosched.core.records import Failure
from autosched.core.schedule import Schedule, sequential
from autosched.device.cuda.measure import CudaMeasurer
from autosched.device.cuda.stress import stress_plan
from autosched.runtime.cuda.audit import audit_graph
from autosched.runtime.cuda.lanes import CaptureOptions, LaneExecutor
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.plan import FreeRule, Step, make_plan
from autosched.verify.race_stress import plan_delays


def p1(bench: Bench) -> Answer:
    backend = bench.backend
    inside, outside = bench.lanes(2)
    origin = bench.capturer.streams.named("origin")
    pool = backend.new_pool()
    size = 1 << 20
    backend.synchronize()

    def allocate() -> Any:
        if bench.smoke:
            return backend.tensor(1, size)
        import torch

        return torch.ones(size, device="cuda", dtype=torch.uint8)

    import torch

    with backend.on(outside):
        allocate()  # cached for this stream: in a capture, cudaMalloc for a stream outside it is an error and ends the capture
    backend.synchronize()
    with torch.inference_mode(), backend.on(origin):
        graph = backend.begin_capture(pool)
        bench.edge(origin, inside)
        with backend.on(inside):
            joined = allocate()
            backend.touch()
        with backend.on(outside):
            stray = allocate()
        bench.edge(inside, origin)
        backend.end_capture(graph)
    spans = backend.pool_spans(pool, unused=False)

    def within(tensor: Any) -> bool:
        start = backend.span(tensor).start
        return any(span.start <= start < span.end for span in spans)

    data = {"joined_in_pool": within(joined), "not_joined_in_pool": within(stray), "segments": [[span.start, span.bytes] for span in spans]}
    if bench.bindings is not None:
        data["nodes"] = len(bench.bindings.read(graph)[0])
    backend.reset(graph)
    expected = data["joined_in_pool"] and not data["not_joined_in_pool"]
    return ("yes for the joined stream, no for the other, as expected" if expected else "NOT as expected: see data"), data


class _RecordStream(LaneExecutor):
    """Drops every value at its last launch, after telling the allocator which streams use it: what other systems do."""

    def __init__(self, *arguments: Any, graph: OpGraph, users: dict[int, list[int]]) -> None:
        super().__init__(*arguments)
        self._graph = graph
        self._users = users

    def launch(self, step: Step) -> None:
        super().launch(step)
        stream = self._stream(step)
        for value in self._graph.operators[step.operator].reads:
            if self._slots[value] is not None and value in self._users:
                self._slots[value].record_stream(stream)
                self._users[value].remove(step.operator)
                if not self._users[value]:
                    self._slots[value] = None

    def free(self, step: Step) -> None:
        pass


def _with_record_stream(bench: Bench, measurer: CudaMeasurer, schedule: Schedule) -> dict[str, Any]:
    """Peak of a capture that uses record_stream, and whether its outputs are right."""
    graph = measurer.graph
    users: dict[int, list[int]] = {}
    for operator in graph.operators:
        for value in operator.reads:
            if value in graph.producer and value not in graph.outputs:
                users.setdefault(value, []).append(operator.index)
    plan = make_plan(graph, schedule, FreeRule.HOLD_ALL)
    slots = measurer.program.new_slots(measurer.static)
    executor = _RecordStream(
        bench.backend, bench.capturer.streams, measurer.program, slots, CaptureOptions(), None, graph=graph, users=users
    )
    from autosched.runtime.walk import walk

    def body() -> list[Any]:
        walk(plan.steps, executor)
        return measurer.program.outputs(slots)

    before = bench.backend.allocated_bytes()
    bench.backend.reset_peak()
    sides = [bench.capturer.streams.lane(lane) for lane in range(plan.lanes)]
    graph_made, outputs = bench.capture(sides, body)
    slots.clear()
    peak = bench.backend.peak_bytes() - before
    wanted = measurer.reference(measurer.static)
    measurer.replay(graph_made)
    same = bench.backend.same(outputs, wanted)
    bench.backend.reset(graph_made)
    return {"peak_bytes": peak, "bitwise": same}


def p2(bench: Bench) -> Answer:
    measurer = bench.program()
    graph = measurer.graph
    schedule = chains(graph, 4)
    wanted = measurer.reference(measurer.static)
    data: dict[str, Any] = {"operators": len(graph), "lanes": schedule.lanes}
    for rule in (FreeRule.VECTOR_CLOCK, FreeRule.HOLD_ALL):
        made = measurer.capture(schedule, rule=rule, private=True)
        assert isinstance(made, GraphRunner), made
        pool = sum(span.bytes for span in bench.backend.pool_spans(made.pool, unused=False))
        same = bench.backend.same(measurer.outputs(made, measurer.static), wanted)
        data[rule.value] = {"peak_bytes": made.peak_bytes, "pool_bytes": pool, "bitwise": same}
        made.close()
    alone = measurer.capture(sequential(graph), private=True)
    assert isinstance(alone, GraphRunner), alone
    data["one_stream"] = {"peak_bytes": alone.peak_bytes}
    alone.close()
    if not bench.smoke:
        data["record_stream"] = _with_record_stream(bench, measurer, schedule)
    data["too_early"] = _too_early(bench, measurer)
    tight, loose = data["vector_clock"]["peak_bytes"], data["hold_all"]["peak_bytes"]
    return (
        f"vector clock holds {tight / 2**20:.1f} MiB, no frees {loose / 2**20:.1f}, one stream "
        f"{data['one_stream']['peak_bytes'] / 2**20:.1f}; frees that came too early: audit found {data['too_early']['audit']} of "
        f"{data['too_early']['tried']}, delays {data['too_early']['delays']}"
    ), data


def _too_early(bench: Bench, measurer: CudaMeasurer) -> dict[str, int]:
    graph = measurer.graph
    found = {"tried": 0, "audit": 0, "delays": 0, "both_agree": 0}
    for lanes in (2, 3, 4):
        schedule = chains(graph, lanes)
        plan = make_plan(graph, schedule, FreeRule.LAST_LAUNCH)
        options = CaptureOptions(observe=True)
        runner = bench.capturer.capture(measurer.program, plan, measurer.static, graph=graph, options=options)
        if isinstance(runner, Failure) or runner.captured is None:
            continue
        unsound = not audit_graph(graph, make_plan(graph, schedule), runner.captured).sound
        runner.close()
        delays = plan_delays(graph, schedule, 1000.0, random.Random(0))
        outcomes = list(stress_plan(measurer, plan, delays, [measurer.static], replays=2, seed=0))
        shown = any(not isinstance(item, Failure) and item.mismatches for item in outcomes)
        found["tried"] += 1
        found["audit"] += unsound
        found["delays"] += shown
        found["both_agree"] += unsound == shown
    return found


def p2r(bench: Bench) -> Answer:
    measurer = bench.program()
    made = _with_record_stream(bench, measurer, chains(measurer.graph, 4))
    return f"record_stream with reuse holds {made['peak_bytes'] / 2**20:.1f} MiB, bitwise equal: {made['bitwise']}", made


def p7(bench: Bench) -> Answer:
    import torch

    backend = bench.backend
    streams = bench.lanes(4)
    matrices = [torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in streams]
    with backend.on(bench.capturer.streams.named("warm-up")):
        matrices[0] @ matrices[0]
    pool = backend.new_pool()

    def body() -> list[Any]:
        made = []
        for stream, matrix in zip(streams, matrices, strict=True):
            with backend.on(stream):
                made.append(matrix @ matrix)
        return made

    result = bench.capturer.capture_script(streams, body, pool=pool)
    if isinstance(result, Failure):
        raise RuntimeError(result.detail)
    large = []
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["size"] >= 4 << 20 and block["state"].startswith("active"):
                owner = tuple(segment.get("segment_pool_id", ()))
                large.append({"bytes": block["size"], "stream": segment["stream"], "pool": list(owner), "private": owner == tuple(pool)})
    handles = {backend.handle(stream) for stream in streams}
    private = [item for item in large if item["private"]]
    mine = {item["stream"] for item in private} & handles
    data = {"large_blocks": large, "streams": sorted(handles)}
    backend.reset(result[0])
    sizes = sorted({item["bytes"] >> 20 for item in private})
    return f"{len(private)} blocks of {sizes} MiB lie in the private pool, on {len(mine)} of {len(streams)} streams", data
