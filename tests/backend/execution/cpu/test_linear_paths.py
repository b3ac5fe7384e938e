"""The path of each linear layer: chosen by time, stored, equal in its results."""

import gc
import json
import logging
import weakref
from itertools import pairwise

import pytest
import torch

from tests.closeness import assert_close
from varlen.config import EngineConfig
from varlen.costs.store import CostStore
from varlen.execution.cpu.linear_paths import (
    PACKED,
    PANELS,
    PLAIN,
    LayerUse,
    choose_paths,
    measure_paths,
    paths_of,
    stored_paths,
    use_paths,
)
from varlen.memory.arena import Arena
from varlen.memory.planner import Layout
from varlen.program.program import PackedBatch
from varlen.program.recorder import Recorder
from varlen_kernels import cpu, reference

CPU = torch.device("cpu")
WIDTHS = (48, 96, 8)
KEY = {"device": "A CPU, 2 cores"}


class FakeKernels:
    """Ops on a virtual clock; a call takes milliseconds by op and width."""

    def __init__(self, milliseconds, call_seconds=0.0):
        self.milliseconds, self.call_seconds = milliseconds, call_seconds
        self.now = 0.0
        self.rows = []

    def clock(self):
        return self.now

    def linear(self, x, weight, *, out):
        self._run(PLAIN, x, weight.shape[1], out)

    def linear_packed(self, x, weight, *, out):
        self._run(PACKED, x, weight.shape[0], out)

    def linear_panels(self, x, weight, *, out):
        self._run(PANELS, x, weight.features, out)

    def _run(self, op, x, width, out):
        assert out.shape == (len(x), width)
        assert out.dtype == x.dtype
        self.now += self.call_seconds * (op == PANELS)
        if not len(x):
            return
        self.rows.append(len(x))
        seconds = self.milliseconds(op, width) / 1e3
        # the first call is slow, as compilation is
        self.now += 100 * seconds if len(self.rows) < 13 else seconds


def program_of(*widths, dtype=torch.float32, seed=0):
    """Return a program of linear layers one after another, and its weights."""
    random = torch.Generator().manual_seed(seed)
    ops = Recorder()
    x = ops.input("x", ("tokens", widths[0]), dtype)
    weights = []
    for fan_in, fan_out in pairwise(widths):
        weights.append(torch.randn(fan_in, fan_out, generator=random).to(dtype))
        bias = torch.randn(fan_out, generator=random).to(dtype)
        x = ops.linear(x, weights[-1], bias)
    return ops.finish(x), weights


def run(program, kernels, x):
    dims = {"tokens": len(x)}
    arena = Arena(Layout(program.buffers, 64), dims, CPU)
    with torch.inference_mode():
        (out,) = program.run(PackedBatch({"x": x}, dims), kernels, arena.allocate(dims))
    return out


def measured(kernels, *, seconds=1e9, rows=(4, 16)):
    program, _ = program_of(*WIDTHS)
    return measure_paths(
        program, kernels, use=LayerUse(rows, 1.03), seconds=seconds, clock=kernels.clock
    )


def kernels_of(program):
    return [op.kernel for op in program.ops]


@pytest.mark.parametrize("wide", [PLAIN, PACKED, PANELS])
@pytest.mark.parametrize("narrow", [PLAIN, PACKED, PANELS])
def test_each_shape_gets_its_fastest_path(wide, narrow):
    kernels = FakeKernels(lambda op, width: 1.0 if op == (wide if width == 96 else narrow) else 2.0)

    assert measured(kernels) == {"48x96": wide, "96x8": narrow}


def test_what_a_call_by_python_takes_does_not_count_for_panels():
    """They run as compiled steps, without such calls."""
    kernels = FakeKernels(lambda op, width: 1.0 if op == PANELS else 2.0, call_seconds=0.1)

    assert measured(kernels) == {"48x96": PANELS, "96x8": PANELS}


@pytest.mark.parametrize("other", [PLAIN, PACKED])
def test_a_path_that_is_hardly_faster_does_not_replace_the_default(other):
    kernels = FakeKernels(lambda op, _: 0.99 if op == other else 1.0)

    assert set(measured(kernels).values()) == {PANELS}


def test_without_compiled_ops_there_are_no_panels(monkeypatch):
    monkeypatch.setattr("varlen.execution.cpu.linear_paths.has_compiled_ops", lambda: False)

    assert paths_of(torch.float32) == (PLAIN, PACKED)
    assert PANELS not in paths_of(torch.bfloat16)


def test_numbers_of_rows_count_equally():
    class FewRowsPlain(FakeKernels):
        def _run(self, op, x, width, out):
            super()._run(op, x, width, out)
            # five times as fast for few rows, half as fast for many
            few, many = {PLAIN: (1, 40), PACKED: (5, 20), PANELS: (9, 30)}[op]
            self.now += (few if len(x) < 32 else many) / 1e3 if len(x) else 0.0

    kernels = FewRowsPlain(lambda *_: 0.0)

    assert set(measured(kernels, rows=(4, 64)).values()) == {PLAIN}


def test_without_time_for_enough_rounds_layers_keep_the_default():
    kernels = FakeKernels(lambda op, _: 1.0 if op == PACKED else 2.0)

    assert set(measured(kernels, seconds=0.5).values()) == {PANELS}
    assert len(kernels.rows) == 12


