"""Workloads: lengths and arrival times, always the same for a seed."""

import numpy as np
import pytest

from varlen_tools.workloads import (
    Mix,
    burst_arrivals,
    poisson_arrivals,
    poisson_times,
    token_ids,
    trace_mix,
    uniform_mix,
)


def test_a_seed_gives_the_numbers_behind_the_committed_rows():
    def drawn(arrivals):
        return [(round(each.at, 3), each.tokens) for each in arrivals(4, 10.0, range(5, 501), 3)]

    assert drawn(poisson_arrivals) == [(0.027, 283), (0.041, 473), (0.134, 325), (0.221, 315)]
    assert drawn(burst_arrivals) == [(0.544, 194), (0.544, 473), (0.544, 314), (0.544, 247)]
    assert [round(time, 3) for time in poisson_times(0.4, 10, seed=3)] == [2.38, 3.7, 5.442, 6.039]
    assert uniform_mix("uniform", 512).take(6, seed=3) == [46, 211, 294, 459, 377, 129]
    assert token_ids([3, 2], 100, seed=3) == [[24, 54, 37], [60, 62]]


def test_poisson_times_have_the_number_and_gaps_of_their_rate():
    times = poisson_times(20, 10, seed=3)

    assert len(times) == 200
    assert times == sorted(times) != poisson_times(20, 10, seed=4)
    assert 0 <= times[0] < times[-1] < 10
    gaps = np.diff(poisson_times(100, 200, seed=0))
    # the gaps of a Poisson process have a standard deviation equal to their mean
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.05)


def test_bursts_come_together_at_the_rate():
    arrivals = burst_arrivals(20_000, 100.0, range(5, 501), seed=1)

    times = [arrival.at for arrival in arrivals]
    assert len(times) == 20_000
    assert times == sorted(times)
    assert 20_000 / times[-1] == pytest.approx(100, rel=0.1)
    assert len(set(times)) < 2000


def test_lengths_of_one_count_are_the_same_work_in_another_order():
    mix = uniform_mix("uniform", 512)

    one, other = mix.take(100, seed=1), mix.take(100, seed=2)

    assert one != other
    assert sorted(one) == sorted(other)
    assert min(one) >= 5
    assert max(one) <= 500
    assert np.mean(one) == pytest.approx(252.5, abs=1)


def test_lengths_are_clamped_to_the_limit():
    assert uniform_mix("uniform", 40).label == "uniform 5-40"
    assert max(uniform_mix("uniform", 40).take(50, 0)) <= 40
    assert uniform_mix("short", 512).lengths == tuple(range(2, 101))
    with pytest.raises(ValueError, match="no lengths are called 'long'; there are uniform, short"):
        uniform_mix("long", 512)


def test_a_trace_is_its_first_column_of_whole_numbers_in_order(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,Tokens,Other\n2023-11-16 18:15:46,7,1\n2023-11-16 18:15:47,0,1\n")

    mix = trace_mix(path, 512)

    assert mix == Mix("trace", "trace azure", (7, 1), in_order=True)
    assert mix.take(5, seed=0) in ([7, 1, 7, 1, 7], [1, 7, 1, 7, 1])


def test_a_trace_of_long_requests_is_divided_and_its_tail_clamped(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("tokens\n" + "\n".join(map(str, [*range(1, 100), 100_000])))

    mix = trace_mix(path, 33)

    assert mix.label == "trace long / 3"
    assert mix.lengths == (1, 1, 1, 1, 2, *(round(n / 3) for n in range(6, 100)), 33)


def test_a_file_without_lengths_is_refused(tmp_path):
    path = tmp_path / "words.csv"
    path.write_text("a\nx\n")

    with pytest.raises(ValueError, match=r"words\.csv has no column of whole numbers"):
        trace_mix(path, 512)


def test_ids_are_of_the_vocabulary_and_never_padding():
    ids = token_ids([3, 500], 9, seed=0)

    assert [len(one) for one in ids] == [3, 500]
    assert set(ids[1]) == set(range(1, 9))
