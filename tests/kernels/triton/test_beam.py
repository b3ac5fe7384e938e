"""The step of beam search against its reference: tokens and parents are equal.

Scores of two beams may differ by less than a rounding error, and their order is then undefined. The inputs here have no
such scores, except the scores of equal beams, which are equal to the last bit.
"""

from contextlib import contextmanager

import pytest
import torch

from tests.closeness import relative_error
from tests.kernels.beam import move, random_edits
from varlen_kernels import tuning
from varlen_kernels.reference.beam import NO_PARENT, NO_TOKEN, BeamCandidates, BeamEdits
from varlen_kernels.reference.beam import beam_step as reference
from varlen_kernels.triton import beam
from varlen_kernels.triton.beam import beam_step, launch_key

from .guards import Guarded

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Several chunks of several tiles and groups, for vocabularies small enough for the interpreter.
SMALL = {"CHUNK": 256, "TILE": 128, "GROUPS": 16, "num_warps": 1}


@contextmanager
def forced_launch(logits, width, launch):
    with tuning.forced_launch("beam_step", launch_key(logits, width), launch):
        yield


def random_step(sequences, beams, vocabulary, dtype, device, gap=0):
    torch.manual_seed(0)
    logits = (torch.randn(sequences * beams, vocabulary + gap) * 3).to(device, dtype)
    # a copy to another device would close the gaps
    return logits[:, :vocabulary], torch.randn(sequences, beams).to(device)


def check(actual, logits, scores, finished=None, **options):
    expected = reference(logits, scores, finished, **options)
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.parents, expected.parents)
    # the log turns the relative error of its sum into an absolute error; four more roundings are relative
    torch.testing.assert_close(
        actual.scores,
        expected.scores,
        rtol=relative_error(4),
        atol=relative_error(logits.shape[1]),
    )


