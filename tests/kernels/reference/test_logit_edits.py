"""Edited logits against the formulas in float64, over several steps."""

import pytest
import torch

from tests.kernels.logit_edits import EditedSequences
from varlen_kernels import reference
from varlen_kernels.reference.logit_edits import EditLists, EditState


@pytest.mark.parametrize("seed", range(12))
def test_lists_grow_with_the_tokens_of_steps(seed):
    sequences = EditedSequences(seed, vocabulary=1 + 5 * seed, count=4)
    state = sequences.state("cpu")
    for number in range(6):
        begins = [number == 0 or sequences.rng.random() < 0.2 for _ in range(4)]
        logits, *arguments = sequences.step(begins=begins)
        actual = logits.clone()

        reference.edit_logits(actual, *arguments, state)

        torch.testing.assert_close(
            actual.double(), sequences.expected(logits), rtol=1e-5, atol=1e-5, equal_nan=True
        )


def test_a_list_without_edits_keeps_every_bit_of_the_logits():
    logits = torch.tensor([[-0.0, 0.0, torch.nan, -torch.inf, torch.inf, 1e-40]])
    tokens = torch.arange(6, dtype=torch.int32)
    begun = EditLists(tokens, torch.zeros_like(tokens), torch.full((6,), -0.0))
    rows = torch.tensor([[0, -1, 0, 0, 0, 6]], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    state = EditState.new(0, 0, torch.device("cpu"))
    actual = logits.clone()

    penalties = torch.tensor([[1.0, 0.0, 0.0]])
    reference.edit_logits(actual, zero, zero, rows, penalties, begun, state)

    assert torch.equal(actual.view(torch.int32), logits.view(torch.int32))


def test_rejects_rows_of_another_shape():
    sequences = EditedSequences(0, vocabulary=5, count=1)
    logits, tokens, logit_rows, rows, *others = sequences.step(begins=[True])

    with pytest.raises(ValueError, match=r"rows is \[1, 5\] torch.int32; it must be \[1, 6\]"):
        reference.edit_logits(
            logits, tokens, logit_rows, rows[:, :5], *others, sequences.state("cpu")
        )
