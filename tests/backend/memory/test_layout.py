"""Layouts: cached plans by batch shape, valid for every batch."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.memory.planner import Layout, Size, Usage, fold, max_tokens_that_fit

from .plan_checker import overlaps, peak_live

DIMS = ["tokens", "sequences", "logit_rows"]


@st.composite
def programs(draw):
    """Draw a program's usages: at most one per op, with at most one dimension."""
    usages = []
    for op in range(draw(st.integers(1, 14))):
        if not draw(st.integers(0, 3)):
            continue
        row = draw(st.sampled_from([4, 36, 64, 96, 1536]))
        size = draw(st.sampled_from([*(Size(**{name: row}) for name in DIMS), Size(row)]))
        usages.append(Usage(f"v{op}", op, op + draw(st.integers(0, 5)), size))
    return usages


def largest(tokens):
    return {"tokens": tokens, "sequences": tokens, "logit_rows": min(tokens, 16)}


def shapes_of(tokens):
    return st.fixed_dictionaries(
        {"tokens": st.just(tokens)}
        | {name: st.integers(1, largest(tokens)[name]) for name in DIMS[1:]}
    )


SHAPES = st.integers(1, 300).flatmap(shapes_of)


def by_usage(layout, offsets, dims):
    """Return usages, their offsets and sizes for a batch."""
    rows = [
        (usage, offset, usage.size.at(dims))
        for buffer, offset in zip(layout.buffers, offsets, strict=True)
        for usage in buffer.usages
    ]
    return ([row[i] for row in rows] for i in range(3))


@given(programs(), SHAPES, st.sampled_from([64, 256]))
def test_live_usages_never_overlap(usages, shape, alignment):
    layout = Layout(fold(usages), alignment)

    made = layout.plan(shape)

    assert overlaps(*by_usage(layout, made.offsets, shape)) == []
    assert all(offset % alignment == 0 for offset in made.offsets)


@given(programs(), SHAPES)
def test_the_footprint_holds_all_and_is_not_below_the_peak(usages, shape):
    layout = Layout(fold(usages), 64)

    made = layout.plan(shape)

    _, offsets, sizes = by_usage(layout, made.offsets, shape)
    assert all(offset + size <= made.footprint for offset, size in zip(offsets, sizes, strict=True))
    assert made.peak_live == peak_live(usages, [usage.size.at(shape) for usage in usages])
    assert made.footprint >= made.peak_live


@given(programs(), st.lists(SHAPES, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_plans_before(usages, shapes, numbers):
    layout = Layout(fold(usages), 64)
    numbers.shuffle(shapes)

    plans = [layout.plan(shape) for shape in shapes]

    for shape, made in zip(shapes, plans, strict=True):
        assert Layout(fold(usages), 64).plan(shape) == made


@given(programs(), st.integers(0, 200_000), st.integers(1, 400))
def test_the_most_tokens_that_fit_do_fit_in_the_largest_batch(usages, size, most):
    layout = Layout(fold(usages), 64)

    fits = max_tokens_that_fit([layout], size, most, largest)

    assert 0 <= fits <= most
    if fits:
        assert layout.plan(largest(fits)).footprint <= size
    if fits < most:
        assert layout.plan(largest(fits + 1)).footprint > size


@given(programs(), SHAPES, st.integers(0, 100))
def test_the_offsets_of_a_larger_batch_serve_every_smaller_one(usages, shape, more):
    layout = Layout(fold(usages), 64)

    ceiling = layout.plan(largest(shape["tokens"] + more))

    assert overlaps(*by_usage(layout, ceiling.offsets, shape)) == []


def test_plans_are_kept_and_counted():
    layout = Layout(fold([Usage("x", 0, 1, Size(tokens=4))]), 64)

    for tokens in (1, 2, 1, 1):
        layout.plan({"tokens": tokens, "sequences": 1})

    assert (layout.plan_hits, layout.plan_misses) == (2, 2)
    assert layout.plan_seconds > 0


def test_the_number_of_kept_plans_is_limited():
    layout = Layout(fold([Usage("x", 0, 1, Size(tokens=4))]), 64)
    numbers = random.Random(0)

    for _ in range(20_000):
        layout.plan({"tokens": numbers.randint(1, 10_000)})

    assert layout._kept_plans.cache_info().currsize <= 4096


def test_dimensions_that_change_no_size_share_a_plan():
    layout = Layout(fold([Usage("x", 0, 1, Size(tokens=4))]), 64)

    layout.plan({"tokens": 3, "sequences": 1})
    layout.plan({"tokens": 3, "sequences": 2})

    assert (layout.dim_names, layout.plan_misses) == (("tokens",), 1)


@pytest.mark.parametrize("tokens", [1, 7, 1000])
def test_a_program_without_intermediates_takes_nothing(tokens):
    layout = Layout(fold([]), 64)

    assert (
        layout.plan({"tokens": tokens, "sequences": 1}).footprint
        == layout.plan({"tokens": tokens, "sequences": 1}).peak_live
        == 0
    )
    assert max_tokens_that_fit([layout], 0, tokens, largest) == tokens
