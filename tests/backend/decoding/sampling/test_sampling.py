"""The choice of tokens: by exact probabilities and seed, whatever else runs."""

import math
import socket
from copy import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.backend.decoding.sandboxes import new_grammars
from tests.backend.decoding.sequences import RandomModel, extend, sample, sequence_of, sequences_of
from tests.backend.decoding.text.small_tokenizers import byte_level
from tests.closeness import assert_close
from varlen.decoding.sampling import sampling
from varlen.decoding.sampling.sampler_state import uniform_numbers
from varlen.decoding.sampling.sampling import Sampler
from varlen.decoding.token_edits import BadWords

VOCABULARY = 50
EOS = 3


@pytest.fixture(scope="module")
def sampler():
    grammars = new_grammars(byte_level(), VOCABULARY, [])
    bad_words = BadWords(byte_level(), VOCABULARY, [EOS])
    return Sampler(VOCABULARY, [EOS], grammars, bad_words, torch.device("cpu"))


def random_logits(rows, seed=0, vocabulary=VOCABULARY):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def processed(logits, sequence, sampler):
    """Return the logits from which the sampler chooses, before temperature and limits."""
    logits = logits.clone()
    sample(sampler, logits, [sequence])
    return logits


def test_greedy_sequences_take_the_largest_logit(sampler):
    logits = random_logits(8)
    sequences = [sequence_of(1, 2, temperature=0) for _ in range(8)]

    tokens = sample(sampler, logits.clone(), sequences)

    assert [token.token_id for token in tokens] == logits.argmax(1).tolist()
    assert all(token.logprobs is None for token in tokens)


def test_greedy_sequences_stay_greedy_beside_random_ones(sampler):
    logits = random_logits(8)
    sequences = [sequence_of(1, 2, temperature=row % 2 * 2.0, top_k=9) for row in range(8)]

    tokens = sample(sampler, logits.clone(), sequences)

    assert [t.token_id for t in tokens[::2]] == logits.argmax(1).tolist()[::2]


LIMITS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.8},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k_and_top_p": {"top_k": 9, "top_p": 0.7, "temperature": 1.3},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.2, "frequency_penalty": -0.4},
}


@pytest.mark.parametrize("options", LIMITS.values(), ids=LIMITS)
def test_tokens_are_drawn_with_their_exact_probabilities(sampler, options):
    prompt, generated = (1, 2, 2, 5), [7, 7, 9]
    logits = random_logits(1)
    draws = 1500
    sequences = [
        sequence_of(*prompt, generated=generated, seed=seed, **options) for seed in range(draws)
    ]

    tokens = sample(sampler, logits.repeat(draws, 1), sequences)

    expected = draws * exact_probabilities(logits, prompt, generated, **options)
    counts = np.bincount([token.token_id for token in tokens], minlength=VOCABULARY)
    assert not counts[expected == 0].any()
    # cells of few draws are one
    order = np.argsort(expected)
    small = order[expected[order].cumsum() < 15]
    cells = np.append(np.setdiff1d(np.flatnonzero(expected), small), -1)
    counts = np.append(counts, counts[small].sum())[cells]
    expected = np.append(expected, expected[small].sum())[cells]
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    freedom = len(cells) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def exact_probabilities(logits, prompt, generated, **options):
    """Return the probability of each token, by transformers' processors in fp64."""
    logits = penalized(logits.double(), prompt, generated, **options)
    processors = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    for name, kind in processors.items():
        if name in options:
            logits = kind(options[name])(None, logits)
    return logits.softmax(1)[0].numpy()


def penalized(
    logits,
    prompt,
    generated,
    *,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    **_,
):
    ids = torch.tensor([[*prompt, *generated]])
    logits = RepetitionPenaltyLogitsProcessor(repetition_penalty)(ids, logits)
    counts = torch.bincount(torch.tensor(generated, dtype=torch.long), minlength=logits.shape[1])
    return logits - frequency_penalty * counts - presence_penalty * (counts > 0)


