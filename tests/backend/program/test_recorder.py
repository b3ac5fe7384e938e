"""Recorded programs: any dimensions, ops with several results, and state kept between runs."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.closeness import assert_close
from tests.plain_run import run_without_arena
from varlen.memory.arena import Arena
from varlen.memory.planner import Layout, Size
from varlen.program.program import PackedBatch
from varlen.program.rank import AttentionHeads
from varlen.program.recorder import Recorder
from varlen_kernels import reference
from varlen_kernels.reference.attention import Distances

from ..memory.plan_checker import overlaps, peak_live
from . import toy_kernels
from .poison import POISON, PoisonBetweenOps

CPU = torch.device("cpu")
INT = torch.int64
DIMS = ["tokens", "sequences", "blocks"]
LARGEST = dict.fromkeys(DIMS, 40)
WIDTH = 3


def make_arena(program, largest=None):
    return Arena(Layout(program.buffers, 64), largest or LARGEST, CPU)


def random_inputs(program, dims, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        value.name: torch.randint(0, 1000, value.at(dims), generator=generator)
        for value in program.inputs
    }


def zero_states(program):
    return {state.name: torch.zeros(state.shape, dtype=state.dtype) for state in program.states}


def run(program, dims, arena, *, seed=0, states=None, kernels=toy_kernels):
    """Run a batch in an arena that is poisoned first."""
    region = arena.allocate(dims)
    region.memory.fill_(POISON)
    batch = PackedBatch(random_inputs(program, dims, seed), dims)
    return program.run(batch, kernels, region, states=states or zero_states(program))


def plain_run(program, dims, *, seed=0, states=None):
    bound = {**random_inputs(program, dims, seed), **(states or zero_states(program))}
    return run_without_arena(program, bound, toy_kernels)


@st.composite
def programs(draw):
    """Draw a program with three dimensions, several results per op, and state."""
    ops = Recorder()
    state = ops.state("state", (WIDTH,), INT)
    values = [ops.input(name, (name, WIDTH), INT) for name in DIMS]
    results = []
    for _ in range(draw(st.integers(1, 12))):
        x = draw(st.sampled_from(values))
        alike = [value for value in values if value.shape == x.shape]
        y, other = draw(st.sampled_from(alike)), draw(st.sampled_from(values))
        in_place = draw(st.booleans())
        match draw(st.sampled_from(["affine", "pair", "columns", "spread", "remember", "recall"])):
            case "affine":
                by = draw(st.integers(0, 9))
                made = ops.call(
                    "affine",
                    (x,),
                    [(x.shape, INT)],
                    in_place=[0] * in_place,
                    attributes={"by": by},
                )
            case "pair":
                made = ops.call(
                    "sum_and_difference",
                    (x, y),
                    [(x.shape, INT)] * 2,
                    in_place=[0, 1][: 2 * in_place],
                )
            case "columns":
                made = ops.call(
                    "add_columns", (x, other), [(x.shape, INT)], in_place=[0] * in_place
                )
            case "spread":
                made = ops.call("spread", (x, other), [(other.shape, INT)] * 2)
            case "remember":
                made = ops.call("remember", (state, x), [], writes=[state])
            case _:
                made = ops.call("recall", (state, x), [(x.shape, INT)], in_place=[1] * in_place)
        values.extend(made)
        results.extend(made)
    if not results:
        results.extend(
            ops.call("affine", (values[0],), [(values[0].shape, INT)], attributes={"by": 1})
        )
    outputs = draw(st.lists(st.sampled_from(results), min_size=1, max_size=3, unique=True))
    return ops.finish(*outputs)


BATCHES = st.fixed_dictionaries({name: st.integers(1, 40) for name in DIMS})


@given(programs(), BATCHES)
def test_no_two_live_tensors_of_a_random_program_overlap(program, dims):
    plan = Layout(program.buffers, 64).plan(dims)

    offset_of = {
        usage: offset
        for buffer, offset in zip(program.buffers, plan.offsets, strict=True)
        for usage in buffer.usages
    }
    offsets = [offset_of[usage] for usage in program.usages]
    sizes = [usage.size.at(dims) for usage in program.usages]
    assert overlaps(program.usages, offsets, sizes) == []
    assert plan.footprint >= plan.peak_live == peak_live(program.usages, sizes)


@given(programs(), BATCHES)
def test_a_usage_covers_every_op_that_touches_its_values(program, dims):
    for index, op in enumerate(program.ops):
        for value in {*op.results, *op.reads}:
            if value in program.inputs or value in program.outputs:
                assert value.name not in program.usage_of
                continue
            usage = program.usage_of[value.name]
            assert usage.first_op <= index <= usage.last_op
            assert usage.size.at(dims) == torch.Size(value.at(dims)).numel() * 8


@given(programs(), BATCHES, st.integers(0, 5))
def test_a_random_program_gives_the_answers_of_plain_torch(program, dims, seed):
    planned, plain = zero_states(program), zero_states(program)

    for step in range(2):
        actual = run(program, dims, make_arena(program), seed=seed + step, states=planned)
        expected = plain_run(program, dims, seed=seed + step, states=plain)

        for mine, theirs in zip(actual, expected, strict=True):
            assert torch.equal(mine, theirs)
        for name, state in plain.items():
            assert torch.equal(planned[name], state)


@given(programs(), BATCHES)
def test_poison_wherever_nothing_is_live_changes_nothing(program, dims):
    region = make_arena(program).allocate(dims)
    batch = PackedBatch(random_inputs(program, dims), dims)
    kernels = PoisonBetweenOps(program, region.memory, toy_kernels)

    actual = program.run(batch, kernels, region, states=zero_states(program))

    for mine, theirs in zip(actual, plain_run(program, dims), strict=True):
        assert torch.equal(mine, theirs)


@given(programs(), BATCHES)
def test_an_answer_is_not_arena_memory(program, dims):
    arena = make_arena(program)
    answers = run(program, dims, arena)
    kept = [answer.clone() for answer in answers]

    arena.memory.fill_(POISON)

    for answer, copy in zip(answers, kept, strict=True):
        assert torch.equal(answer, copy)


@settings(max_examples=30)
@given(programs(), st.lists(BATCHES, min_size=1, max_size=4), BATCHES)
def test_a_batch_does_not_depend_on_the_ones_before(program, before, dims):
    arena = make_arena(program)
    alone = run(program, dims, make_arena(program))
    for earlier in before:
        run(program, earlier, arena)

    again = run(program, dims, arena)

    assert arena.layout.plan(dims) == Layout(program.buffers, 64).plan(dims)
    for mine, theirs in zip(again, alone, strict=True):
        assert torch.equal(mine, theirs)


def test_each_result_of_an_op_has_its_own_lifetime():
    ops = Recorder()
    x = ops.input("x", ("tokens", WIDTH), INT)
    total, difference = ops.call("sum_and_difference", (x, x), [(x.shape, INT)] * 2)
    (tripled,) = ops.call("affine", (total,), [(x.shape, INT)], attributes={"by": 0})
    (last,) = ops.call("add_columns", (difference, tripled), [(x.shape, INT)])
    program = ops.finish(last)

    assert [(usage.first_op, usage.last_op) for usage in program.usages] == [(0, 1), (0, 2), (1, 2)]
    assert len(program.buffers) == 3


def test_two_results_take_the_places_of_the_operands_that_they_may_overwrite():
    ops = Recorder()
    x = ops.input("x", ("tokens", WIDTH), INT)
    residual = x
    for _ in range(4):
        (x,) = ops.call("affine", (x,), [(x.shape, INT)], attributes={"by": 1})
        (residual,) = ops.call("affine", (residual,), [(x.shape, INT)], attributes={"by": 2})
        x, residual = ops.call(
            "sum_and_difference", (x, residual), [(x.shape, INT)] * 2, in_place=(0, 1)
        )
    (last,) = ops.call("add_columns", (x, residual), [(x.shape, INT)])
    program = ops.finish(last)

    # x, residual, and the new value of one of them
    assert len(program.buffers) == 3
    dims = {"tokens": 5}
    (answer,) = run(program, dims, make_arena(program, dims))
    assert torch.equal(answer, plain_run(program, dims)[0])


def test_a_result_of_another_size_is_not_written_over_its_operand():
    ops = Recorder()
    x = ops.input("x", ("tokens", WIDTH), INT)
    (y,) = ops.call("affine", (x,), [(x.shape, INT)], attributes={"by": 1})
    (wide,) = ops.call("widen", (y,), [(("tokens", 2 * WIDTH), INT)], in_place=[0])
    program = ops.finish(*ops.call("affine", (wide,), [(wide.shape, INT)], attributes={"by": 1}))

    assert [usage.name for usage in program.usages] == [y.name, wide.name]


def test_an_output_that_a_later_op_reads_is_kept():
    ops = Recorder()
    x = ops.input("x", ("tokens", WIDTH), INT)
    (first,) = ops.call("affine", (x,), [(x.shape, INT)], attributes={"by": 1})
    (second,) = ops.call("affine", (first,), [(x.shape, INT)], in_place=[0], attributes={"by": 2})
    program = ops.finish(second, first)

    dims = {"tokens": 4}
    answers = run(program, dims, make_arena(program, dims))

    assert program.usages == ()
    for mine, theirs in zip(answers, plain_run(program, dims), strict=True):
        assert torch.equal(mine, theirs)


def test_sizes_follow_every_dimension_of_the_batch():
    ops = Recorder()
    x = ops.input("x", (Size(1, sequences=2), WIDTH), torch.float32)
    y = ops.tanh(ops.to_fp32(x))
    program = ops.finish(ops.to_fp32(y))

    assert program.usages[0].size == Size(12, sequences=24)
    assert x.at({"sequences": 5}) == (11, WIDTH)


def cache_program(capacity):
    """Return a program that appends tokens to a cache and attends to all of them."""
    ops = Recorder()
    x = ops.input("x", ("tokens", WIDTH), INT)
    slots = ops.input("slots", ("tokens",), INT)
    cache = ops.state("cache", (capacity, WIDTH), INT)
    for layer in range(2):
        ops.call("append", (cache, slots, x), [], writes=[cache])
        (x,) = ops.call("attend", (x, cache, slots), [(x.shape, INT)])
        cache = ops.state(f"cache {layer}", (capacity, WIDTH), INT)
    return ops.finish(x)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_running_a_cache_step_by_step_equals_one_big_run(steps):
    total = sum(steps)
    program, rows = cache_program(total), torch.arange(total * WIDTH).view(total, WIDTH)
    arena, slots = make_arena(program, {"tokens": total}), torch.arange(total)

    def answers(bounds):
        states, parts = zero_states(program), []
        for begin, end in pairwise(bounds):
            inputs = {"x": rows[begin:end], "slots": slots[begin:end]}
            batch = PackedBatch(inputs, {"tokens": end - begin})
            region = arena.allocate(batch.dims)
            region.memory.fill_(POISON)
            parts.extend(program.run(batch, toy_kernels, region, states=states))
        return torch.cat(parts), states

    whole, filled = answers([0, total])
    by_step, grown = answers([sum(steps[:n]) for n in range(len(steps) + 1)])

    assert [state.name for state in program.states] == ["cache", "cache 0"]
    assert torch.equal(by_step, whole)
    assert all(torch.equal(grown[name], state) for name, state in filled.items())


def test_a_state_is_neither_planned_nor_an_input():
    program = cache_program(8)

    assert [value.name for value in program.inputs] == ["slots", "x"]
    assert {usage.name for usage in program.usages} == {"1:attend"}


def test_a_layer_without_bias_is_recorded_and_run():
    ops, weight = Recorder(), torch.randn(4, 5)
    program = ops.finish(ops.linear(ops.input("x", ("tokens", 4), torch.float32), weight, None))
    dims = {"tokens": 3}
    batch = PackedBatch({"x": torch.randn(3, 4)}, dims)

    (answer,) = program.run(batch, reference, make_arena(program, dims).allocate(dims))

    torch.testing.assert_close(answer, batch.inputs["x"] @ weight)


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_the_bias_of_attention_is_an_operand(has_bias):
    bias = torch.randn(2, 5) if has_bias else None
    ops, heads = Recorder(), AttentionHeads(2, 2, 4)
    qkv = ops.input("qkv", ("tokens", 24), torch.float32)
    bounds = ops.input("cu_seqlens", (Size(1, sequences=1),), torch.int32)
    program = ops.finish(ops.attention_varlen(qkv, bounds, heads, bias, scale=0.5))
    dims = {"tokens": 7, "sequences": 2}
    inputs = {"qkv": torch.randn(7, 24), "cu_seqlens": torch.tensor([0, 5, 7], dtype=torch.int32)}
    batch = PackedBatch(inputs, dims)

    (answer,) = program.run(batch, reference, make_arena(program, dims).allocate(dims))

    expected = reference.attention_varlen(*inputs.values(), bias, **heads.counts, scale=0.5)
    torch.testing.assert_close(answer, expected)


@pytest.mark.parametrize("for_gpu", [False, True], ids=["cpu", "gpu"])
def test_the_tables_of_distances_are_operands_of_attention(for_gpu):
    tables = Distances(torch.tensor([1, 0, 2]).int(), torch.randn(3, 8), torch.randn(3, 8))
    ops, heads = Recorder(for_gpu=for_gpu), AttentionHeads(2, 2, 4)
    qkv = ops.input("qkv", ("tokens", 24), torch.float32)
    bounds = ops.input("cu_seqlens", (Size(1, sequences=1),), torch.int32)
    program = ops.finish(
        ops.attention_varlen(qkv, bounds, heads, distances=tables, scale=0.5),
        ops.attention_varlen(qkv, bounds, heads, scale=0.5),
    )
    dims = {"tokens": 7, "sequences": 2}
    inputs = {"qkv": torch.randn(7, 24), "cu_seqlens": torch.tensor([0, 5, 7], dtype=torch.int32)}

    answers = program.run(
        PackedBatch(inputs, dims), reference, make_arena(program, dims).allocate(dims)
    )

    operands = (None, None, tables)
    for answer, more in zip(answers, (operands, ()), strict=True):
        expected = reference.attention_varlen(*inputs.values(), *more, **heads.counts, scale=0.5)
        torch.testing.assert_close(answer, expected)
    # a launch depends on the form
    assert [op.kernel for op in program.ops].count("attention_tiles") == 2 * for_gpu


def test_on_a_gpu_layers_of_one_form_share_their_tiles():
    bias = torch.randn(2, 5)
    ops, heads = Recorder(for_gpu=True), AttentionHeads(2, 2, 4)
    weight = torch.randn(8, 24)
    bounds = ops.input("cu_seqlens", (Size(1, sequences=1),), torch.int32)
    x = ops.input("x", ("tokens", 8), torch.float32)
    for form in (None, None, bias):
        x = ops.attention_varlen(ops.linear(x, weight, None), bounds, heads, form, scale=0.5)
    program = ops.finish(x)
    dims = {"tokens": 7, "sequences": 2}
    inputs = {"x": torch.randn(7, 8), "cu_seqlens": torch.tensor([0, 5, 7], dtype=torch.int32)}
    expected = inputs["x"]
    for form in (None, None, bias):
        expected = reference.attention_varlen(
            expected @ weight, inputs["cu_seqlens"], form, **heads.counts, scale=0.5
        )

    (answer,) = program.run(
        PackedBatch(inputs, dims), reference, make_arena(program, dims).allocate(dims)
    )

    # one table without a bias, one with it
    assert [op.kernel for op in program.ops].count("attention_tiles") == 2
    torch.testing.assert_close(answer, expected)


@pytest.mark.parametrize("for_gpu", [False, True])
def test_key_lengths_are_an_input_of_programs_that_have_them(for_gpu):
    ops = Recorder(for_gpu=for_gpu, has_key_lengths=True)
    heads, bias = AttentionHeads(2, 2, 4), torch.randn(2, 5)
    bounds = ops.input("cu_seqlens", (Size(1, sequences=1),), torch.int32)
    qkv = ops.input("qkv", ("tokens", 24), torch.float32)
    program = ops.finish(ops.attention_varlen(qkv, bounds, heads, bias, scale=0.5))
    inputs = {
        "qkv": torch.randn(7, 24),
        "cu_seqlens": torch.tensor([0, 5, 7], dtype=torch.int32),
        "key_lengths": torch.tensor([2, 2], dtype=torch.int32),
    }
    dims = {"tokens": 7, "sequences": 2}

    (answer,) = program.run(
        PackedBatch(inputs, dims), reference, make_arena(program, dims).allocate(dims)
    )

    assert {value.name for value in program.inputs} == set(inputs)
    expected = reference.attention_varlen(
        inputs["qkv"],
        inputs["cu_seqlens"],
        bias,
        key_lengths=inputs["key_lengths"],
        **heads.counts,
        scale=0.5,
    )
    torch.testing.assert_close(answer, expected)


@pytest.mark.parametrize(
    "kind, form, expected",
    [
        ("gelu_tanh", {}, ["linear", "activate"]),
        ("gelu_tanh", {"for_gpu": True}, ["linear_activate"]),
        ("relu", {"for_gpu": True}, ["linear_activate"]),
        ("silu", {"for_gpu": True}, ["linear", "activate"]),
        ("gelu", {"for_gpu": True}, ["linear", "activate"]),
        ("gelu", {"for_gpu": True, "approximate_gelu": True}, ["linear_activate"]),
        ("gelu", {"approximate_gelu": True}, ["linear", "activate"]),
    ],
    ids=str,
)
def test_the_matrix_product_of_a_gpu_computes_an_activation_if_it_can(kind, form, expected):
    # results as large as the products: the bound is relative to them, and the error to the products
    torch.manual_seed(0)
    ops, weight, bias = Recorder(**form), torch.randn(4, 5), torch.randn(5)
    x = ops.input("x", ("tokens", 4), torch.float32)
    program = ops.finish(ops.linear_activate(x, weight, bias, kind=kind))
    dims = {"tokens": 3}
    batch = PackedBatch({"x": torch.randn(3, 4)}, dims)

    (answer,) = program.run(batch, reference, make_arena(program, dims).allocate(dims))

    assert [op.kernel for op in program.ops] == expected
    product = batch.inputs["x"] @ weight + bias
    recorded = program.ops[-1].attributes["kind"]
    assert recorded == (
        "gelu_tanh" if form.get("approximate_gelu") and form.get("for_gpu") else kind
    )
    # sums of four products and a bias, and the activation
    assert_close(answer, reference.activate(product, kind=recorded), roundings=16)


def test_an_input_declared_again_is_the_same_one():
    ops = Recorder()

    assert ops.input("x", ("tokens",), INT) is not None
    assert ops.input("x", ("tokens",), INT) == ops.input("x", (Size(tokens=1),), INT)


def refused(message):
    return pytest.raises(ValueError, match=message)


def test_refuses_a_name_that_is_declared_as_something_else():
    ops = Recorder()
    ops.input("x", ("tokens",), INT)

    with refused('"x" is declared twice'):
        ops.input("x", ("sequences",), INT)
    with refused('"x" is declared twice'):
        ops.state("x", (4,), INT)


def test_refuses_an_operand_of_another_recorder():
    x = Recorder().input("x", ("tokens", 4), torch.float32)

    with refused('tanh reads "x", which another recorder made'):
        Recorder().tanh(x)


def test_refuses_to_write_a_state_that_the_op_does_not_take():
    ops = Recorder()
    x, state = ops.input("x", ("tokens", 4), INT), ops.state("cache", (4,), INT)

    with refused('affine writes "cache", which is not among its operands'):
        ops.call("affine", (x,), [], writes=[state])


@pytest.mark.parametrize("in_place", [[0, 0], [2], [-1]], ids=str)
def test_refuses_results_in_place_of_what_is_no_operand_of_their_own(in_place):
    ops = Recorder()
    x = ops.input("x", ("tokens", 4), INT)

    with refused("sum_and_difference has in_place"):
        ops.call("sum_and_difference", (x, x), [(x.shape, INT)] * 2, in_place=in_place)


def test_refuses_an_output_that_no_op_makes():
    ops = Recorder()
    x = ops.input("x", ("tokens", 4), INT)

    with refused('the output "x" is not the result of an op'):
        ops.finish(x)


def test_refuses_a_result_with_two_symbolic_axes():
    ops = Recorder()
    x = ops.input("x", ("tokens", "sequences"), torch.float32)
    y = ops.tanh(x)

    with refused("is not linear; allowed: one symbolic axis"):
        ops.finish(ops.tanh(y))
