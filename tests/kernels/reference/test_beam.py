"""The step of beam search in torch and compiled for CPUs, against a full sort."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.closeness import assert_close
from tests.kernels.beam import LARGEST, check_candidates, full_sort, random_edits
from varlen_kernels import cpu, reference
from varlen_kernels.reference.beam import NO_PARENT, NO_TOKEN, BeamCandidates, BeamEdits

# Few values, so that many are equal, and two that differ by a rounding error.
LOGITS = [-torch.inf, torch.inf, torch.nan, -LARGEST, -3.0, -0.0, 0.0, 1.0, 1.0 + 2**-23, 9.0]
SCORES = [-torch.inf, torch.inf, torch.nan, -1e9, -2.5, -0.0, 0.0]


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def beam_step(request):
    return request.param.beam_step


@st.composite
def steps(draw, max_beams=5):
    """Return the arguments of a step with ties, NaN and infinities."""
    sequences, beams = draw(st.integers(0, 3)), draw(st.integers(1, max_beams))
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
    return {
        "logits": logits,
        "scores": torch.tensor(scores).reshape(sequences, beams),
        "finished": None if finished is None else torch.tensor(finished, dtype=torch.bool),
        "width": draw(st.none() | st.sampled_from([1, 3, 50, 128])),
        "edits": random_edits(logits, 20, seed) if draw(st.booleans()) else None,
    }


def edit(*edits):
    """Return edits from (row, token, factor)."""
    rows, tokens, factors = zip(*edits, strict=True)
    ids = (torch.tensor(values, dtype=torch.int32) for values in (rows, tokens))
    return BeamEdits(*ids, torch.tensor(factors))


def assert_equal(actual, expected):
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.parents, expected.parents)
    assert torch.equal(actual.scores, expected.scores)


@settings(max_examples=200)
@given(steps())
def test_the_reference_matches_a_full_sort(step):
    assert_equal(reference.beam_step(**step), full_sort(**step))


@settings(max_examples=200)
@given(steps(max_beams=1))
def test_the_cpu_orders_a_row_as_a_full_sort(step):
    # the order of the edited tokens depends on the rounding of the scores
    step["edits"] = None
    actual, expected = cpu.beam_step(**step), full_sort(**step)

    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.parents, expected.parents)
    torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("width", [None, 1, 64, 128])
@pytest.mark.parametrize("sequences, beams, vocabulary", [(9, 1, 5003), (2, 4, 2049), (1, 64, 70)])
@pytest.mark.parametrize("per_row", [0, 3, 500], ids=["", "few-edits", "many-edits"])
def test_candidates_are_the_best_in_float64(
    beam_step, sequences, beams, vocabulary, per_row, width
):
    torch.manual_seed(0)
    logits, scores = torch.randn(sequences * beams, vocabulary) * 3, torch.randn(sequences, beams)
    logits[0, ::3] = -torch.inf
    logits[-1, 5:] = torch.nan
    edits = random_edits(logits, per_row) if per_row else None

    actual = beam_step(logits, scores, width=width, edits=edits)

    check_candidates(actual, logits, scores, edits=edits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beams, vocabulary", [(1, 5003), (4, 5003), (64, 333)])
def test_real_sizes_match_a_full_sort(beams, vocabulary, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(2 * beams, vocabulary) * 3).to(dtype)
    scores = torch.randn(2, beams)

    assert_equal(reference.beam_step(logits, scores), full_sort(logits.float(), scores))
    check_candidates(cpu.beam_step(logits, scores), logits, scores)


def test_scores_are_log_probabilities(beam_step):
    torch.manual_seed(0)
    logits = torch.randn(8, 1000) * 3
    scores = torch.randn(2, 4)

    actual = beam_step(logits, scores).scores

    log_probs = logits.double().log_softmax(1).unflatten(0, (2, 4)) + scores[:, :, None]
    expected = log_probs.flatten(1).topk(8).values
    assert_close(actual, expected, roundings=1000)


def test_logits_with_equal_scores_are_ordered_by_logit(beam_step):
    # log-probabilities added to a score of -1e9 are lost in rounding
    candidates = beam_step(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[-1e9]]))

    assert candidates.tokens.tolist() == [[1, 2]]
    assert candidates.scores.tolist() == [[-1e9, -1e9]]


@pytest.mark.parametrize("value", [-torch.inf, torch.nan], ids=str)
def test_a_row_without_a_possible_token_has_no_candidates(beam_step, value):
    logits, edits = torch.full((1, 3), value), edit((0, 1, 0.5))

    for candidates in (beam_step(logits, torch.zeros(1, 1), edits=each) for each in (None, edits)):
        assert candidates.tokens.tolist() == [[NO_TOKEN] * 2]
        assert candidates.parents.tolist() == [[NO_PARENT] * 2]
        assert candidates.scores.tolist() == [[-torch.inf, -torch.inf]]


def test_a_factor_multiplies_the_log_probability_of_a_token(beam_step):
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    log_probs = logits.double().log_softmax(1)[0]

    candidates = beam_step(
        logits, torch.zeros(1, 1), width=4, edits=edit((0, 3, 9.0), (0, 0, 0.01))
    )

    assert candidates.tokens.tolist() == [[0, 2, 1, 3]]
    expected = torch.stack([log_probs[0] / 100, log_probs[2], log_probs[1], log_probs[3] * 9])
    assert_close(candidates.scores[0], expected, roundings=8)


def test_a_banned_token_is_no_candidate_and_keeps_its_part_of_the_sum(beam_step):
    logits, banned = torch.tensor([[1.0, 9.0, 3.0, 2.0]]), edit((0, 1, math.inf))

    candidates = beam_step(logits, torch.zeros(1, 1), width=4, edits=banned)

    assert candidates.tokens.tolist() == [[2, 3, 0, NO_TOKEN]]
    assert_close(candidates.scores[0, 0], logits.double().log_softmax(1)[0, 2], roundings=8)


def test_a_certain_token_may_be_banned(beam_step):
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]])

    candidates = beam_step(logits, torch.zeros(1, 1), edits=edit((0, 1, math.inf)))

    assert candidates.tokens.tolist() == [[NO_TOKEN, NO_TOKEN]]


def test_all_tokens_may_be_banned(beam_step):
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    banned = edit(*((1, token, math.inf) for token in reversed(range(50))))

    candidates = beam_step(logits, torch.zeros(2, 1), width=3, edits=banned)

    assert candidates.tokens[1].tolist() == [NO_TOKEN] * 3
    assert_equal(
        BeamCandidates(*(tensor[:1] for tensor in candidates)),
        beam_step(logits[:1], torch.zeros(1, 1), width=3),
    )


def test_among_equal_scores_edited_tokens_come_last(beam_step):
    logits = torch.zeros(2, 5)
    edits = edit((0, 4, 1.0), (0, 1, 1.0), (1, 3, 1.0), (1, 0, 1.0))

    candidates = beam_step(logits, torch.zeros(1, 2), width=10, edits=edits)

    assert candidates.tokens.tolist() == [[0, 2, 3, 1, 2, 4, 1, 4, 0, 3]]
    assert candidates.parents.tolist() == [[0, 0, 0, 1, 1, 1, 0, 0, 1, 1]]


@pytest.mark.parametrize("per_row", [0, 40], ids=["", "edits"])
def test_a_sequence_does_not_depend_on_the_others(beam_step, per_row):
    torch.manual_seed(0)
    logits, scores = torch.randn(14, 5003), torch.randn(14, 1)
    edits = random_edits(logits, per_row)

    together = beam_step(logits, scores, width=16, edits=edits)

    for row in range(14):
        chosen = edits.rows == row
        mine = BeamEdits(edits.rows[chosen] - row, edits.tokens[chosen], edits.factors[chosen])
        alone = beam_step(logits[row : row + 1], scores[row : row + 1], width=16, edits=mine)
        assert_equal(alone, BeamCandidates(*(tensor[row : row + 1] for tensor in together)))


def test_edits_of_finished_sequences_are_ignored(beam_step):
    torch.manual_seed(0)
    logits, scores = torch.randn(6, 50), torch.zeros(3, 2)
    finished = torch.tensor([True, False, True])
    edits = random_edits(logits, 9)
    kept = (edits.rows == 2) | (edits.rows == 3)

    actual = beam_step(logits, scores, finished, edits=edits)

    expected = beam_step(
        logits, scores, finished, edits=BeamEdits(*(tensor[kept] for tensor in edits))
    )
    assert_equal(actual, expected)
    assert actual.tokens[0].eq(NO_TOKEN).all()


def test_accepts_strided_rows(beam_step):
    wide = torch.full((4, 120), torch.nan)
    wide[:, :100] = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))

    actual = beam_step(wide[:, :100], torch.zeros(2, 2))

    assert_equal(actual, beam_step(wide[:, :100].contiguous(), torch.zeros(2, 2)))


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 2047, 2048, 2049, 4160])
@pytest.mark.parametrize("best", ["first", "last"])
def test_the_best_tokens_may_be_anywhere(beam_step, vocabulary, best):
    order = torch.arange(vocabulary).float()
    logits = (-order if best == "first" else order)[None]

    tokens = beam_step(logits, torch.zeros(1, 1), width=70).tokens

    count = min(vocabulary, 70)
    ends = range(count) if best == "first" else range(vocabulary - 1, vocabulary - 1 - count, -1)
    assert tokens[0, :count].tolist() == list(ends)
    assert tokens[0, count:].eq(NO_TOKEN).all()


def test_does_not_change_its_inputs(beam_step):
    logits = torch.tensor([[torch.nan, torch.inf, 0.0]])
    scores = torch.tensor([[torch.nan]])

    beam_step(logits, scores)

    assert logits.isnan().tolist() == [[True, False, False]]
    assert scores.isnan().all()


def test_writes_into_out(beam_step):
    logits, scores = torch.randn(6, 50), torch.zeros(2, 3)
    out = BeamCandidates.empty(2, 6, logits.device)

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
def test_rejects_invalid_arguments(beam_step, logits, scores, finished, message):
    finished = None if finished is None else torch.zeros(finished, dtype=torch.bool)

    with pytest.raises(ValueError, match=message):
        beam_step(torch.zeros(logits), torch.zeros(scores), finished)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"width": 0}, "width is 0; allowed: 1 to 128"),
        ({"width": 129}, "width is 129; allowed: 1 to 128"),
        (
            {"edits": BeamEdits(torch.zeros(2).int(), torch.zeros(3).int(), torch.zeros(2))},
            r"edits.tokens is \[3\] torch.int32; it must be \[2\] torch.int32",
        ),
        (
            {"edits": BeamEdits(*[torch.zeros(2).int()] * 3)},
            r"edits.factors is \[2\] torch.int32; it must be \[2\] torch.float32",
        ),
        (
            {"width": 3, "out": BeamCandidates.empty(1, 2, torch.device("cpu"))},
            r"out.tokens is \[1, 2\] torch.int32; it must be \[1, 3\] torch.int32",
        ),
    ],
    ids=["width", "width", "tokens", "factors", "out"],
)
def test_rejects_an_invalid_width_edits_or_out(beam_step, change, message):
    with pytest.raises(ValueError, match=message):
        beam_step(torch.zeros(1, 10), torch.zeros(1, 1), **change)


@pytest.mark.parametrize("spread", [1e-4, 1.0, 30.0, 1e3, 1e30])
def test_log_probabilities_are_those_of_float64_over_the_whole_range(beam_step, spread):
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)) * spread

    found = beam_step(logits.clone(), torch.zeros(4, 1), width=8)

    tokens, scores = found.tokens.view(4, -1), found.scores.view(4, -1)
    exact = logits.double().log_softmax(1).gather(1, tokens.long())
    torch.testing.assert_close(scores.double(), exact, rtol=1e-6, atol=1e-6)