@pytest.mark.parametrize("rows", range(1, 10))
def test_what_rows_are_drawn_with_is_aligned_for_any_number_of_rows(sampler, monkeypatch, rows):
    """With another alignment, Triton would compile the kernel again in service."""
    addresses = []

    def sample_tokens(logits, *numbers):
        addresses.extend(each.data_ptr() for each in numbers)
        return torch.zeros(len(logits), dtype=torch.int32)

    monkeypatch.setattr(sampler, "_kernels", SimpleNamespace(sample_tokens=sample_tokens))
    sample(sampler, random_logits(rows), [sequence_of(1, temperature=0.5) for _ in range(rows)])

    assert len(addresses) == 5
    assert not any(address % 16 for address in addresses)


@given(data=st.data())
@settings(max_examples=60)
def test_penalties_are_those_of_the_formulas_for_every_mix_of_sequences(sampler, data):
    tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=80)
    cases = data.draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=80),
                tokens,
                st.fixed_dictionaries(
                    {},
                    optional={
                        "repetition_penalty": st.sampled_from([0.5, 1.2]),
                        "presence_penalty": st.sampled_from([-1.5, 0.7]),
                        "frequency_penalty": st.sampled_from([-0.5, 1.1]),
                    },
                ),
            ),
            min_size=1,
            max_size=5,
        )
    )
    logits = random_logits(len(cases), seed=len(cases))
    sequences = [
        sequence_of(*prompt, generated=generated, temperature=0, **options)
        for prompt, generated, options in cases
    ]

    actual = logits.clone()
    chosen = sample(sampler, actual, sequences)

    expected = torch.cat(
        [
            penalized(logits[[row]].double(), prompt, generated, **options)
            for row, (prompt, generated, options) in enumerate(cases)
        ]
    )
    assert_close(actual, expected, roundings=4)
    assert [token.token_id for token in chosen] == actual.argmax(1).tolist()


def test_penalties_follow_a_sequence_as_it_grows(sampler):
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "temperature": 0}
    model = RandomModel(VOCABULARY)
    sequence = sequence_of(1, 2, 2, **options)

    for _ in range(150):
        logits = model.logits([sequence])
        expected = penalized(logits, (1, 2, 2), sequence.token_ids[3:], **options)
        [token] = sample(sampler, logits, [sequence])
        assert_close(logits, expected, roundings=4)
        sequence.token_ids.append(token.token_id)


def test_no_end_token_comes_before_the_smallest_number_of_tokens(sampler):
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [EOS, 8]] = torch.tensor([9.0, 8.0])
    options = {"min_tokens": 2, "stop_token_ids": (8, VOCABULARY + 5), "temperature": 0}
    reference = MinNewTokensLengthLogitsProcessor(2, 2, [EOS, 8])

    for generated in ([], [5], [5, 6]):
        sequence = sequence_of(1, 2, generated=generated, **options)
        expected = reference(torch.tensor([sequence.token_ids]), logits.clone())
        assert torch.equal(processed(logits, sequence, sampler), expected)


def test_end_tokens_that_are_ignored_do_not_come_too_early_either(sampler):
    logits = torch.zeros(1, VOCABULARY)
    logits[0, EOS] = 9.0
    sequence = sequence_of(1, min_tokens=1, ignore_eos=True, temperature=0)

    assert sample(sampler, logits, [sequence])[0].token_id != EOS


MIXED_OPTIONS = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"seed": 1},
    {"seed": 2, "top_k": 4},
    {"seed": 3, "top_p": 0.6, "frequency_penalty": 0.9},
    {"seed": 4, "min_p": 0.2, "min_tokens": 9, "presence_penalty": -1},
    {"seed": 5, "temperature": 0.4, "logprobs": 3},
    {"seed": 5, "temperature": 2.0, "stop_token_ids": (7,), "min_tokens": 4},
]


def mixed_sequences():
    return [sequence_of(index, 2, index, **each) for index, each in enumerate(MIXED_OPTIONS)]


