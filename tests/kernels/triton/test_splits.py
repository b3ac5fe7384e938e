"""The number of splits of a decode step: properties for any shape and device."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen_kernels.triton.splits import (
    MAX_SPLITS,
    choose_splits,
    predicted_time,
    wave_of,
)

PROGRAMS = st.integers(1, 20_000)
WAVES = st.integers(1, 3_000)


def splits_before(programs):
    """Return the number of splits that gives 1,024 programs, whatever the device."""
    return min(-(-1024 // programs), MAX_SPLITS)


@given(PROGRAMS, WAVES)
def test_there_is_at_least_one_split_and_never_more_than_the_merge_reads(programs, wave):
    assert 1 <= choose_splits(programs, wave).count <= MAX_SPLITS


@given(PROGRAMS, WAVES)
def test_no_other_number_of_splits_is_predicted_to_be_faster(programs, wave):
    chosen = predicted_time(programs, wave, choose_splits(programs, wave).count)

    assert all(
        chosen <= predicted_time(programs, wave, splits) for splits in range(1, MAX_SPLITS + 1)
    )


@given(PROGRAMS, WAVES)
def test_a_wave_with_room_is_filled(programs, wave):
    count = choose_splits(programs, wave).count

    # one more split each would need another wave, or is more than the merge reads
    if programs * count <= wave:
        assert count == MAX_SPLITS or programs * (count + 1) > wave


@given(PROGRAMS, WAVES)
def test_where_1024_programs_fit_at_once_there_are_as_many_or_more(programs, wave):
    before = splits_before(programs)

    if programs * before <= wave:
        assert choose_splits(programs, wave).count >= before


@given(PROGRAMS, WAVES)
def test_short_splits_are_allowed_only_in_one_wave(programs, wave):
    splits = choose_splits(programs, wave)

    assert splits.min_keys == (64 if programs * splits.count <= wave else 256)


@pytest.mark.parametrize(
    "programs, wave, count",
    [(8, 528, 32), (64, 528, 8), (512, 528, 1), (768, 528, 2), (96, 924, 9), (768, 924, 6)],
    ids=str,
)
def test_waves_of_an_h100_are_filled(programs, wave, count):
    waves = programs * choose_splits(programs, wave).count / wave

    assert choose_splits(programs, wave).count == count
    assert waves <= 1 or waves % 1 > 0.85


def test_a_device_that_is_no_gpu_counts_as_an_h100():
    assert wave_of(torch.device("cpu"), 4) == 528


@pytest.mark.parametrize(
    "shared, expected", [(228 << 10, 4), (164 << 10, 4), (100 << 10, 2), (32 << 10, 1)]
)
def test_fewer_programs_fit_a_gpu_with_less_shared_memory(shared, expected, monkeypatch):
    found = SimpleNamespace(multi_processor_count=10, shared_memory_per_multiprocessor=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    assert wave_of.__wrapped__(torch.device("cuda"), 4) == 10 * expected
