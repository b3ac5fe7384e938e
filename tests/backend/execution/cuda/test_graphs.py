"""Captures on a stand-in for torch's CUDA graphs: what happens around the captured work."""

import gc
import weakref
from contextlib import nullcontext
from threading import Event
from typing import ClassVar

import pytest
import torch

from varlen.errors import ModelFaultError
from varlen.execution.cuda.graphs import CudaGraphs

MEGABYTE = 1_000_000


class FakeStream:
    def __init__(self, device):
        self.synchronized = 0

    def wait_stream(self, other):
        pass

    def synchronize(self):
        self.synchronized += 1


class FakeGraph:
    """Fails to end a capture whose work has failed, as torch does."""

    alive: ClassVar = weakref.WeakSet()

    def __init__(self):
        self.events = []
        FakeGraph.alive.add(self)

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.events.append("begin")

    def capture_end(self):
        self.events.append("end")
        if "fault" in self.events:
            raise RuntimeError("the capture was invalidated")

    def replay(self):
        self.events.append("replay")


@pytest.fixture
def graphs(monkeypatch):
    """Return the graphs of a GPU that torch pretends to have."""
    FakeGraph.alive.clear()
    fakes = {
        "Stream": FakeStream,
        "CUDAGraph": FakeGraph,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda _: None,
        "graph_pool_handle": lambda: (0, 1),
        "mem_get_info": lambda _: (30 * MEGABYTE, 100 * MEGABYTE),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return CudaGraphs(torch.device("cuda", 0))


def test_work_runs_once_before_its_capture_and_then_is_replayed(graphs):
    ran = []

    replay = graphs.capture(lambda: ran.append(len(FakeGraph.alive)))

    assert ran == [0, 1]
    replay()
    (graph,) = FakeGraph.alive
    assert graph.events == ["begin", "end", "replay"]


def test_no_graph_is_released_before_all_are(graphs):
    for _ in range(3):
        graphs.capture(lambda: None)
    # one of several that a failure left behind may not take the others' workspace along
    with pytest.raises(ZeroDivisionError):
        graphs.capture(failing_in_capture())
    gc.collect()
    assert len(FakeGraph.alive) == 4

    graphs.close()

    gc.collect()
    assert not FakeGraph.alive


def failing_in_capture():
    """Return work that fails the second time, when it is captured."""
    calls = []

    def work():
        calls.append(1)
        if len(calls) == 2:
            for graph in FakeGraph.alive:
                if graph.events == ["begin"]:
                    graph.events.append("fault")
            raise ZeroDivisionError("an op of this model")

    return work


def test_work_that_fails_in_a_capture_keeps_its_own_error(graphs):
    with pytest.raises(ZeroDivisionError, match="an op of this model") as raised:
        graphs.capture(failing_in_capture())

    assert raised.value.__cause__ is None
    # the capture was ended all the same
    assert any(graph.events == ["begin", "fault", "end"] for graph in FakeGraph.alive)


@pytest.mark.parametrize("is_on", [True, False])
def test_nothing_is_collected_during_a_capture(graphs, is_on):
    states, was_on = [], gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        graphs.capture(lambda: states.append(gc.isenabled()))
        with pytest.raises(ZeroDivisionError):
            graphs.capture(failing_in_capture())
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()
    assert states == [False, False]


def test_device_memory_in_use_is_what_is_not_free(graphs):
    assert graphs.used_bytes() == 70 * MEGABYTE


def test_a_load_ends_if_the_gpu_never_ends_captured_work(graphs, monkeypatch):
    go_on = Event()
    monkeypatch.setattr(FakeStream, "synchronize", lambda _: go_on.wait(10.0))
    hung = CudaGraphs(torch.device("cuda", 0), timeout=0.05)

    with pytest.raises(ModelFaultError, match=r"not ended its first work in 0.05 s \(device_tim"):
        hung.capture(lambda: None)

    go_on.set()
    assert len(FakeGraph.alive) == 0


@pytest.mark.parametrize("timeout", [0.0, 10.0])
def test_an_error_of_captured_work_passes_a_time_limit(graphs, monkeypatch, timeout):
    def fault(_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(FakeStream, "synchronize", fault)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        CudaGraphs(torch.device("cuda", 0), timeout).capture(lambda: None)
