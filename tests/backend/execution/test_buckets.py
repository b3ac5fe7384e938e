"""The captured size (bucket) that each possible batch runs in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.execution.buckets import Bucket, Buckets


@settings(deadline=None)
@given(st.data(), st.integers(1, 70_000))
def test_a_batch_runs_in_a_bucket_that_holds_it_and_was_captured(data, most):
    tokens = data.draw(st.integers(1, most))
    sequences = data.draw(st.integers(1, tokens))
    buckets = Buckets(most)

    bucket = buckets.smallest(tokens, sequences)

    assert bucket in set(buckets)
    assert tokens <= bucket.tokens <= most
    assert sequences <= bucket.sequences
    # no bucket with the same tokens and fewer sequences holds the batch
    assert not any(
        b.tokens == bucket.tokens and sequences <= b.sequences < bucket.sequences for b in buckets
    )


@pytest.mark.parametrize("most", [1, 15, 16, 100, 4096, 5000])
def test_from_128_tokens_at_most_an_eighth_is_added(most):
    buckets = Buckets(most)

    for tokens in range(1, most + 1):
        added = buckets.smallest(tokens, 1).tokens - tokens
        assert added < max(16, tokens / 8)


@pytest.mark.parametrize("most", [1, 15, 16, 17, 4096])
def test_the_largest_bucket_comes_first_and_each_comes_once(most):
    buckets = list(Buckets(most))

    assert buckets[0] == Bucket(most, most)
    assert buckets == sorted(set(buckets), reverse=True)


def test_the_default_batch_needs_few_graphs():
    assert len(list(Buckets(4096))) < 150


def test_refuses_a_batch_past_the_largest():
    with pytest.raises(ValueError, match="a batch of 17 tokens; allowed: up to 16"):
        Buckets(16).smallest(17, 1)
