"""The kernel benchmark's clock on a pretended device, and its arithmetic from times to figures."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from varlen_bench.harness.summary import Spread
from varlen_bench.kernels import report
from varlen_bench.kernels.measure import COPY, OURS, Result
from varlen_bench.kernels.timing import WARM, GpuTimer, copy_rate
from varlen_bench.ops.call import poison

CPU = torch.device("cpu")
# rows are appended to the files of earlier revisions
COLUMNS = (
    "gpu driver copy_gb_per_s op shape dtype system sets graph_us graph_us_p20 graph_us_p80 graph_passes"
    " eager_us eager_us_p20 eager_us_p80 eager_passes bytes gb_per_s copy_fraction tflops tokens_per_second"
    " vs_best_peer error note"
)


def result(system, graph, eager=None, *, op="masked_softmax", shape="a", moved=0, note=""):
    times = {
        name: time and Spread(time, time - 1, time + 1, 100)
        for name, time in (("graph", graph), ("eager", eager))
    }
    return Result(op, shape, "bfloat16", system, bytes_moved=moved, note=note, **times)


# the clock


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Make torch.cuda record what is asked of it: a pass takes 640 us, an L2 cache holds 1,000 bytes."""
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


def test_a_pass_has_so_many_sets_that_nothing_stays_in_the_cache(pretended_gpu):
    timer = GpuTimer(CPU)

    assert timer.num_sets(10_000) == 4
    assert timer.num_sets(500) == 8
    assert timer.num_sets(501) == 8
    assert timer.num_sets(1) == 64
    assert timer.num_sets(WARM) == 1


def test_a_graph_is_verified_on_memory_that_was_overwritten_and_its_time_is_of_one_call(
    pretended_gpu,
):
    timer = GpuTimer(CPU, samples=5)
    sets = [{"x": torch.ones(2)} for _ in range(64)]
    verified = []

    found = timer.graph(lambda inputs: inputs["x"] + 1, sets, 10_000, verify=verified.append)

    # nothing replays here, so the poison is still there, in every tensor of a result
    assert verified[0].isnan().all()
    assert poison((torch.ones(2, dtype=torch.int32), torch.ones(2)))[0].tolist() == [-7, -7]
    assert found == Spread(10.0, 10.0, 10.0, 5)
    # warmed up, then timed
    assert pretended_gpu.count("replay") == 1 + 3 + 5
    assert pretended_gpu[:2] == ["capture", "captured"]
    assert pretended_gpu[-1] == "reset"


def test_the_cache_is_swept_where_the_sets_do_not_fill_it(pretended_gpu, monkeypatch):
    timer = GpuTimer(CPU, samples=5)
    swept = []
    monkeypatch.setattr(timer, "_swept", SimpleNamespace(sum=lambda: swept.append(1)))
    sets = [{"x": torch.ones(2)}] * 4

    timer.eager(lambda inputs: inputs["x"], sets, moved=1000)
    assert swept == []
    timer.eager(lambda inputs: inputs["x"], sets, moved=999)
    assert len(swept) == 5
    timer.eager(lambda inputs: inputs["x"], sets, moved=WARM)
    assert len(swept) == 5


def test_a_copy_counts_bytes_read_and_written(pretended_gpu):
    # 8 sets of 500 bytes in 640 us
    assert copy_rate(GpuTimer(CPU), CPU, 250) == pytest.approx(2 * 250 / 80 / 1e3)


# reporting


def test_a_ratio_takes_the_fastest_right_peer_by_the_better_of_its_times():
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


def test_bench_figures_are_the_worst_of_all_shapes_and_missing_ones_are_not_made_up():
    beam = {"op": "beam_step", "shape": report.BEAM_SHAPE}
    found = [
        result(OURS, 10, moved=40_000_000),  # 4,000 GB/s
        result("torch", 12),
        result(OURS, 10, shape="c", moved=32_000_000),  # 3,200 GB/s
        # too small to count
        result(OURS, 10, shape="b", moved=31_000_000),
        result("torch", 11, shape="b"),
        result(OURS, 9.5, **beam),
        result("torch", 95, **beam),
        result("lightseq", 19, **beam),
    ]

    figures = report.bench_figures(found, "NVIDIA H200", 4000)

    assert figures == {
        "gpu": "NVIDIA_H200",
        "softmax_frac": 0.8,
        "layernorm_frac": None,
        "softmax_vs_best": 1.1,
        "layernorm_vs_best": None,
        "attention_vs_best": None,
        "encoder_vs_best": None,
        "beam_us": 9.5,
        "beam_vs_torch": 10.0,
    }


def test_rows_hold_rates_and_say_what_was_not_measured():
    found = [
        result(OURS, 10, 30, moved=40_000_000),
        result("torch", 20, 25),
        result("liger", None, note="not here: x"),
        result("liger", None, shape="b", note="not here: x"),
    ]

    made = report.csv_rows(found, gpu="G", driver="1", copy=5000)

    assert [row["system"] for row in made] == [OURS, "torch", "liger", "liger"]
    assert made[0]["gb_per_s"] == pytest.approx(4000)
    assert made[0]["copy_fraction"] == pytest.approx(0.8)
    assert made[0]["vs_best_peer"] == 2.0
    assert made[1]["vs_best_peer"] is None
    assert made[2]["graph_us"] is None
    assert {" ".join(row) for row in made} == {COLUMNS}
    assert report.missing(found) == ["masked_softmax, liger: not here: x (a and 1 more)"]
    assert report.table(found, "masked_softmax", 5000).row_count == 1
    assert report.listing(found, "masked_softmax").row_count == 4
