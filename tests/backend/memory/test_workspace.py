"""Slots for intermediates: no two that are live at one op share memory, whatever the program."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.memory.workspace import Usage, Workspace, assign_slots


@st.composite
def programs(draw):
    """Draw usages as a program yields them: one result per op, inheriting from a value that the op reads."""
    count = draw(st.integers(0, 14))
    usages = {}
    for op in range(count):
        last = op + draw(st.integers(0, 5))
        live = [name for name, usage in usages.items() if usage.first_op < op <= usage.last_op]
        inherits = draw(st.sampled_from(live)) if live and draw(st.booleans()) else None
        usages[f"v{op}"] = Usage(op, last, draw(st.integers(1, 4096)), inherits)
    return usages


def takes_over(usages, heir, parent):
    return usages[heir].inherits == parent and usages[parent].last_op == usages[heir].first_op


@given(programs())
def test_two_live_intermediates_never_share_a_slot(usages):
    slot_of = assign_slots(usages)

    assert set(slot_of) == set(usages)
    for one, other in itertools.combinations(usages, 2):
        a, b = usages[one], usages[other]
        overlap = a.first_op <= b.last_op and b.first_op <= a.last_op
        if overlap and not takes_over(usages, other, one):
            assert slot_of[one] != slot_of[other], (one, other)


@given(programs())
def test_slots_are_no_more_than_intermediates_live_at_once(usages):
    slot_of = assign_slots(usages)

    most = max(
        (sum(u.first_op <= op <= u.last_op for u in usages.values()) for op in range(len(usages))),
        default=0,
    )
    assert len(set(slot_of.values())) <= most


@given(programs())
def test_slots_do_not_depend_on_chance(usages):
    assert assign_slots(usages) == assign_slots(dict(usages))


def test_an_heir_takes_over_memory_that_dies_with_it():
    usages = {"x": Usage(0, 1, 8), "y": Usage(1, 2, 8, inherits="x")}

    assert assign_slots(usages) == {"x": 0, "y": 0}


def test_an_heir_waits_for_memory_that_is_still_read():
    usages = {"x": Usage(0, 2, 8), "y": Usage(1, 2, 8, inherits="x")}

    assert assign_slots(usages) == {"x": 0, "y": 1}


def test_a_free_slot_of_the_nearest_size_is_taken():
    usages = {
        "large": Usage(0, 1, 4096),
        "small": Usage(1, 2, 16),
        "next": Usage(3, 3, 32),
    }

    slots = assign_slots(usages)

    assert slots["next"] == slots["small"]


@given(programs(), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_a_written_view_keeps_its_bytes_until_its_last_op(usages, tokens, seed):
    workspace = Workspace(usages)
    generator = torch.Generator().manual_seed(seed)
    held = {}
    for op, (name, usage) in enumerate(usages.items()):
        view = workspace.view(name, (tokens, usage.bytes_per_token), torch.uint8)
        content = torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=generator)
        view.copy_(content)
        held[name] = view, content
        for other, (other_view, other_content) in held.items():
            if usages[other].last_op >= op and not takes_over(usages, name, other):
                assert torch.equal(other_view, other_content), (name, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_view_has_the_shape_and_dtype_asked_for(dtype):
    workspace = Workspace({"x": Usage(0, 0, 64)})

    view = workspace.view("x", (7, 3), dtype)

    assert view.shape == (7, 3)
    assert view.dtype == dtype
    assert view.is_contiguous()
    assert view.data_ptr() % 64 == 0


def test_memory_grows_to_the_largest_batch_and_stays():
    workspace = Workspace({"x": Usage(0, 0, 4)})
    sizes = []
    for tokens in (1, 10_000, 5, 10_000):
        workspace.view("x", (tokens,), torch.float32)
        sizes.append(workspace.reserved_bytes)

    assert sizes[0] < sizes[1] == sizes[2] == sizes[3]
    assert 40_000 <= sizes[1] < 40_000 + 4096


def test_a_program_without_intermediates_holds_nothing():
    assert Workspace({}).reserved_bytes == 0
