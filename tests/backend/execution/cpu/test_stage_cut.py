"""The cut of a model, by bytes of weights or by measured time."""

from dataclasses import replace

import pytest
import torch

from varlen.config import EngineConfig
from varlen.execution.cpu import stage_cut
from varlen.execution.cpu.linear_paths import STEPS
from varlen.execution.cpu.stage_cut import choose_bounds
from varlen.models.blocks.attention import PackedAttention
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder
from varlen.program.recorder import Recorder
from varlen_kernels import cpu

CPU = torch.device("cpu")
# Two layers of this size have as many weights as the output layer.
SIZES = {"n_embd": 64, "n_inner": 256, "n_layer": 6, "n_head": 4, "vocab_size": 1536}
CONFIG = EngineConfig(device="cpu", dtype="fp32", pipeline_parallel=2)


@pytest.fixture
def load(make_checkpoint):
    """Return a function that records a GPT-2 and reads some of its layers."""
    checkpoint = Checkpoint.open(make_checkpoint("GPT2LMHeadModel", **SIZES))

    def record(layers):
        model = load_decoder(checkpoint, torch.float32, CPU, stage=layers)
        ops = Recorder()
        hidden = model.record(ops, PackedAttention())
        return ops.finish(model.record_logits(ops, hidden))

    return record


def bounds_of(load, folder, seconds, **settings):
    config = replace(CONFIG, cache_folder=str(folder), **settings)
    return choose_bounds(load, cpu, config, {"model": "m"}, use=STEPS, seconds=seconds)


@pytest.mark.parametrize("stages, expected", [(2, [0, 4, 6]), (3, [0, 2, 5, 6])])
def test_without_measurement_stages_have_weights_of_equal_size(load, tmp_path, stages, expected):
    assert bounds_of(load, tmp_path, 0, pipeline_parallel=stages) == expected


def test_a_cut_is_measured_once(load, tmp_path, monkeypatch):
    first = bounds_of(load, tmp_path, 3)
    assert first[0] == 0
    assert first[2] == 6

    monkeypatch.setattr(stage_cut, "_measure", pytest.fail)

    assert bounds_of(load, tmp_path, 3) == first


def test_stages_are_balanced_by_measured_seconds(load, tmp_path, monkeypatch):
    def slow_output(program, **_):
        # the last layer takes as long as the others together
        linear = [op.kernel == "linear" for op in program.ops]
        last = max(number for number, is_linear in enumerate(linear) if is_linear)
        return [sum(linear) - 1.0 if n == last else float(each) for n, each in enumerate(linear)]

    monkeypatch.setattr(stage_cut, "_measure", slow_output)

    # one layer at least is beside the output layer
    assert bounds_of(load, tmp_path, 3) == [0, 5, 6]


def test_only_linear_layers_take_time(load):
    from varlen.models.checkpoint.layers import StageLayers

    program = load(StageLayers())

    seconds = stage_cut._measure(program, cpu, STEPS, 3.0)

    for op, taken in zip(program.ops, seconds, strict=True):
        assert (taken > 0) == (op.kernel == "linear")
    # layers of one shape have one time
    assert len({taken for taken in seconds if taken}) == 5
