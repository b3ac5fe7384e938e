"""The profile runs what is served, and counts every op of it."""

from types import SimpleNamespace

from varlen_tools.profile_ops import TimedKernels, random_batches


def test_batches_hold_every_sequence_within_the_budget():
    lengths = [7, 3, 9, 1, 9]

    batches = random_batches(lengths, max_batch_tokens=10, vocab_size=50)

    assert [[sequence.num_tokens for sequence in batch] for batch in batches] == [
        [1, 3],
        [7],
        [9],
        [9],
    ]
    assert all(s.token_ids.min() >= 0 and s.token_ids.max() < 50 for b in batches for s in b)


def test_a_kernel_is_called_with_what_it_was_given_and_counted():
    kernels = TimedKernels(SimpleNamespace(add=lambda x, *, y: x + y))

    assert kernels.add(1, y=2) == 3
    assert kernels.add(3, y=4) == 7

    assert kernels.calls == {"add": 2}
    assert kernels.seconds["add"] >= 0
