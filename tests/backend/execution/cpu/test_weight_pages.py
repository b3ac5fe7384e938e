"""Packed weights move into one piece of memory and keep their numbers."""

import torch

from varlen.execution.cpu.linear_paths import in_large_pages, use_paths
from varlen.program.recorder import Recorder
from varlen_kernels.cpu.bodies.panel_layout import PanelWeight


def program_of(*weights):
    ops = Recorder()
    x = ops.input("x", ("tokens", len(weights[0])), torch.float32)
    for weight in weights:
        x = ops.linear(x, weight, None)
    return ops.finish(x)


def packed_weights(program):
    return [op.operands[1] for op in program.ops if isinstance(op.operands[1], PanelWeight)]


def test_weights_keep_their_numbers_and_lie_in_one_piece():
    first, second = torch.rand(8, 40), torch.rand(40, 8)
    programs = [use_paths(program_of(first, second), {}), use_paths(program_of(second), {})]
    before = [weight for program in programs for weight in packed_weights(program)]

    moved = in_large_pages(programs)

    after = [weight for program in moved for weight in packed_weights(program)]
    assert len(after) == len(before)
    for weight, original in zip(after, before, strict=True):
        assert torch.equal(weight.panels, original.panels)
        assert weight.features == original.features
        assert weight.panels.data_ptr() % 64 == 0
        assert weight.panels.is_contiguous()
    storages = {weight.panels.untyped_storage().data_ptr() for weight in after}
    assert len(storages) <= 1


def test_programs_share_a_weight_that_they_shared():
    weight = torch.rand(8, 8)
    program = use_paths(program_of(weight, weight), {})

    one, two = in_large_pages([program, program])

    pointers = {each.panels.data_ptr() for each in packed_weights(one) + packed_weights(two)}
    assert len(pointers) <= 1


def test_a_program_without_packed_weights_stays_as_it_is():
    program = program_of(torch.rand(8, 8))

    assert in_large_pages([program]) == (program,)