@pytest.mark.parametrize(
    "sequences, beams, vocabulary, chunk, tile, groups",
    [
        (2, 2, 333, 128, 64, 32),
        (1, 5, 333, 256, 256, 128),
        (1, 8, 7, 64, 64, 32),
        (3, 2, 1, 64, 64, 32),
        (0, 4, 10, 64, 64, 32),
        pytest.param(2, 1, 1000, 256, 128, 16, marks=pytest.mark.full),
        pytest.param(1, 3, 1000, 512, 512, 64, marks=pytest.mark.full),
        pytest.param(1, 4, 5003, 2048, 1024, 256, marks=pytest.mark.full),
        pytest.param(1, 16, 7, 64, 64, 32, marks=pytest.mark.full),
        pytest.param(1, 64, 2, 64, 64, 32, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_matches_the_reference(sequences, beams, vocabulary, chunk, tile, groups, device):
    dtype = DTYPES[beams % 3]
    logits, scores = random_step(sequences, beams, vocabulary, dtype, device)
    launch = {"CHUNK": chunk, "TILE": tile, "GROUPS": groups, "num_warps": 1}

    with forced_launch(logits, 2 * beams, launch):
        actual = beam_step(logits, scores)

    check(actual, logits, scores)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lower_beam_and_the_lower_token(dtype, device):
    logits, scores = random_step(1, 4, 300, dtype, device)
    # every row has the same few values, so beams tie to the last bit
    logits = logits[:1].round().clamp(-4, 2).expand(4, 300).contiguous()
    scores = torch.zeros_like(scores)

    with forced_launch(logits, 8, SMALL):
        actual = beam_step(logits, scores)

    check(actual, logits, scores)
    assert actual.parents[0].tolist() == sorted(actual.parents[0].tolist())


def test_orders_nan_and_infinity_as_the_reference_does(device):
    logits, scores = random_step(3, 3, 270, torch.bfloat16, device)
    logits[0, ::3] = torch.nan
    logits[1] = -torch.inf
    logits[2, 5::50] = torch.inf
    # only the second chunk of this row is finite
    logits[3, :256] = -torch.inf
    logits[4, 256:] = torch.nan
    logits[5, 269] = torch.inf
    logits[6:] = torch.nan
    scores[0, 1] = torch.inf
    scores[1, 0] = torch.nan
    scores[1, 1] = -torch.inf

    with forced_launch(logits, 6, SMALL):
        actual = beam_step(logits, scores)

    check(actual, logits, scores)
    assert not actual.scores.isnan().any()


def test_minus_zero_ties_with_zero(device):
    logits = torch.tensor([[0.0, -0.0, 0.0, -0.0]], device=device)
    scores = torch.zeros(1, 1, device=device)

    with forced_launch(logits, 2, SMALL):
        actual = beam_step(logits, scores)

    assert actual.tokens.tolist() == [[0, 1]]


def test_logits_with_equal_scores_are_ordered_by_logit(device):
    logits, scores = random_step(1, 2, 300, torch.float32, device)
    # log-probabilities added to a score of -1e9 are lost in rounding, as in the first step of a search
    scores[:] = torch.tensor([[-1e9, -2e9]])

    with forced_launch(logits, 4, SMALL):
        actual = beam_step(logits, scores)

    check(actual, logits, scores)
    assert actual.tokens[0].tolist() == logits[0].sort(descending=True).indices[:4].tolist()


def test_finished_sequences_have_no_candidates_and_are_not_read(device):
    logits, scores = random_step(3, 2, 300, torch.float16, device)
    finished = torch.tensor([True, False, True], device=device)
    logits[:2] = torch.nan

    with forced_launch(logits, 4, SMALL):
        actual = beam_step(logits, scores, finished)

    check(actual, logits, scores, finished)
    assert actual.tokens[0].eq(NO_TOKEN).all()
    assert actual.parents[2].eq(NO_PARENT).all()
    assert actual.scores[0].eq(-torch.inf).all()


@pytest.mark.parametrize("gap", [1, 3, 8])
def test_accepts_strided_rows(gap, device):
    logits, scores = random_step(1, 2, 333, torch.float16, device, gap)

    with forced_launch(logits, 4, SMALL):
        actual = beam_step(logits, scores)

    check(actual, logits, scores)


def test_memory_between_rows_is_ignored(device):
    logits, scores = random_step(1, 2, 333, torch.float16, device, gap=3)
    # the last vector of a row includes this memory
    logits.as_strided((2, 3), (336, 1), 333)[:] = 100.0

    with forced_launch(logits, 4, SMALL):
        actual = beam_step(logits, scores)

    check(actual, logits, scores)


@pytest.mark.parametrize("offset, vector", [(0, 8), (1, 1), (2, 2), (4, 4), (8, 8)])
def test_vectors_of_a_view_are_aligned(offset, vector, device):
    logits, scores = random_step(1, 2, 333, torch.float16, device, gap=3)
    view = torch.empty(offset + 2 * 336, dtype=torch.float16, device=device)[offset:]
    view = view.view(2, 336)[:, :333].copy_(logits)

    assert launch_key(view, 4)[3] == vector
    with forced_launch(view, 4, SMALL):
        actual = beam_step(view, scores)

    check(actual, view, scores)


def test_the_default_launch_matches_the_reference(device):
    logits, scores = random_step(1, 2, 2500, torch.float16, device)

    actual = beam_step(logits, scores)

    check(actual, logits, scores)


def test_writes_only_into_out(device):
    logits, scores = random_step(1, 3, 300, torch.float32, device)
    guarded = BeamCandidates(
        Guarded((1, 6), torch.int32, device),
        Guarded((1, 6), torch.int32, device),
        Guarded((1, 6), torch.float32, device),
    )
    out = BeamCandidates(*(guard.tensor for guard in guarded))

    with forced_launch(logits, 6, SMALL):
        returned = beam_step(logits, scores, out=out)

    check(out, logits, scores)
    for guard, tensor in zip(guarded, returned, strict=True):
        assert tensor is guard.tensor
        guard.check()


def test_two_runs_give_the_same_bits(device):
    logits, scores = random_step(1, 2, 333, torch.float32, device)

    with forced_launch(logits, 4, SMALL):
        first, second = beam_step(logits, scores), beam_step(logits, scores)

    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "sequences, beams, vocabulary, width", [(1, 1, 300, 20), (1, 2, 9, 30), (2, 2, 40, 1)], ids=str
)
def test_any_width_matches_the_reference(sequences, beams, vocabulary, width, device):
    logits, scores = random_step(sequences, beams, vocabulary, torch.float32, device)

    with forced_launch(logits, width, SMALL):
        actual = beam_step(logits, scores, width=width)

    check(actual, logits, scores, width=width)


@pytest.mark.parametrize(
    "sequences, beams, vocabulary, per_row",
    [(2, 1, 300, 40), (1, 3, 40, 40), (2, 2, 40, 3), (2, 1, 40, 0)],
    ids=str,
)
def test_edits_match_the_reference(sequences, beams, vocabulary, per_row, device, monkeypatch):
    monkeypatch.setattr(beam, "_BLOCK", 16)
    dtype = DTYPES[beams % 3]
    logits, scores = random_step(sequences, beams, vocabulary, dtype, device, gap=8)
    logits[0, ::3] = torch.nan
    logits[-1, 1::2] = torch.inf
    edits = random_edits(logits.cpu(), per_row)
    original, edits = logits.clone(), move(edits, device)

    with forced_launch(logits, 6, SMALL):
        actual = beam_step(logits, scores, width=6, edits=edits)

    check(actual, original, scores, width=6, edits=edits)
    # no other logit is overwritten
    for each in (logits, original):
        each[edits.rows.long(), edits.tokens.long()] = 0
    torch.testing.assert_close(logits, original, rtol=0, atol=0, equal_nan=True)


def test_edits_of_finished_sequences_are_ignored(device):
    logits, scores = random_step(3, 2, 300, torch.float32, device)
    finished = torch.tensor([True, False, True], device=device)
    original, edits = logits.clone(), move(random_edits(logits.cpu(), 9), device)

    with forced_launch(logits, 4, SMALL):
        actual = beam_step(logits, scores, finished, edits=edits)

    check(actual, original, scores, finished, edits=edits)
    assert actual.tokens[0].eq(NO_TOKEN).all()


def test_a_row_whose_tokens_are_all_edited_has_the_order_of_their_factors(device):
    logits, scores = torch.zeros(2, 9, device=device), torch.zeros(1, 2, device=device)
    edits = BeamEdits(
        torch.tensor([0] * 9, dtype=torch.int32, device=device),
        torch.arange(9, dtype=torch.int32, device=device).flip(0),
        torch.tensor([2.0, 2.0, 0.5, 0.5, torch.inf, 3.0, 4.0, 5.0, 1.0], device=device),
    )

    with forced_launch(logits, 4, SMALL):
        actual = beam_step(logits, scores, edits=edits)

    assert actual.tokens.tolist() == [[5, 6, 0, 1]]
    assert actual.parents.tolist() == [[0, 0, 1, 1]]


def test_rejects_rows_that_are_not_contiguous(device):
    logits = torch.zeros(10, 4, device=device).T

    with pytest.raises(ValueError, match="logits has strides"):
        beam_step(logits, torch.zeros(1, 4, device=device))


def test_rejects_scores_that_are_not_contiguous(device):
    scores = torch.zeros(2, 2, device=device).T

    with pytest.raises(ValueError, match="scores has strides"):
        beam_step(torch.zeros(4, 10, device=device), scores)
