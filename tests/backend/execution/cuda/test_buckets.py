"""The captured size (bucket) that each possible batch runs in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.execution.cuda.graphs import Bucket, Buckets


@given(st.data(), st.integers(1, 70_000))
def test_a_batch_runs_in_a_bucket_that_holds_it_and_was_captured(data, most):
    cap = data.draw(st.integers(1, most))
    tokens = data.draw(st.integers(1, most))
    sequences = data.draw(st.integers(1, min(tokens, cap)))
    buckets = Buckets(most, cap)

    bucket = buckets.smallest(tokens, sequences)

    assert bucket in set(buckets)
    assert tokens <= bucket.tokens <= most
    assert sequences <= bucket.sequences <= cap
    # no bucket with the same tokens and fewer sequences holds the batch
    assert not any(
        b.tokens == bucket.tokens and sequences <= b.sequences < bucket.sequences for b in buckets
    )


@pytest.mark.parametrize(("longest", "graphs"), [(4096, 72), (8192, 80), (32_768, 96)])
def test_a_sequence_that_is_longer_than_a_batch_has_a_bucket_of_its_own(longest, graphs):
    buckets = Buckets(4096, 64, longest=longest)

    assert len(list(buckets)) == graphs
    assert [each for each in buckets if each.tokens <= 4096] == list(Buckets(4096, 64))
    bucket = buckets.smallest(longest, 1)
    assert (bucket in set(buckets), bucket.tokens) == (True, longest)
    assert set(buckets.largest_of_each_class()) >= set(Buckets(4096, 64).largest_of_each_class())
    if longest > 4096:
        assert bucket == buckets.largest_of_each_class()[0] == Bucket(longest, 1)
        with pytest.raises(ValueError, match="allowed: up to 4096 tokens together"):
            buckets.smallest(4097, 2)


@pytest.mark.parametrize("most", [1, 15, 16, 100, 4096, 5000])
def test_from_512_tokens_at_most_an_eighth_is_added(most):
    buckets = Buckets(most, 64)

    for tokens in range(1, most + 1):
        added = buckets.smallest(tokens, 1).tokens - tokens
        assert added < max(16, min(tokens, 64), tokens / 8)


# seconds of a batch without tokens, and of a token: predicted of an H200
@pytest.mark.parametrize(
    ("fixed", "per_token", "worst", "mean"),
    [(300e-6, 0.42e-6, 0.11, 0.036), (150e-6, 0.085e-6, 0.09, 0.028)],
    ids=["BERT-base", "MiniLM"],
)
def test_added_tokens_cost_little_time(fixed, per_token, worst, mean):
    buckets = Buckets(8192, 64)

    def seconds(tokens):
        return fixed + per_token * tokens

    losses = [seconds(buckets.smallest(n, 1).tokens) / seconds(n) - 1 for n in range(1, 8193)]

    assert max(losses) < worst
    assert sum(losses) / len(losses) < mean


@pytest.mark.parametrize("most", [1, 15, 16, 17, 4096])
@pytest.mark.parametrize("cap", [1, 64, 5000])
def test_the_largest_bucket_comes_first_and_each_comes_once(most, cap):
    buckets = list(Buckets(most, cap))

    assert buckets[0] == Bucket(most, min(most, cap))
    assert buckets == sorted(set(buckets), reverse=True)


# docs/decisions/0029-gpu-executor.md has the same table
@pytest.mark.parametrize(
    ("most", "graphs"),
    [(512, 16), (1024, 32), (2048, 49), (4096, 72), (8192, 88), (16_384, 103)],
)
def test_batches_of_64_sequences_need_few_graphs(most, graphs):
    assert len(list(Buckets(most, 64))) == graphs


def test_short_sequences_have_no_more_room_than_a_batch_may_have():
    assert Buckets(4096, 64).smallest(64 * 13, 64) == Bucket(832, 64)


def test_long_sequences_get_the_room_of_their_mean_length():
    buckets = Buckets(4096, 64)

    # sequences of 256 tokens and more have the largest tiles, in batches that fill a GPU with them
    assert buckets.smallest(4096, 16) == Bucket(4096, 16)
    assert buckets.smallest(4096, 17) == Bucket(4096, 64)
    assert buckets.smallest(1024, 4) == Bucket(1024, 16)


def test_the_largest_bucket_of_each_mean_length_is_known():
    largest = Buckets(4096, 64).largest_of_each_class()

    assert largest == [Bucket(4096, 64), Bucket(4096, 16), Bucket(3840, 64), Bucket(960, 64)]


@pytest.mark.parametrize("most", [1, 20, 4096])
@pytest.mark.parametrize("cap", [1, 64])
def test_each_class_is_represented_once(most, cap):
    buckets = Buckets(most, cap)
    largest = buckets.largest_of_each_class()

    assert largest[0] == next(iter(buckets))
    assert 1 <= len(largest) <= 4
    assert set(largest) <= set(buckets)


def test_refuses_a_batch_past_the_largest():
    with pytest.raises(ValueError, match="a batch of 17 tokens; allowed: up to 16"):
        Buckets(16, 8).smallest(17, 1)
    with pytest.raises(ValueError, match="a batch of 9 sequences; allowed: up to 8"):
        Buckets(16, 8).smallest(16, 9)