def test_tokens_depend_on_seed_and_options_only_not_on_the_other_sequences(sampler):
    model = RandomModel(VOCABULARY)
    alone = mixed_sequences()
    for sequence in alone:
        extend(sampler, model, [sequence], 20)
    expected = [sequence.token_ids for sequence in alone]

    together = mixed_sequences()
    extend(sampler, model, together, 20)
    assert [sequence.token_ids for sequence in together] == expected

    rng = np.random.default_rng(0)
    mixed = mixed_sequences()
    while unfinished := [each for each in mixed if each.num_generated < 20]:
        some = rng.permutation(len(unfinished))[: rng.integers(1, len(unfinished) + 1)]
        extend(sampler, model, [unfinished[index] for index in some], 1)
    assert [sequence.token_ids for sequence in mixed] == expected


def test_a_sequence_that_starts_again_from_its_tokens_continues_as_before(sampler):
    model = RandomModel(VOCABULARY)
    whole = mixed_sequences()
    extend(sampler, model, whole, 20)

    for number in (1, 7, 19):
        again = mixed_sequences()
        for sequence, other in zip(again, whole, strict=True):
            sequence.token_ids += other.token_ids[3 : 3 + number]
        extend(sampler, model, again, 20 - number)
        assert [s.token_ids for s in again] == [s.token_ids for s in whole]


def test_samples_of_a_prompt_differ_and_each_can_be_repeated(sampler):
    model = RandomModel(VOCABULARY)
    first, second = (sequences_of(1, 2, n=5, seed=9) for _ in range(2))
    extend(sampler, model, first, 15)
    extend(sampler, model, second[::-1], 15)

    assert [s.token_ids for s in first] == [s.token_ids for s in second]
    assert len({tuple(s.token_ids) for s in first}) == 5


def test_a_seed_gives_the_same_tokens_and_another_seed_others(sampler):
    model = RandomModel(VOCABULARY)
    runs = [sequence_of(1, 2, seed=seed) for seed in (1, 1, 2, None, None)]
    extend(sampler, model, runs, 20)

    one, same, other, drawn, again = (tuple(s.token_ids) for s in runs)
    assert one == same
    assert len({one, other, drawn, again}) == 4


def test_log_probabilities_are_those_of_the_model_s_logits(sampler):
    logits = random_logits(4)
    expected = logits.log_softmax(1)
    numbers = [0, 3, None, 20]
    sequences = [
        sequence_of(1, 2, logprobs=number, seed=5, temperature=0.5, top_k=6, presence_penalty=2)
        for number in numbers
    ]

    tokens = sample(sampler, logits, sequences)

    assert tokens[2].logprobs is None
    for row, number in enumerate(numbers):
        if number is None:
            continue
        logprobs = tokens[row].logprobs
        assert logprobs.token_id == tokens[row].token_id
        assert_close([logprobs.logprob], expected[row, [logprobs.token_id]], roundings=4)
        best = expected[row].topk(number)
        assert [token_id for token_id, _ in logprobs.top] == best.indices.tolist()
        assert_close([value for _, value in logprobs.top], best.values, roundings=4)


@pytest.mark.parametrize("spread", [1e-4, 1.0, 30.0, 1e3, 1e30])
def test_log_probabilities_are_those_of_float64_over_the_whole_range(sampler, spread):
    logits = random_logits(4) * spread
    expected = logits.double().log_softmax(1)

    tokens = sample(sampler, logits.clone(), [sequence_of(1, logprobs=20) for _ in range(4)])

    for row, token in enumerate(tokens):
        found = dict(token.logprobs.top)
        exact = expected[row, list(found)].tolist()
        # a probability is right up to this relative error, as the exponential of its logarithm
        assert list(found.values()) == pytest.approx(exact, rel=1e-6, abs=1e-6)


def test_logprobs_of_a_small_vocabulary_are_all_there_are():
    tokenizer = byte_level()
    grammars, bad_words = new_grammars(tokenizer, 5, []), BadWords(tokenizer, 5, [])
    sampler = Sampler(5, [0], grammars, bad_words, torch.device("cpu"))
    sequence = sequence_of(1, logprobs=20)

    [token] = sample(sampler, random_logits(1, vocabulary=5), [sequence])

    assert len(token.logprobs.top) == 5


