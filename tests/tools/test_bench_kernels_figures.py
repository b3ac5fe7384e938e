"""The kernel benchmark's timer on a fake GPU, and the figures that it reports."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from varlen_bench.harness.summary import Spread
from varlen_bench.kernels import report
from varlen_bench.kernels.measure import COPY, OURS, Result
from varlen_bench.kernels.timing import WARM, GpuTimer, copy_rate
from varlen_bench.ops.call import poison

pytestmark = pytest.mark.full

CPU = torch.device("cpu")


def result(system, graph, eager=None, *, op="masked_softmax", shape="a", moved=0, note=""):
    times = {
        name: time and Spread(time, time - 1, time + 1, 100)
        for name, time in (("graph", graph), ("eager", eager))
    }
    return Result(op, shape, "bfloat16", system, bytes_moved=moved, note=note, **times)


# the timer


@pytest.fixture
def fake_gpu(monkeypatch):
    """Fake torch.cuda and return its log.

    A pass takes 640 us; the L2 cache has 1,000 bytes.
    """
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, other):
            return 0.64

    class Graph:
        def replay(self):
            log.append("replay")

        def reset(self):
            log.append("reset")

    @contextmanager
    def capture(graph, stream):
        log.append("capture")
        yield
        log.append("captured")

    fake = {
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1000),
        "Stream": lambda: None,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": Graph,
        "graph": capture,
        "Event": Event,
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return log


def test_the_sets_of_a_pass_exceed_the_cache_within_bounds(fake_gpu):
    sizes = (10_000, 501, 500, 1, WARM)

    assert [GpuTimer(CPU).num_sets(size) for size in sizes] == [4, 8, 8, 64, 1]


def test_a_graph_is_verified_on_poisoned_memory_and_the_time_is_per_call(fake_gpu):
    timer = GpuTimer(CPU, samples=5)
    sets = [{"x": torch.ones(2)} for _ in range(64)]
    verified = []

    found = timer.graph(lambda inputs: inputs["x"] + 1, sets, 10_000, verify=verified.append)

    # the fake replays nothing, so the result is still poisoned
    assert verified[0].isnan().all()
    assert poison((torch.ones(2, dtype=torch.int32), torch.ones(2)))[0].tolist() == [-7, -7]
    assert found == Spread(10.0, 10.0, 10.0, 5)
    # verified, warmed up, timed
    assert fake_gpu.count("replay") == 1 + 3 + 5
    assert fake_gpu[:2] == ["capture", "captured"]
    assert fake_gpu[-1] == "reset"


@pytest.mark.parametrize("moved, sweeps", [(1000, 0), (999, 5), (WARM, 0)])
def test_the_cache_is_swept_if_the_sets_do_not_fill_it(moved, sweeps, fake_gpu, monkeypatch):
    timer = GpuTimer(CPU, samples=5)
    swept = []
    monkeypatch.setattr(timer, "_sweep", SimpleNamespace(sum=lambda: swept.append(1)))

    timer.eager(lambda inputs: inputs["x"], [{"x": torch.ones(2)}] * 4, moved)

    assert len(swept) == sweeps


def test_a_copy_counts_bytes_read_and_written(fake_gpu):
    # 8 sets of 500 bytes in 640 us
    assert copy_rate(GpuTimer(CPU), CPU, 252) == pytest.approx(2 * 252 / 80 / 1e3)


# reporting


def test_a_ratio_uses_the_shortest_time_of_all_right_peers():
    found = [
        result(OURS, 10, 30),
        result("torch", 40, 50),
        result("compile", None, 15),
        result("wrong", None, note="wrong: an error of 1"),
        result(COPY, 1),
        result(OURS, 10, 30, shape="b"),
        result("torch", 8, 9, shape="b"),
    ]

    assert report.ratios(found, "masked_softmax") == [1.5, 0.8]
    assert report.ratios(found, "masked_softmax", without="compile") == [4.0, 0.8]
    title = report.table(found, "masked_softmax", 5000).title
    assert title.endswith("x best peer: 0.80 at worst, 1.10 in the geometric mean")


def test_bench_figures_are_the_worst_of_all_shapes_and_none_if_missing():
    beam = {"op": "beam_step", "shape": report.BEAM_SHAPE}
    found = [
        result(OURS, 10, moved=40_000_000),  # 4,000 GB/s
        result("torch", 12),
        result(OURS, 10, shape="c", moved=32_000_000),  # 3,200 GB/s
        # too small for the bandwidth
        result(OURS, 10, shape="b", moved=31_000_000),
        result("torch", 11, shape="b"),
        result(OURS, 9.5, **beam),
        result("torch", 95, **beam),
        result("lightseq", 19, **beam),
    ]

    figures = report.bench_figures(found, 4000)

    assert figures == {
        "softmax_frac": 0.8,
        "layernorm_frac": None,
        "softmax_vs_best": 1.1,
        "layernorm_vs_best": None,
        "attention_vs_best": None,
        "encoder_vs_best": None,
        "beam_us": 9.5,
        "beam_vs_torch": 10.0,
    }


def test_rows_have_rates_and_missing_times_are_listed():
    found = [
        result(OURS, 10, 30, moved=40_000_000),
        result("torch", 20, 25),
        result("liger", None, note="not available: x"),
        result("liger", None, shape="b", note="not available: x"),
    ]

    rows = report.csv_rows(found, copy=5000)

    assert [row["system"] for row in rows] == [OURS, "torch", "liger", "liger"]
    assert rows[0]["gb_per_s"] == pytest.approx(4000)
    assert rows[0]["copy_fraction"] == pytest.approx(0.8)
    assert rows[0]["vs_best_peer"] == 2.0
    assert rows[1]["vs_best_peer"] is None
    assert rows[2]["graph_us"] is None
    assert report.missing_times(found) == ["masked_softmax, liger: not available: x (a and 1 more)"]
    (line,) = report.table(found, "masked_softmax", 5000).lines
    assert line[:3] == ["a", "bfloat16", "10.0 | 30.0"]
    assert len(report.listing(found, "masked_softmax").lines) == 4
