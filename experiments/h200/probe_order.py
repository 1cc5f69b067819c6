"""Time and order in a graph: P3 what making one costs, P4 and P5 what starts when, P6 what an edge costs, P13 what an early start saves."""

from __future__ import annotations

import contextlib
import importlib
import random
import time
from statistics import median
from typing import Any

from probe_bench import Answer, Bench, rank_correlation

from autosched.core.records import Failure
from autosched.device.cuda.limits import meet

KERNELS = r"""
extern "C" __global__ void stamped(unsigned long long* out, int slot, int time_ns) {
  unsigned long long start, now;
  unsigned int sm;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < (unsigned long long)time_ns);
  if (threadIdx.x == 0 && blockIdx.x == 0) { out[slot * 3] = start; out[slot * 3 + 1] = now; out[slot * 3 + 2] = sm; }
}
"""


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
                result = bench.capturer.recorder.record(lanes[:branches], body, bench.capturer.scratch_pool())
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
    # From one on, blocks of replays that nothing holds back time the host and not the device.
    share = median(row["launch_us"] / row["replay_us"] for row in data["four_branches_100"])
    return (
        "500 nodes: "
        + "; ".join(
            f"{shape} capture {row['capture_us'] / 1e3:.1f} ms, instantiate {row['instantiate_us'] / 1e3:.2f} ms, "
            f"launch {row['launch_us']:.0f} us, replay {row['replay_us'] / 500:.2f} us a node"
            for shape, row in last.items()
        )
        + f"; to launch 100 nodes in four branches the host takes {share:.2f} of the time of a replay"
    ), data


def _stamped() -> Any:
    import torch

    with contextlib.suppress(Exception):
        # PyTorch looks for NVRTC on the library path alone, where pip's package is not; once loaded it is found by name.
        importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc")
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
    # Starts in one tick of the device's clock tell no order.
    apart = median(len(set(row["start_ns"])) for row in data["thin"])
    urgent = median(row["priority_correlation"] for row in data["full_priorities"])
    return (
        f"rank correlation of start with creation: {thin:.2f} for thin kernels ({apart:.0f} different starts of {count}), {filling:.2f} "
        f"for kernels that fill the device; "
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
    lanes = bench.lanes(4)
    length = 200
    data: dict[str, Any] = {"length": length}
    for label, width, turns in (
        ("one_branch", 1, "beside"),
        # A line too, once the edges are gone that say nothing new: shows whether those cost anything.
        ("line_over_two_streams", 2, "line"),
        ("two_branches_beside", 2, "beside"),
        ("two_branches_crossing", 2, "crossing"),
        ("four_branches_beside", 4, "beside"),
        ("four_branches_crossing", 4, "crossing"),
    ):
        graph, _ = bench.capture(lanes[:width], lambda width=width, turns=turns: _steps(bench, lanes[:width], length, turns))
        bench.replay_us(graph, 5, 2)
        data[label] = bench.replay_us(graph, 20, 9)
        bench.backend.reset(graph)
    each = {label: median(data[label]) / length for label in data if label != "length"}
    two, four = (each[f"{name}_branches_crossing"] - each[f"{name}_branches_beside"] for name in ("two", "four"))
    return (
        f"a step takes {each['one_branch']:.2f} us in a chain on one branch, {each['line_over_two_streams']:.2f} us where it changes "
        f"streams at each; waiting for the other branch at every step adds {two:.2f} us, for three others {four:.2f} us"
    ), data


def _steps(bench: Bench, lanes: list[Any], length: int, turns: str) -> None:
    """Small kernels: one after the other, changing lanes (line), or one on every lane at each step, waiting (crossing) for the others'."""
    backend = bench.backend
    for turn in range(length):
        if turns == "line":
            lane, before = (lanes[place % len(lanes)] for place in (turn, turn - 1))
            if turn:
                bench.edge(before, lane)
            with backend.on(lane):
                backend.touch()
            continue
        if turns == "crossing" and turn:
            meet(backend, lanes)
        for lane in lanes:
            with backend.on(lane):
                backend.touch()


def p13(bench: Bench) -> Answer:
    import torch
    from probe_early_kernel import link

    backend, lane = bench.backend, bench.lanes(1)[0]
    length = 200
    data: dict[str, Any] = {"length": length}
    right: dict[str, bool] = {}
    for blocks in (1, 64):
        for label, early in (("whole", False), ("early", True)):
            buffers = [torch.zeros(blocks * 1024, device="cuda") for _ in range(2)]
            # Compiled and loaded outside of the capture.
            link[(blocks,)](*buffers, BLOCK=1024, EARLY=early, launch_pdl=early)
            torch.cuda.synchronize()

            def body(buffers: list[Any] = buffers, blocks: int = blocks, early: bool = early) -> None:
                with backend.on(lane):
                    buffers[0].zero_()
                    for turn in range(length):
                        source, target = buffers[turn % 2], buffers[1 - turn % 2]
                        link[(blocks,)](source, target, BLOCK=1024, EARLY=early, launch_pdl=early)

            graph, _ = bench.capture([lane], body)
            name = f"{label}_{blocks}_blocks"
            bench.replay_us(graph, 5, 2)
            data[name] = bench.replay_us(graph, 20, 9)
            data[f"{name}_early_edges"] = bench.bindings.early_edges(graph) if bench.bindings is not None else -1
            right[name] = bool((buffers[length % 2] == length).all())
            backend.reset(graph)
    data["right"] = right
    each = {name: round(median(data[name]) / length, 2) for name in right}
    edges = data["early_64_blocks_early_edges"]
    return f"microseconds a link of a chain of Triton kernels: {each}; {edges} edges of {length} are early; numbers right: {right}", data
