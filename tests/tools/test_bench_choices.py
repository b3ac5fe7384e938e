"""The comparison is fair: variants take turns, the first round does not count, ratios are by round."""

import pytest

from varlen_tools.bench_choices import compare, row


def test_variants_take_turns_and_the_first_round_does_not_count():
    calls = []

    seconds = compare({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2)

    assert calls == ["a", "b"] * 3
    assert [len(values) for values in seconds.values()] == [2, 2]


def test_the_ratio_is_the_median_of_the_rounds_own():
    made = row("probe", "case", "new", [2.0, 30.0, 4.0], [1.0, 10.0, 4.0])

    assert made["ratio"] == pytest.approx(2.0)
    assert made["rate"] == pytest.approx(4.0)
