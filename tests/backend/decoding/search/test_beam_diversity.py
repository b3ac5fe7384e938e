"""Diverse beam search: the answers of plain searches that are written from the papers."""

from collections import Counter

import pytest

from tests.backend.decoding.search.beam_oracles import TableModel
from varlen.decoding.search.beam_search import BeamSearch
from varlen.decoding.token_edits import TokenRules
from varlen.request.generation import GenerationOptions

END = 3
MAX_TOKENS = 6
VOCABULARY = 15


def search_of(**options):
    options |= {"max_tokens": MAX_TOKENS, "early_stopping": True, "n": options["num_beams"]}
    return BeamSearch(
        GenerationOptions(**options), [0], rules=TokenRules((END,)), vocab_size=VOCABULARY
    )


class PlainGroup:
    """Beams of tokens and score; it ends once it has as many answers as beams."""

    def __init__(self, size):
        self.size, self.beams, self.answers = size, [((), 0.0)], []

    def choose(self, candidates):
        """Keep the best of (key, tokens, score) and return the tokens that go on."""
        candidates.sort(key=lambda each: -each[0])
        is_last = len(candidates[0][1]) == MAX_TOKENS
        for _, tokens, score in candidates[: self.size]:
            if is_last or tokens[-1] == END:
                self.answers.append((tokens, score / len(tokens)))
        self.answers = sorted(self.answers, key=lambda each: -each[1])[: self.size]
        live = [(tokens, score) for _, tokens, score in candidates if tokens[-1] != END]
        live = live[: self.size]
        self.beams = [] if is_last or len(self.answers) == self.size else live
        return [tokens[-1] for tokens, _ in live]


def hamming_answers(model, beams, groups, penalty):
    """Return the answers of diverse beam search, Vijayakumar et al. 2016, algorithm 1."""
    searches = [PlainGroup(beams // groups) for _ in range(groups)]
    while any(group.beams for group in searches):
        chosen = Counter()
        for group in searches:
            candidates = [
                (score, (*tokens, token), score)
                for tokens, sum_ in group.beams
                for token, logprob in enumerate(model.logprobs(tokens))
                for score in [sum_ + logprob - penalty * chosen[token]]
            ]
            if candidates:
                chosen.update(group.choose(candidates))
    answers = [answer for group in searches for answer in group.answers]
    return sorted(answers, key=lambda each: -each[1])


def sibling_answers(model, beams, penalty):
    """Return the answers of the search of Li, Monroe, Jurafsky 2016, section 3.

    Children of one beam are ordered by probability, and the k-th one is ranked as if its score were k times the
    penalty less.
    """
    group = PlainGroup(beams)
    while group.beams:
        candidates = []
        for tokens, score in group.beams:
            children = sorted(enumerate(model.logprobs(tokens)), key=lambda each: -each[1])
            candidates += [
                (score + logprob - penalty * rank, (*tokens, token), score + logprob)
                for rank, (token, logprob) in enumerate(children, start=1)
            ]
        group.choose(candidates)
    return group.answers


def assert_equal(actual, expected):
    assert [answer.token_ids for answer in actual] == [tokens for tokens, _ in expected]
    scores = [score for _, score in expected]
    assert [answer.score for answer in actual] == pytest.approx(scores, rel=1e-5)


@pytest.mark.parametrize("penalty", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("beams, groups", [(2, 2), (4, 2), (6, 3), (8, 8)], ids=str)
def test_groups_find_the_answers_of_diverse_beam_search(beams, groups, penalty):
    options = {"num_beams": beams, "num_beam_groups": groups, "diversity_penalty": penalty}
    for seed in range(10):
        model = TableModel(VOCABULARY, seed)

        actual = model.run(search_of(**options))

        assert_equal(actual, hamming_answers(model, beams, groups, penalty))


@pytest.mark.parametrize("penalty", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("beams", [2, 4, 5])
def test_sibling_ranks_find_the_answers_of_the_paper(beams, penalty):
    options = {"num_beams": beams, "diversity_type": "sibling", "diversity_penalty": penalty}
    for seed in range(10):
        model = TableModel(VOCABULARY, seed)

        actual = model.run(search_of(**options))

        assert_equal(actual, sibling_answers(model, beams, penalty))


def test_a_large_penalty_gives_each_group_a_first_token_of_its_own():
    model = TableModel(VOCABULARY)

    answers = model.run(search_of(num_beams=4, num_beam_groups=4, diversity_penalty=50))

    assert len({answer.token_ids[0] for answer in answers}) == 4
