"""Workloads: lengths and arrival times, always the same for a seed."""

import numpy as np
import pytest

from varlen_bench.workloads import (
    Arrival,
    Mix,
    at_rate,
    burst_arrivals,
    generation_arrivals,
    generation_trace,
    named_mix,
    poisson_arrivals,
    poisson_times,
    token_ids,
    trace_mix,
    with_poisson_times,
)

pytestmark = pytest.mark.full


def test_a_seed_gives_the_numbers_behind_the_committed_rows():
    def drawn(arrivals):
        return [(round(each.at, 3), each.tokens) for each in arrivals(4, 10.0, range(5, 501), 3)]

    assert drawn(poisson_arrivals) == [(0.027, 283), (0.041, 473), (0.134, 325), (0.221, 315)]
    assert drawn(burst_arrivals) == [(0.544, 194), (0.544, 473), (0.544, 314), (0.544, 247)]
    assert [round(time, 3) for time in poisson_times(0.4, 10, seed=3)] == [2.38, 3.7, 5.442, 6.039]
    assert named_mix("uniform", 512).take(6, seed=3) == [46, 211, 294, 459, 377, 129]
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
    mix = named_mix("uniform", 512)

    one, other = mix.take(100, seed=1), mix.take(100, seed=2)

    assert one != other
    assert sorted(one) == sorted(other)
    assert min(one) >= 5
    assert max(one) <= 500
    assert np.mean(one) == pytest.approx(252.5, abs=1)


def test_lengths_are_clamped_to_the_limit():
    assert named_mix("uniform", 40).label == "uniform 5-40"
    assert max(named_mix("uniform", 40).take(50, 0)) <= 40
    assert named_mix("short", 512).lengths == tuple(range(2, 101))
    with pytest.raises(
        ValueError, match="no lengths are called 'long'; there are uniform, short, mixed"
    ):
        named_mix("long", 512)


def test_nine_in_ten_of_mixed_lengths_are_short():
    drawn = named_mix("mixed", 512).take(200, seed=0)

    assert sum(length <= 60 for length in drawn) == pytest.approx(180, abs=1)
    assert all(5 <= length <= 60 or 300 <= length <= 500 for length in drawn)


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


def save_trace(folder, *rows):
    path = folder / "conv.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return path


def test_a_trace_of_generation_has_the_times_and_lengths_of_its_rows(tmp_path):
    path = save_trace(
        tmp_path,
        "2023-11-16 23:59:59.5000000,374,44",
        "2024-05-10 00:00:00.009930+00:00,9,0",
        "2023-11-17 00:00:00,396,109",
        "2023-11-17 00:00:01.25+00:00,879,1",
    )

    arrivals = generation_trace(path, count=10, seed=0)

    # one without an answer is no request
    assert [(each.tokens, each.generated) for each in arrivals] == [(374, 44), (396, 109), (879, 1)]
    first, *others = (each.at for each in arrivals)
    assert [at - first for at in others] == pytest.approx([0.5, 1.75])


def test_a_part_of_a_trace_is_consecutive(tmp_path):
    rows = (f"2023-11-16 18:{i // 60:02}:{i % 60:02},{i + 1},1" for i in range(100))
    path = save_trace(tmp_path, *rows)

    parts = [[each.tokens for each in generation_trace(path, 10, seed)] for seed in range(20)]

    assert all(part == list(range(part[0], part[0] + 10)) for part in parts)
    assert len({part[0] for part in parts}) > 10


@pytest.mark.parametrize(
    "rows, message",
    [
        (["2023-11-16 18:15:46,12"], "conv.csv is no trace of requests"),
        (["yesterday,12,4"], 'a time is "yesterday"'),
        (["2023-11-16 18:15:46,many,4"], "conv.csv is no trace of requests"),
        (["2023-11-16 18:15:46,12,0"], "conv.csv has no requests"),
    ],
)
def test_a_file_that_is_no_trace_of_generation_is_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        generation_trace(save_trace(tmp_path, *rows), 10, seed=0)


def test_arrivals_are_scaled_to_a_rate_with_their_gaps_in_proportion():
    arrivals = [Arrival(at, 5) for at in (10.0, 11.0, 13.0, 14.0)]

    assert [each.at for each in at_rate(arrivals, 3.0)] == pytest.approx([0, 0.25, 0.75, 1.0])
    assert [each.at for each in at_rate(arrivals[:1] * 2, 3.0)] == [0, 0]


def test_arrivals_of_generation_have_uniform_lengths_and_poisson_times():
    arrivals = generation_arrivals(5000, seed=1)

    assert arrivals == generation_arrivals(5000, seed=1) != generation_arrivals(5000, seed=2)
    prompts, answers = ([getattr(a, name) for a in arrivals] for name in ("tokens", "generated"))
    assert (min(prompts), max(prompts), min(answers), max(answers)) == (32, 256, 1, 128)
    gaps = np.diff([each.at for each in with_poisson_times(arrivals, seed=1)])
    assert gaps.min() >= 0
    assert np.mean(gaps) == pytest.approx(1, rel=0.05)
    assert np.std(gaps) == pytest.approx(1, rel=0.05)
