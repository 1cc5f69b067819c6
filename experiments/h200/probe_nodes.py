"""What the nodes of a graph tell: P8 their launches, P10 their tools ids."""

from __future__ import annotations

from typing import Any

from probe_bench import Answer, Bench


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
    heads = torch.randn(3, 1, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
    cases: dict[str, Any] = {
        "cublas_bf16": lambda: half @ half,
        "cublas_fp32": lambda: single @ single,
        "cudnn_convolution": lambda: torch.conv2d(image, weight, padding=1),
        "attention_bf16": lambda: torch.nn.functional.scaled_dot_product_attention(*heads.unbind(0)),
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
    early: dict[str, int] = {}
    for label, run in cases.items():
        with torch.inference_mode():
            made = run()
            if label.startswith("attention"):
                # By cuDNN it is like the query, else heads come last but one: programs are captured where it is always the latter.
                data[f"{label}_strides"] = list(made.stride())

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

        def twice(run: Any = run) -> None:
            with backend.on(stream):
                run()
                run()

        graph, _ = bench.capture([stream], twice)
        early[label] = bench.bindings.early_edges(graph)
        backend.reset(graph)
    data["early_edges"] = early
    told = {label: all(item["registers"] > 0 and item["resident_blocks"] > 0 for item in data[label]) for label in cases}
    return f"registers and residency known: {told}; edges that let the next kernel start early, twice in a row: {early}", data


def _handles(bench: Bench, graph: Any) -> list[dict[str, bool]]:
    """Whether each kernel node has a function, a library kernel, or both."""
    from autosched.runtime.cuda.captured import NodeKind

    reader = bench.bindings
    assert reader is not None
    found = []
    for node in reader._nodes(reader._graph(graph)):
        if reader._kind(node) is NodeKind.KERNEL:
            params = reader._call("cuGraphKernelNodeGetParams", node)
            found.append({"has_func": bool(int(params.func)), "has_kern": bool(int(params.kern))})
    return found


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
