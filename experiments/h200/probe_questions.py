"""The probes themselves: each takes a bench and returns its answer in a sentence, and its raw data."""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

import numpy as np
from probe_bench import KERNELS, Bench, rank_correlation, spread

from autosched.core.graph import OpGraph
from autosched.core.records import Failure, PairRecord
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.device.base import Pair
from autosched.device.cuda.measure import CudaMeasurer
from autosched.device.cuda.pairs import measure_pair
from autosched.device.cuda.stress import stress_plan
from autosched.device.timing import noise_floor_pct
from autosched.runtime.cuda_graph import GraphRunner
from autosched.runtime.cuda_lanes import CaptureOptions, LaneExecutor
from autosched.runtime.plan import FreeRule, Step, make_plan
from autosched.verify.graph_audit import audit_graph
from autosched.verify.race_stress import plan_delays

Answer = tuple[str, dict[str, Any]]
ON_THE_DOUBLE = frozenset({"P1", "P2", "P3", "P6", "P9", "P11", "P12"})


def chains(graph: OpGraph, lanes: int) -> Schedule:
    """Each operator on the lane of a predecessor whose lane's end it is, else on the emptiest: wide and dependent on many waits."""
    ends: list[int] = [-1] * lanes
    lane = [0] * len(graph)
    for index in range(len(graph)):
        free = [place for place, end in enumerate(ends) if end in graph.predecessors[index]]
        lane[index] = free[0] if free else min(range(lanes), key=lambda place: (ends[place], place))
        ends[lane[index]] = index
    return make_schedule(graph, range(len(graph)), lane)


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


def p3(bench: Bench) -> Answer:
    backend = bench.backend
    lanes = bench.lanes(4)
    data: dict[str, Any] = {}
    for shape, branches in (("line", 1), ("four_branches", 4)):
        for nodes in (100, 500) if bench.smoke else (100, 500, 2000):
            rows = []
            for _ in range(3):
                marks = [time.perf_counter()]

                def body(nodes: int = nodes, branches: int = branches) -> None:
                    for turn in range(nodes):
                        with backend.on(lanes[turn % branches]):
                            backend.touch()

                begun = time.perf_counter()
                result = bench.capturer._record(lanes[:branches], body, bench.capturer.scratch_pool())
                marks.append(time.perf_counter())
                if isinstance(result, Failure):
                    raise RuntimeError(result.detail)
                graph = result[0]
                backend.instantiate(graph)
                marks.append(time.perf_counter())
                with backend.on(bench.capturer.streams.named("replay")):
                    backend.replay(graph)
                    backend.synchronize()
                    marks.append(time.perf_counter())
                    backend.replay(graph)
                    marks.append(time.perf_counter())
                    backend.synchronize()
                replay = median(bench.replay_us(graph, 20, 5))
                backend.reset(graph)
                names = ("capture_us", "instantiate_us", "first_launch_us", "launch_us")
                starts = [begun, *marks[1:-1]]
                rows.append({name: (end - start) * 1e6 for name, start, end in zip(names, starts, marks[1:], strict=True)})
                rows[-1]["replay_us"] = replay
            data[f"{shape}_{nodes}"] = rows
    last = {shape: data[f"{shape}_500"][-1] for shape in ("line", "four_branches")}
    return (
        "500 nodes: "
        + "; ".join(
            f"{shape} capture {row['capture_us'] / 1e3:.1f} ms, instantiate {row['instantiate_us'] / 1e3:.2f} ms, "
            f"launch {row['launch_us']:.0f} us, replay {row['replay_us'] / 500:.2f} us a node"
            for shape, row in last.items()
        )
    ), data


def _stamped() -> Any:
    import torch

    kernel = torch.cuda._compile_kernel(KERNELS, "stamped")  # type: ignore[attr-defined]
    # Its first launch loads it, which must not happen in a capture.
    kernel((1, 1, 1), (32, 1, 1), (torch.zeros(3, dtype=torch.int64, device="cuda"), 0, 1000))
    torch.cuda.synchronize()
    return kernel


