"""Compiled code and a kernel give the bits of the reference."""

import pytest
import torch

from tests.kernels.logit_edits import EditedSequences
from varlen_kernels import cpu, reference
from varlen_kernels.triton import logit_edits


def moved(tensors, device):
    return [
        type(each)(*moved(each, device)) if isinstance(each, tuple) else each.to(device, copy=True)
        for each in tensors
    ]


def lists_of(state, slots):
    """Return the lists of some slots."""
    *lists, sizes = (each.cpu() for each in state)
    return [
        [each[slot, : sizes[slot]].view(torch.int32).tolist() for each in lists]
        for slot in slots
        if slot >= 0
    ]


@pytest.mark.parametrize("vocabulary", [1, 16, 63, 1023])
@pytest.mark.parametrize("seed", range(3))
def test_every_form_gives_the_bits_of_the_reference(seed, vocabulary, device, monkeypatch):
    monkeypatch.setattr(logit_edits, "_BLOCK", 16)
    sequences = EditedSequences(seed, vocabulary, count=3, longest=40)
    states = [sequences.state(each) for each in ("cpu", "cpu", device)]
    for number in range(4):
        begins = [number == 0 or sequences.rng.random() < 0.2 for _ in range(3)]
        step = sequences.step(begins=begins)
        steps = [moved(step, each) for each in ("cpu", "cpu", device)]

        reference.edit_logits(*steps[0], states[0])
        cpu.edit_logits(*steps[1], states[1])
        logit_edits.edit_logits(*steps[2], states[2])

        expected = steps[0][0].view(torch.int32)
        assert torch.equal(steps[1][0].view(torch.int32), expected)
        assert torch.equal(steps[2][0].cpu().view(torch.int32), expected)
        kept = [lists_of(state, sequences.slots) for state in states]
        assert kept[1] == kept[2] == kept[0]


def test_accepts_strided_rows(device):
    sequences = EditedSequences(1, vocabulary=50, count=3)
    logits, *others = sequences.step(begins=[True] * 3)
    expected, wide = logits.clone(), torch.full((len(logits), 64), torch.inf, device=device)
    wide[:, :50] = logits

    reference.edit_logits(expected, *others, sequences.state("cpu"))
    logit_edits.edit_logits(wide[:, :50], *moved(others, device), sequences.state(device))

    assert torch.equal(wide[:, :50].cpu(), expected)
    assert (wide[:, 50:] == torch.inf).all()


def test_no_rows(device):
    sequences = EditedSequences(1, vocabulary=50, count=1)
    logits, tokens, logit_rows, rows, penalties, begun = moved(
        sequences.step(begins=[True]), device
    )
    expected = logits.clone()

    logit_edits.edit_logits(
        logits, tokens, logit_rows, rows[:0], penalties[:0], begun, sequences.state(device)
    )

    assert torch.equal(logits, expected)


def test_rejects_penalties_that_are_not_contiguous(device):
    sequences = EditedSequences(1, vocabulary=50, count=4)
    logits, tokens, logit_rows, rows, penalties, begun = moved(
        sequences.step(begins=[True] * 4), device
    )

    with pytest.raises(ValueError, match="penalties has strides"):
        logit_edits.edit_logits(
            logits,
            tokens,
            logit_rows,
            rows,
            penalties.T.contiguous().T,
            begun,
            sequences.state(device),
        )