def test_a_row_without_any_choice_still_gives_a_token(sampler):
    # all tokens are end tokens, which may not come yet
    sequence = sequence_of(1, stop_token_ids=tuple(range(VOCABULARY)), min_tokens=3, seed=1)

    [token] = sample(sampler, random_logits(1), [sequence])

    assert 0 <= token.token_id < VOCABULARY


class BrokenGrammars:
    """Grammars whose matcher panics: no Exception, since the library is in another language."""

    def matcher(self, grammar):
        raise SystemError(grammar)


def test_a_grammar_that_fails_ends_its_own_sequence_and_no_other():
    bad_words = BadWords(byte_level(), VOCABULARY, [EOS])
    sampler = Sampler(VOCABULARY, [EOS], BrokenGrammars(), bad_words, torch.device("cpu"))
    sequences = [sequence_of(0), sequence_of(1, grammar='{"regex": "a"}'), sequence_of(2)]

    tokens = sample(sampler, random_logits(3), sequences)

    assert [token.error is None for token in tokens] == [True, False, True]


class EmptyMatcher:
    """A position in a grammar at which no token of the model is allowed."""

    def advance(self, token_ids, begin):
        pass

    def allowed_tokens(self):
        return np.zeros(VOCABULARY, np.bool_)


class EmptyGrammars:
    def matcher(self, _):
        return EmptyMatcher()


def test_a_grammar_that_allows_no_token_ends_its_own_sequence():
    bad_words = BadWords(byte_level(), VOCABULARY, [EOS])
    sampler = Sampler(VOCABULARY, [EOS], EmptyGrammars(), bad_words, torch.device("cpu"))

    plain, constrained = sample(
        sampler, random_logits(2), [sequence_of(0), sequence_of(1, grammar='{"regex": "z"}')]
    )

    assert plain.error is None
    assert "no token of this model can go on" in str(constrained.error)


class SlowMatcher:
    """A place in a grammar whose mask never comes."""

    def __init__(self, asked):
        self._asked = asked
        self._read, self._write = socket.socketpair()

    def advance(self, token_ids, begin):
        pass

    def allowed_tokens(self):
        self._asked.append("mask")

    def fileno(self):
        return self._read.fileno()

    def close(self):
        self._read.close()
        self._write.close()


class SlowGrammars:
    def __init__(self):
        self.asked, self.matchers = [], []

    def matcher(self, _):
        self.matchers.append(SlowMatcher(self.asked))
        return self.matchers[-1]


def test_a_mask_that_has_not_come_holds_back_its_own_row_and_no_other(monkeypatch):
    grammars, bad_words = SlowGrammars(), BadWords(byte_level(), VOCABULARY, [EOS])
    sampler = Sampler(VOCABULARY, [EOS], grammars, bad_words, torch.device("cpu"))
    waits = []
    monkeypatch.setattr(sampling, "await_processes", lambda _, seconds: waits.append(seconds))
    monkeypatch.setattr(sampling, "_MASK_SECONDS", 1e-9)
    sequences = [sequence_of(0), sequence_of(1, grammar='{"regex": "a"}'), sequence_of(2)]

    alone = sample(sampler, random_logits(3)[[0, 2]], [sequences[0], sequences[2]])
    for _ in range(3):
        tokens = sample(sampler, random_logits(3), sequences)
        assert [token.is_pending for token in tokens] == [False, True, False]
        assert [tokens[0], tokens[2]] == alone
    # every step looks whether it has come
    assert len(grammars.asked) >= 3
    for matcher in grammars.matchers:
        matcher.close()


