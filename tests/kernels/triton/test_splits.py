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
# Keys of contexts that bound no number of splits.
LONG = 8192


@given(PROGRAMS, WAVES)
def test_there_is_at_least_one_split_and_never_more_than_the_merge_reads(programs, wave):
    assert 1 <= choose_splits(programs, wave, LONG).count <= MAX_SPLITS


@given(PROGRAMS, WAVES)
def test_the_fewest_splits_within_6_percent_of_the_least_time_are_chosen(programs, wave):
    times = [predicted_time(programs, wave, splits) for splits in range(1, MAX_SPLITS + 1)]
    chosen = choose_splits(programs, wave, LONG).count

    assert times[chosen - 1] <= 1.06 * min(times)
    assert all(time > 1.06 * min(times) for time in times[: chosen - 1])


@given(PROGRAMS, WAVES)
def test_programs_without_keys_and_the_merge_take_time(programs, wave):
    assert predicted_time(programs, wave, 1) == pytest.approx(61.875 * -(-programs // wave))
    for splits in range(2, MAX_SPLITS + 1):
        waves = -(-programs * splits // wave)
        reading = 60 * waves * (1 / splits + 1 / 32)
        spare = predicted_time(programs, wave, splits) - reading - 1.5
        assert spare == pytest.approx(0.0016 * programs * (splits - 1))


@given(PROGRAMS, WAVES)
def test_short_splits_are_allowed_only_in_one_wave(programs, wave):
    splits = choose_splits(programs, wave, LONG)

    assert splits.min_keys == (64 if programs * splits.count <= wave else 256)


@given(PROGRAMS, WAVES, st.integers(0, LONG))
def test_the_longest_context_has_keys_for_all_splits(programs, wave, longest):
    free, splits = choose_splits(programs, wave, LONG), choose_splits(programs, wave, longest)

    assert splits.min_keys == free.min_keys
    assert splits.count == max(1, min(free.count, -(-longest // free.min_keys)))


# sequences times key heads: GPT-2 small has 12 of 64 features, Llama 8
@pytest.mark.parametrize(
    "programs, wave, count",
    [
        (64 * 12, 924, 1),
        (32 * 12, 924, 2),
        (8 * 12, 924, 9),
        (12, 924, 26),
        (64 * 8, 924, 3),
        (48 * 8, 924, 2),
        (32 * 8, 924, 3),
        (8, 528, 27),
        (64, 528, 8),
        (512, 528, 1),
        (768, 528, 2),
    ],
    ids=str,
)
def test_splits_of_usual_steps_on_an_h100(programs, wave, count):
    assert choose_splits(programs, wave, LONG).count == count


def test_a_device_that_is_no_gpu_counts_as_an_h100():
    assert wave_of(torch.device("cpu"), 4) == 528


@pytest.mark.parametrize(
    "shared, expected", [(228 << 10, 4), (164 << 10, 4), (100 << 10, 2), (32 << 10, 1)]
)
def test_fewer_programs_fit_a_gpu_with_less_shared_memory(shared, expected, monkeypatch):
    found = SimpleNamespace(multi_processor_count=10, shared_memory_per_multiprocessor=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    assert wave_of.__wrapped__(torch.device("cuda"), 4) == 10 * expected
