"""What the emulator claims of capture, errors and memory, through the real PyTorch; run under run.py, and skipped elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._mode_utils import no_dispatch

EMULATED = torch.cuda.is_available() and torch.cuda.get_device_name().startswith("Emulated")
pytestmark = pytest.mark.skipif(not EMULATED, reason="runs on the emulated device only: use run.py")


class Capture:
    """One capture on a stream of its own, with what it began with."""

    def __init__(self, mode: str = "thread_local") -> None:
        torch.cuda.synchronize()
        self.stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self.stream):
            self.graph.capture_begin(capture_error_mode=mode)

    def end(self) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self.stream):
            self.graph.capture_end()
        return self.graph

    def fork(self) -> torch.cuda.Stream:
        side = torch.cuda.Stream()
        side.wait_event(self.stream.record_event())
        return side

    def join(self, side: torch.cuda.Stream) -> None:
        self.stream.wait_event(side.record_event())

    def launch(self, stream: torch.cuda.Stream | None = None) -> None:
        with torch.cuda.stream(stream or self.stream):
            torch.ones(8, device="cuda")


@pytest.fixture
def capture() -> Capture:
    return Capture()


def driver() -> object:
    return pytest.importorskip("cuda.bindings.driver")


def edges(graph: torch.cuda.CUDAGraph) -> list[tuple[int, int]]:
    """As positions of the nodes in the order in which they were captured."""
    cuda = driver()
    handle = cuda.CUgraph(init_value=graph.raw_cuda_graph())
    count = cuda.cuGraphGetNodes(handle, 0)[-1]
    place = {int(node): index for index, node in enumerate(cuda.cuGraphGetNodes(handle, count)[1])}
    count = cuda.cuGraphGetEdges(handle, 0)[-1]
    if not count:
        return []
    _, before, after, _, _ = cuda.cuGraphGetEdges(handle, count)
    return [(place[int(a)], place[int(b)]) for a, b in zip(before, after, strict=True)]


def test_memory_has_a_limit_and_comes_back() -> None:
    # Before any capture fails: after one, PyTorch 2.11 keeps what it caches.
    before = torch.cuda.mem_get_info()[0]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, device="cuda")
    held = torch.empty(1 << 28, device="cuda")
    assert torch.cuda.mem_get_info()[0] <= before - (1 << 28)
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before


def test_one_stream_is_a_chain(capture: Capture) -> None:
    for _ in range(3):
        capture.launch()
    assert edges(capture.end()) == [(0, 1), (1, 2)]


def test_fork_and_join_are_edges(capture: Capture) -> None:
    capture.launch()
    side = capture.fork()
    capture.launch(side)
    capture.launch()
    capture.join(side)
    capture.launch()
    assert sorted(edges(capture.end())) == [(0, 1), (0, 2), (1, 3), (2, 3)]


def test_an_unjoined_stream_loses_the_capture(capture: Capture) -> None:
    capture.launch()
    capture.launch(capture.fork())
    with pytest.raises(RuntimeError, match="unjoined"):
        capture.end()
    torch.cuda.synchronize()  # and the streams are free again


def test_work_after_the_join_is_unjoined(capture: Capture) -> None:
    side = capture.fork()
    capture.launch(side)
    capture.join(side)
    capture.launch(side)
    with pytest.raises(RuntimeError, match="unjoined"):
        capture.end()


def test_an_event_from_outside_may_not_be_waited_for(capture: Capture) -> None:
    outside = torch.cuda.Stream().record_event()
    capture.launch()
    with pytest.raises(RuntimeError, match="uncaptured work"):
        capture.stream.wait_event(outside)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture.end()


@pytest.mark.parametrize("ask", [torch.cuda.Event.query, torch.cuda.Event.synchronize])
def test_a_captured_event_has_no_state(capture: Capture, ask: Callable[[torch.cuda.Event], object]) -> None:
    capture.launch()
    event = capture.stream.record_event()
    with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
        ask(event)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture.end()


@pytest.mark.parametrize("call", [torch.cuda.synchronize, lambda: torch.cuda.Stream().synchronize(), lambda: torch.cuda.Event().query()])
def test_what_waits_is_forbidden(capture: Capture, call: Callable[[], object]) -> None:
    capture.launch()
    if call is not torch.cuda.synchronize:
        call = prepared(call)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        call()
    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture.end()


def prepared(call: Callable[[], object]) -> Callable[[], object]:
    """An event that was never recorded answers without asking the driver, so record it first."""
    event = torch.cuda.Event()

    def recorded() -> object:
        event.record(torch.cuda.Stream())
        return event.query()

    return recorded if call.__code__.co_names[-1] == "query" else call


def test_another_thread_may_wait_in_a_thread_local_capture_only() -> None:
    event = torch.cuda.Stream().record_event()
    for mode, allowed in (("thread_local", True), ("global", False)):
        capture = Capture(mode)
        capture.launch()
        errors: list[BaseException] = []

        def ask(errors: list[BaseException] = errors) -> None:
            try:
                event.query()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert bool(errors) is not allowed
        if allowed:
            capture.end()
        else:
            with pytest.raises(RuntimeError, match="previous error during capture"):
                capture.end()


@pytest.mark.parametrize(
    ("mode", "instantiated", "ends"), [("thread_local", True, False), ("global", False, False), ("global", True, True)]
)
def test_a_graph_that_another_thread_frees_ends_a_global_capture(mode: str, instantiated: bool, ends: bool) -> None:
    other = Capture()
    other.launch()
    freed = other.end()
    if instantiated:
        freed.instantiate()
    capture = Capture(mode)
    capture.launch()
    thread = threading.Thread(target=freed.reset)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="previous error during capture") if ends else contextlib.nullcontext():
        capture.end()


def test_a_capture_ends_in_its_thread_and_on_its_stream() -> None:
    cuda = driver()
    stream, other = (torch.cuda.Stream() for _ in range(2))
    handle = cuda.CUstream(stream.cuda_stream)
    found: list[int] = []
    assert cuda.cuStreamBeginCapture(handle, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)[0] == 0
    thread = threading.Thread(target=lambda: found.append(int(cuda.cuStreamEndCapture(handle)[0])))
    thread.start()
    thread.join()
    assert found == [908]
    other.wait_event(stream.record_event())
    assert int(cuda.cuStreamEndCapture(cuda.CUstream(other.cuda_stream))[0]) == 903
    assert int(cuda.cuStreamEndCapture(handle)[0]) == 901
    torch.cuda.synchronize()


def test_two_captures_do_not_merge() -> None:
    first, second = Capture("relaxed"), torch.cuda.Stream()
    first.launch()
    cuda = driver()
    other = cuda.CUstream(second.cuda_stream)
    assert cuda.cuStreamBeginCapture(other, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)[0] == 0
    with pytest.raises(RuntimeError, match="merge"):
        second.wait_event(first.stream.record_event())
    assert int(cuda.cuStreamEndCapture(other)[0]) == 901
    with pytest.raises(RuntimeError, match="previous error during capture"):
        first.end()


def test_copies_happen_at_the_replay() -> None:
    source = torch.arange(4.0).cuda()
    target = torch.zeros(4, device="cuda")
    capture = Capture()
    with torch.cuda.stream(capture.stream):
        target.copy_(source)
    graph = capture.end()
    assert target.tolist() == [0.0] * 4
    graph.replay()
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_times_are_those_of_the_virtual_clock() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(1_980_000)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(1.0, rel=0.01)


def test_branches_of_a_graph_overlap() -> None:
    def measured(branches: int) -> float:
        capture = Capture()
        sides = [capture.fork() for _ in range(branches)]
        for side in sides:
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_980_000)
        for side in sides:
            capture.join(side)
        graph = capture.end()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    assert measured(4) == pytest.approx(measured(1), rel=0.05)


def test_external_events_are_nodes_with_times(capture: Capture) -> None:
    marks = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]
    with torch.cuda.stream(capture.stream):
        marks[0].record()
        torch.cuda._sleep(1_980_000)
        marks[1].record()
    graph = capture.end()
    graph.replay()
    torch.cuda.synchronize()
    assert marks[0].elapsed_time(marks[1]) == pytest.approx(1.0, rel=0.01)


def test_priorities_reach_the_nodes() -> None:
    cuda = driver()
    urgent = torch.cuda.Stream(priority=-2)
    capture = Capture()
    urgent.wait_event(capture.stream.record_event())
    capture.launch(urgent)
    capture.join(urgent)
    graph = capture.end()
    _, nodes, _ = cuda.cuGraphGetNodes(cuda.CUgraph(init_value=graph.raw_cuda_graph()), 1)
    error, value = cuda.cuGraphKernelNodeGetAttribute(nodes[0], cuda.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY)
    assert error == 0
    assert value.priority == -2


def test_kernels_of_a_library_are_no_functions() -> None:
    cuda = driver()
    x = torch.randn(8, 8, device="cuda")
    torch.mm(x, x)
    capture = Capture()
    with torch.cuda.stream(capture.stream):
        torch.mm(x, x)
    graph = capture.end()
    handle = cuda.CUgraph(init_value=graph.raw_cuda_graph())
    count = cuda.cuGraphGetNodes(handle, 0)[-1]
    found = [cuda.cuGraphKernelNodeGetParams(node)[1] for node in cuda.cuGraphGetNodes(handle, count)[1]]
    (product,) = [params for params in found if int(params.kern)]
    assert not int(product.func)
    registers = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
    assert cuda.cuFuncGetAttribute(registers, cuda.CUfunction(init_value=int(product.kern)))[0] == cuda.CUresult.CUDA_ERROR_INVALID_HANDLE
    error, function = cuda.cuKernelGetFunction(product.kern)
    assert error == 0
    assert cuda.cuFuncGetAttribute(registers, function) == cuda.cuKernelGetAttribute(registers, product.kern, cuda.CUdevice(0))


def test_operators_have_their_values() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16, device="cuda")
    weight = torch.randn(4, 16, device="cuda")
    assert torch.allclose(torch.nn.functional.linear(x, weight).cpu(), torch.nn.functional.linear(x.cpu(), weight.cpu()))
    assert torch.equal(x.sum(1).relu().cpu(), x.cpu().sum(1).relu())
    assert (x[x > 0] > 0).all()


def test_an_operator_has_its_value_beside_a_mode() -> None:
    """As Inductor calls them to time them. ``bmm`` is one whose kernel is written in Python from PyTorch 2.13 on."""
    x, y = torch.randn(2, 3, 4, device="cuda"), torch.randn(2, 4, 5, device="cuda")
    with FakeTensorMode(), no_dispatch():
        made = torch.bmm(x, y)
    assert torch.allclose(made.cpu(), torch.bmm(x.cpu(), y.cpu()))


def test_a_product_whose_result_is_wider_has_its_value() -> None:
    x, y, made = torch.randn(2, 3, 4, device="cuda"), torch.randn(2, 4, 5, device="cuda"), torch.zeros(2, 3, 5, device="cuda")
    wanted = torch.bmm(x.bfloat16().cpu().float(), y.bfloat16().cpu().float())
    assert torch.allclose(torch.bmm(x.bfloat16(), y.bfloat16(), out_dtype=torch.float32).cpu(), wanted)
    torch.bmm(x.bfloat16(), y.bfloat16(), out_dtype=torch.float32, out=made)
    assert torch.allclose(made.cpu(), wanted)


def test_float32_is_rounded_to_tf32_where_pytorch_lets_it() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 16, 8, 8), torch.randn(4, 16, 3, 3)
    exact = torch.conv2d(x.double(), weight.double()).float()

    def error() -> float:
        return float((torch.conv2d(x.cuda(), weight.cuda()).cpu() - exact).abs().max())

    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = True
        assert 1e-4 < error() < 1e-1
        torch.backends.cudnn.allow_tf32 = False
        assert error() < 1e-4
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert before  # as PyTorch is set when nobody sets anything


def test_memory_that_nobody_has_written_is_not_zero() -> None:
    """As on a GPU: what reads it unwritten must not pass here."""
    assert torch.empty(1 << 20, device="cuda").isnan().all()
    assert (torch.empty(1 << 20, dtype=torch.int64, device="cuda") == -1).all()


def test_a_replay_computes_what_the_inputs_are_then() -> None:
    x = torch.zeros(4, device="cuda")
    capture = Capture()
    with torch.cuda.stream(capture.stream):
        y = (x + 1) * 2
    graph = capture.end()
    assert y.isnan().all()  # nothing is written there yet
    for value in (3.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value + 2] * 4


def test_a_missing_edge_gives_a_wrong_value() -> None:
    def result(wait: bool) -> float:
        x = torch.zeros(4, device="cuda")
        capture = Capture()
        producer, consumer = capture.fork(), capture.fork()
        with torch.cuda.stream(producer):
            torch.cuda._sleep(1_000_000)
            x.fill_(7.0)
        if wait:
            consumer.wait_event(producer.record_event())
        with torch.cuda.stream(consumer):
            y = x * 2
        capture.join(producer)
        capture.join(consumer)
        capture.end().replay()
        return float(y[0])

    assert result(wait=True) == 14.0
    assert result(wait=False) == 0.0
