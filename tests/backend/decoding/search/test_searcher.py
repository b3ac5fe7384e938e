"""The searches of one step: normalized scores, repeated steps, and failures of one search."""

import numpy as np
import pytest
import torch

from tests.backend.decoding.sequences import sequences_of
from tests.backend.decoding.text.small_tokenizers import byte_level
from varlen.decoding.search.beam_search import BeamSearch
from varlen.decoding.search.searcher import Searcher, ranked
from varlen.decoding.token_edits import BadWords, TokenRules

CPU = torch.device("cpu")
# The host takes the steps of a search with this option, which bans nothing in a few tokens.
ON_HOST = {"no_repeat_ngram_size": 20}
VOCABULARY = 40
END = 3


def searcher_of(*, renormalizes=False, **rules):
    bad_words = BadWords(byte_level(), VOCABULARY, [END])
    return Searcher(
        VOCABULARY, TokenRules((END,), **rules), bad_words, CPU, renormalizes=renormalizes
    )


def logits_of(rows, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, VOCABULARY))).float()


def states_of(sequences):
    return [sequence.sampler_state.num_rows for sequence in sequences]


@pytest.mark.parametrize("likely", [0.0, 5.0, 12.0, 30.0])
def test_scores_are_normalized_again_however_likely_a_banned_token_is(likely):
    searcher = searcher_of(renormalizes=True)
    options = {"num_beams": 2, "n": 2, "min_tokens": 1, "max_tokens": 2, "length_penalty": 0.0}
    options |= ON_HOST
    logits = logits_of(1)
    logits[0, END] = logits.max() + likely
    rest = logits.clone()
    rest[0, END] = -torch.inf
    expected = rest.log_softmax(1).topk(2).values[0]

    sequence = sequences_of(1, **options)[0]
    searcher.advance(logits, [sequence], [1])

    scores = sequence.sampler_state.scores
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=1e-4, atol=1e-4)


def test_a_step_that_ran_out_of_memory_is_repeated_as_if_it_had_not_run(monkeypatch):
    searcher = searcher_of()
    forced = {"num_beams": 2, "max_tokens": 3, "forced_bos_token_id": 7, **ON_HOST}
    last = {"num_beams": 2, "max_tokens": 1, "forced_eos_token_id": END, **ON_HOST}
    drawn = {"num_beams": 2, "max_tokens": 3, "do_sample": True, "seed": 1}
    rows = [forced, last, drawn, {"num_beams": 2, "max_tokens": 3, **ON_HOST}]
    sequences = [sequences_of(1, **options)[0] for options in rows]
    best = Searcher._best

    def failing(*_):
        raise MemoryError

    monkeypatch.setattr(Searcher, "_best", failing)
    with pytest.raises(MemoryError):
        searcher.advance(logits_of(4), sequences, [1] * 4)
    assert states_of(sequences) == [1, 1, 1, 1]

    monkeypatch.setattr(Searcher, "_best", best)
    steps = searcher.advance(logits_of(4), sequences, [1] * 4)

    alone = [sequences_of(1, **options)[0] for options in rows]
    for row, sequence in enumerate(alone):
        assert searcher_of().advance(logits_of(4)[row : row + 1], [sequence], [1]) == [steps[row]]
    assert steps[0].token_ids == (7,)
    assert steps[1].answers[0].token_ids == (END,)


def test_a_search_that_fails_ends_alone(monkeypatch):
    searcher = searcher_of()
    sequences = [sequences_of(1, num_beams=2, max_tokens=4, n=n, **ON_HOST)[0] for n in (1, 2)]
    advance = BeamSearch.advance

    def failing(self, *arguments):
        if self is sequences[0].sampler_state:
            raise ValueError("broken")
        return advance(self, *arguments)

    monkeypatch.setattr(BeamSearch, "advance", failing)
    first, second = searcher.advance(logits_of(2), sequences, [1, 1])

    assert "the search for an answer failed" in str(first.error)
    assert second.error is None
    assert len(second.token_ids) == 2


def test_a_search_that_cannot_begin_ends_alone(monkeypatch):
    searcher = searcher_of()
    sequences = [sequences_of(1, num_beams=2, max_tokens=4, n=n, **ON_HOST)[0] for n in (1, 2)]
    begin = BeamSearch.__init__

    def failing(self, options, *arguments, **others):
        if options is sequences[0].generation:
            raise ValueError("broken")
        begin(self, options, *arguments, **others)

    monkeypatch.setattr(BeamSearch, "__init__", failing)
    first, second = searcher.advance(logits_of(2), sequences, [1, 1])

    assert "the search for an answer failed" in str(first.error)
    other = sequences_of(1, num_beams=2, max_tokens=4, **ON_HOST)
    [alone] = searcher_of().advance(logits_of(2)[1:], other, [1])
    assert second == alone


def test_candidates_of_equal_score_keep_the_order_of_rows_and_tokens():
    tokens = np.array([[5, 6], [9, 8], [4, 7]], np.int32)
    scores = np.array([[-1.0, -2.0], [-1.0, -1.0], [-3.0, -np.inf]])

    assert ranked(tokens, scores, [2, 1]) == [
        [(-1.0, 0, 5), (-1.0, 1, 9), (-1.0, 1, 8), (-2.0, 0, 6)],
        [(-3.0, 0, 4)],
    ]


def test_searches_with_different_beams_in_one_step_go_on_as_each_does_alone():
    rows = [
        {"num_beams": 2, "max_tokens": 5, **ON_HOST},
        {"num_beams": 5, "max_tokens": 5, "repetition_penalty": 1.5},
        {"num_beams": 1, "max_tokens": 5, "temperature": 0.0, **ON_HOST},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "max_tokens": 5},
        {"num_beams": 3, "diversity_type": "sibling", "diversity_penalty": 1.0, "max_tokens": 5},
    ]
    together = [sequences_of(1, **options)[0] for options in rows]
    alone = [sequences_of(1, **options)[0] for options in rows]
    mixed, single = searcher_of(), searcher_of()
    for step in range(5):
        # beams that are not alive have rows, too
        counts = [options["num_beams"] if step else 1 for options in rows]
        logits = logits_of(sum(counts), seed=step)
        expected, begin = [], 0
        for sequence, count in zip(alone, counts, strict=True):
            own = logits[begin : begin + count].clone()
            expected += single.advance(own, [sequence], [count])
            begin += count

        # a search that has ended has another step
        assert mixed.advance(logits, together, counts) == expected