def p4(bench: Bench) -> Answer:
    import torch

    backend, kernel, count = bench.backend, _stamped(), 8
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    rng = random.Random(0)
    data: dict[str, Any] = {"multiprocessors": multiprocessors}
    # Thin kernels could all start at once; a full one (one block of 1024 threads on every half multiprocessor) holds the others up.
    full = 2 * multiprocessors
    for label, blocks, priorities in (("thin", 1, False), ("full", full, False), ("full_priorities", full, True)):
        rows = []
        for _ in range(12):
            order = rng.sample(range(count), count)
            levels = [rng.randrange(4) if priorities else 0 for _ in range(count)]
            streams = [bench.capturer.streams.lane(place % 8, levels[place]) for place in range(count)]
            out = torch.zeros(count * 3, dtype=torch.int64, device="cuda")

            def body(order: list[int] = order, streams: list[Any] = streams, out: Any = out, blocks: int = blocks) -> None:
                for place in order:
                    with backend.on(streams[place]):
                        kernel((blocks, 1, 1), (1024, 1, 1), (out, place, 20_000), stream=streams[place])

            graph, _ = bench.capture(streams, body)
            starts = []
            for _ in range(5):
                bench.replay_us(graph, 1, 1)
                stamps = out.cpu().view(count, 3)
                base = int(stamps[:, 0].min())
                starts.append([int(stamps[place, 0]) - base for place in range(count)])
            typical = [median(row[place] for row in starts) for place in range(count)]
            created = [order.index(place) for place in range(count)]
            row = {"created": created, "priority": levels, "start_ns": typical, "rank_correlation": rank_correlation(created, typical)}
            if priorities:
                wanted = [-level * 100 + place for level, place in zip(levels, created, strict=True)]
                row["priority_correlation"] = rank_correlation(wanted, typical)
            rows.append(row)
            backend.reset(graph)
        data[label] = rows
    thin, filling = (median(row["rank_correlation"] for row in data[label]) for label in ("thin", "full"))
    urgent = median(row["priority_correlation"] for row in data["full_priorities"])
    return (
        f"rank correlation of start with creation: {thin:.2f} for thin kernels, {filling:.2f} for kernels that fill the device; "
        f"with (priority, creation) when priorities differ: {urgent:.2f}"
    ), data


def _parallel(bench: Bench) -> Answer:
    import torch

    backend, kernel = bench.backend, _stamped()
    data: dict[str, Any] = {"time_ns": 200_000, "graph": {}, "streams": {}}
    for count in (1, 2, 4, 8, 12, 16):
        streams = bench.lanes(count)
        out = torch.zeros(count * 3, dtype=torch.int64, device="cuda")

        def body(streams: list[Any] = streams, out: Any = out) -> None:
            for place, stream in enumerate(streams):
                with backend.on(stream):
                    kernel((1, 1, 1), (32, 1, 1), (out, place, 200_000), stream=stream)

        graph, _ = bench.capture(streams, body)
        for label, run in (("graph", lambda graph=graph: bench.replay_us(graph, 1, 1)), ("streams", body)):
            lengths = []
            for _ in range(7):
                backend.synchronize()
                run()
                backend.synchronize()
                stamps = out.cpu().view(count, 3)
                lengths.append(int(stamps[:, 1].max() - stamps[:, 0].min()))
            data[label][str(count)] = lengths
        backend.reset(graph)
    ratios = {label: {count: round(median(values) / 200_000, 2) for count, values in data[label].items()} for label in ("graph", "streams")}
    return f"makespan over one kernel's time, by kernels at once: graph {ratios['graph']}, streams {ratios['streams']}", data


def p5a(bench: Bench) -> Answer:
    return _parallel(bench)


def p5b(bench: Bench) -> Answer:
    return _parallel(bench)


def p6(bench: Bench) -> Answer:
    backend = bench.backend
    lanes = bench.lanes(4)
    length = 200
    data: dict[str, Any] = {"length": length}
    for label, width in (("one_branch", 1), ("two_branches", 2), ("four_branches", 4)):

        def body(width: int = width) -> None:
            previous = lanes[0]
            for turn in range(length):
                stream = lanes[turn % width]
                if stream is not previous:
                    bench.edge(previous, stream)
                with backend.on(stream):
                    backend.touch()
                previous = stream

        graph, _ = bench.capture(lanes[:width], body)
        bench.replay_us(graph, 5, 2)
        data[label] = bench.replay_us(graph, 20, 9)
        backend.reset(graph)
    each = {label: median(data[label]) / length for label in ("one_branch", "two_branches", "four_branches")}
    extra = each["two_branches"] - each["one_branch"]
    return f"a node takes {each['one_branch']:.2f} us in a chain on one branch; changing branches at every node adds {extra:.2f} us", data


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