def test_a_step_waits_once_for_the_mask_of_a_slow_grammar(monkeypatch):
    grammars, bad_words = SlowGrammars(), BadWords(byte_level(), VOCABULARY, [EOS])
    sampler = Sampler(VOCABULARY, [EOS], grammars, bad_words, torch.device("cpu"))
    now, waits = [0.0], []

    def wait(_, seconds):
        waits.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(sampling, "await_processes", wait)
    monkeypatch.setattr(sampling, "time", SimpleNamespace(monotonic=lambda: now[0]))
    sequences = [sequence_of(0), sequence_of(1, grammar='{"regex": "a"}')]

    for _ in range(5):
        sample(sampler, random_logits(2), sequences)

    assert waits == [0.01]
    # a step without other rows may wait longer, but a request that comes meanwhile waits as long
    sample(sampler, random_logits(1), sequences[1:])
    assert waits == [0.01, pytest.approx(0.02)]
    for matcher in grammars.matchers:
        matcher.close()


# Options whose choices depend on the tokens of the answer.
OF_TOKENS = {
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.2},
    "bias": {"logit_bias": {"7": 2.0}},
    "bad words": {"bad_words": ["ab", "abc", "b"]},
    "none": {},
}


@pytest.mark.parametrize("options", OF_TOKENS.values(), ids=OF_TOKENS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_same_before_the_last_one_is_read(sampler, options, temperature):
    if "logit_bias" in options:
        options = {"logit_bias": tuple((int(k), v) for k, v in options["logit_bias"].items())}
    if "bad_words" in options:
        options = {"bad_words": tuple(options["bad_words"])}
    model, options = RandomModel(VOCABULARY), {**options, "temperature": temperature, "seed": 3}
    known = sequence_of(1, 2, **options)
    extend(sampler, model, [known], 20)

    late, pending = sequence_of(1, 2, **options), []
    for length in range(20):
        whole = copy(late)
        whole.token_ids = [*late.token_ids, *pending]
        [token] = sampler.sample(model.logits([whole]), [late], [length])
        assert not token.is_pending
        # the engine reads each token when the next one has been chosen
        late.token_ids += pending
        pending = [token.token_id]

    assert [*late.token_ids, *pending] == known.token_ids


def test_a_token_after_one_that_was_not_chosen_is_pending_and_changes_nothing(sampler):
    sequence = sequence_of(1, 2, temperature=0.0, frequency_penalty=1.0)
    model = RandomModel(VOCABULARY)
    extend(sampler, model, [sequence], 2)

    # one token more than is known, and than was chosen
    [token] = sampler.sample(model.logits([sequence]), [sequence], [4])

    assert token.is_pending
    [again] = sample(sampler, model.logits([sequence]), [sequence])
    other = sequence_of(1, 2, temperature=0.0, frequency_penalty=1.0)
    extend(sampler, model, [other], 3)
    assert again.token_id == other.token_ids[-1]


DRAWN = {
    "greedy": ({"temperature": 0.0}, False),
    "sampled": ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1}, True),
}


@pytest.mark.parametrize(("options", "is_random"), DRAWN.values(), ids=DRAWN)
def test_draws_give_the_tokens_of_a_sample(sampler, options, is_random):
    sequences = [sequence_of(1, 2, **options) for _ in range(3)]

    draws = sampler.draws(sequences, [0, 4, 9])

    assert [limits[0] for limits in draws.limits] == [options["temperature"]] * 3
    assert (draws.uniform is not None) == is_random
    if is_random:
        numbers = uniform_numbers([each.sampler_state.key for each in sequences], [0, 4, 9])
        assert draws.uniform.tolist() == numbers.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 0},
        # no place for its list
        {"frequency_penalty": 0.1},
        {"logit_bias": ((3, 1.0),)},
        {"min_tokens": 5},
    ],
    ids=str,
)
def test_nothing_is_drawn_where_more_decides(sampler, options):
    plain, other = sequence_of(1, 2, seed=1), sequence_of(1, 2, seed=1, **options)

    assert sampler.draws([plain, other], [4, 4]) is None
    # the smallest number of tokens is reached
    assert (sampler.draws([plain, other], [5, 5]) is not None) == ("min_tokens" in options)
