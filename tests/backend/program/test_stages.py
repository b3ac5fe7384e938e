"""Cuts of programs: the parts compute what the whole does, and are balanced."""

from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.memory.arena import Arena
from varlen.memory.planner import Layout
from varlen.program.program import PackedBatch
from varlen.program.recorder import Recorder
from varlen.program.stages import balanced_bounds, cut_program, layer_starts
from varlen_kernels import reference

DIMS = {"tokens": 5}
WIDTH = 8
CPU = torch.device("cpu")


def make_program():
    """Return a program whose first value all layers read, and its layers."""
    numbers = torch.Generator().manual_seed(3)
    rand = partial(torch.randn, generator=numbers)
    ops = Recorder()
    x = ops.input("x", ("tokens", WIDTH), torch.float32)
    first = ops.linear(x, rand(WIDTH, WIDTH), None)
    norm = rand(WIDTH)
    residual, layers = first, []
    for _ in range(4):
        layer = rand(WIDTH, WIDTH), rand(WIDTH)
        y = ops.activate(ops.linear(residual, *layer), kind="relu")
        # the first value crosses every cut
        residual, _ = ops.residual_rms_norm(y, first, norm, eps=1e-5)
        layers.append(layer)
    return ops.finish(ops.to_fp32(residual)), layers


def run(program, inputs):
    arena = Arena(Layout(program.buffers, 64), DIMS, CPU)
    with torch.inference_mode():
        found = program.run(PackedBatch(inputs, DIMS), reference, arena.allocate(DIMS))
    return dict(zip([value.name for value in program.outputs], found, strict=True))


@pytest.mark.parametrize("stages", [2, 3])
def test_parts_of_any_cuts_run_as_the_whole_does(stages):
    program, _ = make_program()
    inputs = {"x": torch.randn(5, WIDTH)}
    (expected,) = run(program, inputs).values()
    count = len(program.ops)

    for cuts in combinations(range(1, count), stages - 1):
        parts = cut_program(program, range(count), [0, *cuts, count])
        handed = {}
        for part in parts:
            received = {value.name: handed[value.name] for value in part.received}
            made = run(part.program, {**inputs, **received})
            handed = {value.name: {**received, **made}[value.name] for value in part.sent}
            assert {value.name for value in part.passed_on} == received.keys() & handed.keys()

        (found,) = made.values()
        assert torch.equal(found, expected)
        # nothing is handed over that is not read
        sizes = [len(part.sent) for part in parts]
        assert max(sizes) <= 3
        assert sizes[-1] == 0


def test_a_layer_starts_with_the_first_op_that_reads_a_weight_of_it():
    program, layers = make_program()
    layer_of = {id(weight): number for number, layer in enumerate(layers) for weight in layer}

    starts = layer_starts(program, layer_of, len(layers))

    for start, (weight, _) in zip(starts, layers, strict=True):
        assert any(each is weight for each in program.ops[start].weights)


@given(st.data())
def test_the_most_expensive_stage_costs_as_little_as_it_can(data):
    layers = data.draw(st.integers(1, 7))
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=layers, max_size=layers))
    starts = [data.draw(st.integers(0, 3))]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    count = starts[-1] + lengths[-1] + data.draw(st.integers(0, 3))
    costs = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    stages = data.draw(st.integers(1, layers))

    def worst(bounds):
        ends = [0, *(starts[bound] for bound in bounds[1:-1]), count]
        return max(sum(costs[a:b]) for a, b in pairwise(ends))

    found = balanced_bounds(costs, starts, stages)

    assert (found[0], found[-1], len(found)) == (0, layers, stages + 1)
    assert all(a < b for a, b in pairwise(found))
    every = ([0, *inner, layers] for inner in combinations(range(1, layers), stages - 1))
    assert worst(found) == min(map(worst, every))
