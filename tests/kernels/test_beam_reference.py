"""The step of beam search in torch, against a full sort of all candidates."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.closeness import assert_close
from varlen_kernels.beam_reference import NO_PARENT, NO_TOKEN, BeamCandidates, beam_step

LARGEST = torch.finfo(torch.float32).max
# Few values, so that many are equal, and two that differ by a rounding error.
LOGITS = [-torch.inf, torch.inf, torch.nan, -LARGEST, -3.0, -0.0, 0.0, 1.0, 1.0 + 2**-23, 9.0]
SCORES = [-torch.inf, torch.inf, torch.nan, -1e9, -2.5, -0.0, 0.0]


@st.composite
def steps(draw):
    """Return logits, scores and finished of a step with ties, NaN and infinities."""
    sequences, beams = draw(st.integers(0, 3)), draw(st.integers(1, 5))
    vocabulary = draw(st.sampled_from([1, 2, 3, 7, 32, 33, 96, 333]))
    rows = sequences * beams
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    few = draw(st.lists(st.sampled_from(LOGITS), min_size=1, max_size=4))
    picked = torch.randint(len(few), (rows, vocabulary), generator=generator)
    logits = torch.tensor(few)[picked]
    if draw(st.booleans()):
        logits = torch.randn(rows, vocabulary, generator=generator)
    scores = draw(st.lists(st.sampled_from(SCORES), min_size=rows, max_size=rows))
    finished = draw(st.none() | st.lists(st.booleans(), min_size=sequences, max_size=sequences))
    return (
        logits,
        torch.tensor(scores).reshape(sequences, beams),
        None if finished is None else torch.tensor(finished, dtype=torch.bool),
    )


def full_sort(logits, scores, finished):
    """Return the expected result of `beam_step`, by sorting all candidates in Python."""
    sequences, beams = scores.shape
    x = without_nan(logits)
    peak = x.amax(1, keepdim=True)
    peak[peak == -torch.inf] = 0
    total = (x - peak).exp().sum(1, keepdim=True)
    total[total == 0] = 1
    all_scores = without_nan(scores).reshape(-1, 1) + ((x - peak) - total.log())

    out = BeamCandidates.empty(sequences, beams, logits.device)
    for sequence in range(sequences):
        best = []
        if finished is None or not finished[sequence]:
            for parent in range(beams):
                row = sequence * beams + parent
                pairs = zip(all_scores[row].tolist(), x[row].tolist(), strict=True)
                best += [(-s, parent, -logit, token) for token, (s, logit) in enumerate(pairs)]
        best = sorted(best)[: 2 * beams]
        best += [(math.inf, NO_PARENT, 0, NO_TOKEN)] * (2 * beams - len(best))
        out.scores[sequence] = torch.tensor([-key[0] for key in best])
        out.parents[sequence] = torch.tensor([key[1] for key in best])
        out.tokens[sequence] = torch.tensor([key[3] for key in best])
    return out


def without_nan(x):
    return x.nan_to_num(nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf)


@settings(max_examples=200, deadline=None)
@given(steps())
def test_matches_a_full_sort(step):
    actual, expected = beam_step(*step), full_sort(*step)

    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.parents, expected.parents)
    assert torch.equal(actual.scores, expected.scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beams, vocabulary", [(1, 5003), (4, 5003), (64, 333)])
def test_real_sizes_match_a_full_sort(beams, vocabulary, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(2 * beams, vocabulary) * 3).to(dtype)
    scores = torch.randn(2, beams)

    actual, expected = beam_step(logits, scores), full_sort(logits.float(), scores, None)

    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.parents, expected.parents)
    assert torch.equal(actual.scores, expected.scores)


def test_scores_are_log_probabilities():
    torch.manual_seed(0)
    logits = torch.randn(8, 1000) * 3
    scores = torch.randn(2, 4)

    actual = beam_step(logits, scores).scores

    log_probs = logits.double().log_softmax(1).unflatten(0, (2, 4)) + scores[:, :, None]
    expected = log_probs.flatten(1).topk(8).values
    assert_close(actual, expected, roundings=1000)


def test_logits_with_equal_scores_are_ordered_by_logit():
    # log-probabilities added to a score of -1e9 are lost in rounding
    candidates = beam_step(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[-1e9]]))

    assert candidates.tokens.tolist() == [[1, 2]]
    assert candidates.scores.tolist() == [[-1e9, -1e9]]


def test_a_row_of_only_minus_infinity_gives_no_nan():
    candidates = beam_step(torch.full((1, 3), -torch.inf), torch.zeros(1, 1))

    assert candidates.tokens.tolist() == [[0, 1]]
    assert candidates.scores.tolist() == [[-torch.inf, -torch.inf]]


def test_does_not_change_its_inputs():
    logits = torch.tensor([[torch.nan, torch.inf, 0.0]])
    scores = torch.tensor([[torch.nan]])

    beam_step(logits, scores)

    assert logits.isnan().tolist() == [[True, False, False]]
    assert scores.isnan().all()


def test_writes_into_out():
    logits, scores = torch.randn(6, 50), torch.zeros(2, 3)
    out = BeamCandidates.empty(2, 3, logits.device)

    returned = beam_step(logits, scores, out=out)

    expected = beam_step(logits, scores)
    for given_tensor, tensor, value in zip(out, returned, expected, strict=True):
        assert tensor is given_tensor
        assert torch.equal(tensor, value)


@pytest.mark.parametrize(
    "logits, scores, finished, message",
    [
        ((65, 10), (1, 65), None, "65 beams; allowed: 1 to 64"),
        ((1, 300_001), (1, 1), None, "vocabulary of 300001; allowed: 1 to 300000"),
        ((1, 0), (1, 1), None, "vocabulary of 0"),
        ((3, 10), (1, 4), None, r"need \[4, vocabulary\]"),
        ((4, 10), (4,), None, r"it must be \[sequences, beams\] float32"),
        ((4, 10), (1, 4), (4,), r"finished is \[4\] torch.bool; it must be \[1\] bool"),
    ],
    ids=["beams", "vocabulary", "no-vocabulary", "rows", "scores", "finished"],
)
def test_rejects_invalid_arguments(logits, scores, finished, message):
    finished = None if finished is None else torch.zeros(finished, dtype=torch.bool)

    with pytest.raises(ValueError, match=message):
        beam_step(torch.zeros(logits), torch.zeros(scores), finished)