def p8(bench: Bench) -> Answer:
    import torch

    if bench.bindings is None:
        return "cuda-bindings is not installed", {}
    backend = bench.backend
    stream = bench.lanes(1)[0]
    half = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    single = torch.randn(1024, 1024, device="cuda")
    image = torch.randn(1, 64, 56, 56, device="cuda")
    weight = torch.randn(64, 64, 3, 3, device="cuda")
    cases: dict[str, Any] = {
        "cublas_bf16": lambda: half @ half,
        "cublas_fp32": lambda: single @ single,
        "cudnn_convolution": lambda: torch.conv2d(image, weight, padding=1),
        "aten_pointwise": lambda: torch.relu(single),
        "aten_reduction": lambda: single.sum(1),
    }
    try:
        fused = torch.compile(lambda x: torch.relu(x * 2 + 1), dynamic=False)
        fused(single)
        cases["triton"] = lambda: fused(single)
    except Exception as error:  # the compiler may miss a C compiler here
        cases.pop("triton", None)
        missing = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        missing = ""
    data: dict[str, Any] = {"triton_missing": missing}
    for label, run in cases.items():
        with torch.inference_mode():
            run()

        def body(run: Any = run) -> Any:
            with backend.on(stream):
                return run()

        graph, _ = bench.capture([stream], body)
        kernels = bench.bindings.kernels(graph)
        data[label] = [
            {
                "grid": kernel.grid,
                "block": kernel.block,
                "registers": kernel.registers,
                "static_shared_bytes": kernel.static_shared_bytes,
                "dynamic_shared_bytes": kernel.dynamic_shared_bytes,
                "local_bytes": kernel.local_bytes,
                "resident_blocks": kernel.resident_blocks,
                "cluster": kernel.cluster,
                "priority": kernel.priority,
                **raw,
            }
            for kernel, raw in zip(kernels, _handles(bench, graph), strict=True)
        ]
        backend.reset(graph)
    told = {label: all(item["registers"] > 0 and item["resident_blocks"] > 0 for item in data[label]) for label in cases}
    return f"registers and residency known: {told}", data


def _handles(bench: Bench, graph: Any) -> list[dict[str, bool]]:
    """Whether each kernel node has a function, a library kernel, or both."""
    from autosched.runtime.captured import NodeKind

    reader = bench.bindings
    assert reader is not None
    found = []
    for node in reader._nodes(reader._graph(graph)):
        if reader._kind(node) is NodeKind.KERNEL:
            params = reader._call("cuGraphKernelNodeGetParams", node)
            found.append({"has_func": bool(int(params.func)), "has_kern": bool(int(params.kern))})
    return found


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
        floor = noise_floor_pct(columns[0], columns[1], np.random.default_rng(0))
        data[label] = {"floor_pct": floor, "first": spread(columns[0]), "second": spread(columns[1]), "times_us": columns}
        first.close()
        second.close()
    floors = {label: round(item["floor_pct"], 3) for label, item in data.items()}
    return f"two captures of one schedule, {rounds} interleaved rounds of ten replays: floor {floors} %", data


def p10(bench: Bench) -> Answer:
    if bench.bindings is None:
        return "cuda-bindings is not installed", {}
    from cuda.bindings import runtime

    stream = bench.lanes(1)[0]

    def body() -> None:
        with bench.backend.on(stream):
            bench.backend.touch()

    graph, _ = bench.capture([stream], body)
    data: dict[str, Any] = {"driver": bench.bindings.driver_version(), "has_function": hasattr(runtime, "cudaGraphNodeGetToolsId")}
    if data["has_function"]:
        node = bench.bindings._nodes(bench.bindings._graph(graph))[0]
        try:
            error, tools_id = runtime.cudaGraphNodeGetToolsId(runtime.cudaGraphNode_t(init_value=int(node)))
            data |= {"error": str(error), "tools_id": int(tools_id or 0)}
        except Exception as error:
            data |= {"error": f"{type(error).__name__}: {error}"}
    bench.backend.reset(graph)
    works = data["has_function"] and data.get("tools_id", 0) > 0
    return f"driver {data['driver']}: {'yes' if works else 'no'}", data


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
    inputs = list(measurer.static)
    with backend.on(measurer.replay_stream):
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