@pytest.mark.parametrize("paths", [{}, {"48x96": PACKED}, {"48x96": PANELS, "96x8": PACKED}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_all_paths_give_equal_results(paths, dtype, tokens):
    if not {*paths.values()} <= {*paths_of(dtype)}:
        pytest.skip("this CPU does not multiply bf16 in this way")
    program, _ = program_of(*WIDTHS, dtype=dtype)
    x = torch.randn(tokens, WIDTHS[0], generator=torch.Generator().manual_seed(1)).to(dtype)

    changed = use_paths(program, paths, PLAIN)

    assert kernels_of(changed) == [paths.get(shape, PLAIN) for shape in ("48x96", "96x8")]
    expected = run(program, reference, x).float()
    roundings = sum(WIDTHS) if dtype == torch.float32 else 8
    assert_close(run(changed, cpu, x).float(), expected, roundings=roundings, dtype=dtype)


def test_a_packed_program_holds_no_plain_weights():
    program, weights = program_of(*WIDTHS)
    alive = [weakref.ref(weight) for weight in weights]

    program = use_paths(program, {"48x96": PACKED}, PLAIN)
    weights.clear()
    gc.collect()

    assert [reference() is None for reference in alive] == [True, False]
    assert program.ops[0].operands[1].shape == (96, 48)


@pytest.mark.parametrize("has_reader", [False, True], ids=["last", "sum-is-read"])
def test_rows_of_16_bits_are_widened_before_the_last_norm_in_fp32(has_reader):
    ops, weight = Recorder(), torch.rand(8)
    x, y = (ops.input(name, ("tokens", 8), torch.bfloat16) for name in "xy")
    total, normed = ops.residual_layer_norm(x, y, weight, None, eps=1e-5)
    outputs = [ops.to_fp32(total), normed] if has_reader else [normed]
    program = ops.finish(*outputs)

    changed = use_paths(program, {})

    widened = [] if has_reader else ["to_fp32", "to_fp32"]
    assert kernels_of(changed)[: 1 + len(widened)] == [*widened, "residual_layer_norm"]
    assert changed.outputs == program.outputs
    assert changed.ops[len(widened)].results[1] == normed


def test_layers_that_share_a_weight_share_the_packed_one():
    ops = Recorder()
    x, weight = ops.input("x", ("tokens", 8), torch.float32), torch.randn(8, 8)
    program = ops.finish(ops.linear(ops.linear(x, weight, None), weight, None))

    first, second = use_paths(program, {}, PACKED).ops

    assert first.operands[1] is second.operands[1]


def test_paths_are_measured_once_and_then_read(tmp_path, caplog):
    caplog.set_level(logging.INFO, "varlen")
    paths, count = {"48x96": PACKED, "96x8": PLAIN}, []

    def measure():
        count.append(1)
        return paths

    for _ in range(2):
        assert stored_paths(CostStore(tmp_path), KEY, measure) == paths
    stored_paths(CostStore(tmp_path), {**KEY, "threads": "2"}, measure)

    assert len(count) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "linear layers, from the cache: 48x96 linear_packed, 96x8 linear"
    ]


@pytest.mark.parametrize("text", ["[]", "7", '{"48x96": 1}', "no JSON"])
def test_damaged_paths_are_measured_again(tmp_path, text, caplog):
    store, paths = CostStore(tmp_path), {"48x96": PACKED}
    store.save_texts(KEY, paths)
    (file,) = tmp_path.glob("texts_*.json")
    file.write_text(f'{{"key": {json.dumps(KEY)}, "texts": {text}}}')

    assert stored_paths(CostStore(tmp_path), KEY, lambda: paths) == paths
    assert "has a damaged entry" in caplog.text
    assert store.load_texts(KEY) == paths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_without_time_to_measure_every_layer_gets_the_default(tmp_path, dtype):
    config = EngineConfig(cache_folder=str(tmp_path / "cache"))
    program, _ = program_of(*WIDTHS, dtype=dtype)

    program = choose_paths(
        program, cpu, config, KEY, use=LayerUse((4,), 1.03), threads=1, seconds=0.0
    )

    assert set(kernels_of(program)) == {paths_of(dtype)[-1]}
    assert not (tmp_path / "cache").exists()


def test_kernels_without_packed_layers_run_plain_ones(tmp_path):
    config = EngineConfig(cache_folder=str(tmp_path))
    program, _ = program_of(*WIDTHS)

    assert (
        choose_paths(
            program, reference, config, KEY, use=LayerUse((4,), 1.03), threads=1, seconds=1.0
        )
        is program
    )


def test_a_measurement_uses_the_given_threads_and_is_stored(tmp_path):
    config = EngineConfig(cache_folder=str(tmp_path))
    program, _ = program_of(*WIDTHS)
    threads, before = [], torch.get_num_threads()

    class Watched:
        def __getattr__(self, name):
            threads.append(torch.get_num_threads())
            return getattr(cpu, name)

    def choose(kernels):
        chosen = choose_paths(
            program, kernels, config, KEY, use=LayerUse((4,), 1.03), threads=1, seconds=1.0
        )
        return kernels_of(chosen)

    first = choose(Watched())

    assert set(threads) <= {1, before}
    assert 1 in threads
    assert torch.get_num_threads() == before
    assert choose(cpu) == first
