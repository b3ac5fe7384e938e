"""Biases and bad words, compared with processors of transformers."""

import math

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

from tests.backend.decoding.sandboxes import new_grammars
from tests.backend.decoding.sequences import sample, sequence_of, sequences_of
from tests.backend.decoding.text.small_tokenizers import KINDS, byte_level
from tests.backend.refusals import refused_request as refused
from varlen.decoding.sampling.sampling import Sampler
from varlen.decoding.search.searcher import Searcher
from varlen.decoding.token_edits import BadWords, TokenRules
from varlen.request.generation import GenerationOptions

CPU = torch.device("cpu")
VOCABULARY = 420
END = 0
WORDS = ("dog", " the", "mind", "b", "😀", "zwei Bären")


def bad_words_of(tokenizer=None):
    return BadWords(tokenizer or byte_level(), VOCABULARY, [END])


@pytest.fixture(scope="module")
def sampler():
    return Sampler(VOCABULARY, [END], new_grammars(byte_level(), 402, []), bad_words_of(), CPU)


def logits_of(rows, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, VOCABULARY))).float()


def forms_of(tokenizer, words):
    """Return the token ids of words, with and without a space, each form once."""
    found = []
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False).ids
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False).ids
        found.append(bare)
        if spaced != bare:
            found.append(spaced)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_forbidden_with_and_without_a_space(kind):
    tokenizer = KINDS[kind]()

    forbidden = bad_words_of(tokenizer).forbidden(WORDS)

    forms = {(*prefix, last) for prefix, lasts in forbidden.after.items() for last in lasts}
    forms |= {(token,) for token in forbidden.always}
    assert forms == {tuple(each) for each in forms_of(tokenizer, WORDS)}


def test_a_byte_level_word_is_forbidden_with_and_without_its_space():
    tokenizer = byte_level()
    forbidden = bad_words_of().forbidden(("the",))

    texts = {tokenizer.decode([token]) for token in forbidden.always}
    assert texts | {
        tokenizer.decode([*prefix, last])
        for prefix, lasts in forbidden.after.items()
        for last in lasts
    } >= {"the"}
    assert bad_words_of().forbidden((" the",)) == forbidden


@pytest.mark.parametrize("bias", [{}, {5: 3.5, 402: -100.0, 7: 0.25}], ids=["none", "biased"])
@pytest.mark.parametrize("words", [(), WORDS], ids=["none", "words"])
def test_logits_are_changed_as_processors_of_transformers_do(sampler, bias, words):
    forms = forms_of(byte_level(), words)
    # answers that end with all but the last token of each word, and with less
    starts = [[], [9], *(form[:-1] for form in forms), *(form[1:-1] for form in forms)]
    logits = logits_of(len(starts))
    expected = logits.double()
    for row, start in enumerate(starts):
        # these look at no prompt here; a token before lets them read words of all lengths
        ids = torch.tensor([[401] * 9 + start])
        if bias:
            processor = SequenceBiasLogitsProcessor(
                {(each,): value for each, value in bias.items()}
            )
            expected[row] = processor(ids, expected[row : row + 1])
        if forms:
            expected[row] = NoBadWordsLogitsProcessor(forms)(ids, expected[row : row + 1])

    changed = logits.clone()
    options = {"logit_bias": (*bias.items(),), "bad_words": words, "temperature": 0}
    sequences = [sequence_of(1, generated=start, **options) for start in starts]
    tokens = sample(sampler, changed, sequences)

    # one rounding of a bias of at most 100, and one of the sum
    rounding = torch.finfo(torch.float32).eps
    torch.testing.assert_close(changed.double(), expected, rtol=rounding, atol=100 * rounding)
    assert [token.token_id for token in tokens] == expected.argmax(1).tolist()


def test_the_prompt_begins_no_word(sampler):
    [*prefix, last] = byte_level().encode("zwei Bären", add_special_tokens=False).ids
    logits = logits_of(2)
    options = {"bad_words": ("zwei Bären",), "temperature": 0}

    sample(
        sampler,
        logits,
        [sequence_of(*prefix, **options), sequence_of(1, generated=prefix, **options)],
    )

    assert math.isfinite(logits[0, last])
    assert logits[1, last] == -math.inf


def test_other_sequences_of_a_step_keep_their_logits_and_reports_their_log_probabilities(sampler):
    logits = logits_of(3)
    sequences = [
        sequence_of(1, temperature=0.5, seed=1),
        sequence_of(1, temperature=0.5, seed=1, logit_bias=((6, 90.0),), logprobs=1),
        sequence_of(1, temperature=0),
    ]

    changed = logits.clone()
    tokens = sample(sampler, changed, sequences)

    assert torch.equal(changed[::2], logits[::2])
    assert tokens[1].token_id == 6
    assert tokens[1].logprobs.logprob == pytest.approx(float(logits.log_softmax(1)[1, 6]))


def test_an_answer_holds_no_bad_word_however_likely(sampler):
    words = ("dog", "quick", "mind")
    forms = forms_of(byte_level(), words)
    likely = sorted({token for form in forms for token in form})
    sequence = sequence_of(1, bad_words=words, seed=3)
    for step in range(300):
        logits = logits_of(1, step)
        logits[0, likely] += 6
        [token] = sample(sampler, logits, [sequence])
        sequence.token_ids.append(token.token_id)

    tokens = sequence.token_ids[1:]
    assert len({*tokens} & {*likely}) > 3
    for form in forms:
        assert all(tokens[at : at + len(form)] != form for at in range(len(tokens)))


def test_words_without_tokens_and_words_that_forbid_everything_are_refused():
    few = BadWords(byte_level(), 3, [END])
    words = (byte_level().decode([token], skip_special_tokens=False) for token in (1, 2))

    with refused("bad_words forbid every token of this model; send fewer words"):
        few.check(GenerationOptions(bad_words=(*words,)))
    with refused("bad_words has '\\u200b', which has no tokens"):
        bad_words_of(EmptyTokenizer()).check(GenerationOptions(bad_words=("\u200b",)))


class EmptyTokenizer:
    """Finds a token in no text, as a tokenizer whose normalizer removes characters."""

    class Encoding:
        ids = ()

    def encode(self, *_, **__):
        return self.Encoding()


@pytest.mark.parametrize("sampled", [False, True], ids=["best", "sampled"])
def test_a_search_reads_the_biased_logits_and_skips_bad_words(sampled):
    searcher = Searcher(VOCABULARY, TokenRules((END,)), bad_words_of(), CPU, renormalizes=False)
    options = {"num_beams": 3, "n": 3, "max_tokens": 4, "length_penalty": 0.0}
    options |= {"do_sample": True, "seed": 5} if sampled else {}
    bias, words = {5: 3.5, 9: -2.0}, ("dog", "the")
    forms = forms_of(byte_level(), words)
    biased, plain = (
        sequences_of(1, **options, **given)[0]
        for given in (
            {"logit_bias": (*bias.items(),), "bad_words": words},
            # the host takes its steps
            {"no_repeat_ngram_size": 20},
        )
    )
    for step in range(3):
        logits = logits_of(2 if step == 0 else 6, step)
        # beside the biased search runs one without a bias
        rows = len(logits) // 2
        for form in forms:
            # likely, so that the search would take them
            logits[:rows, form[-1]] += 4
        logprobs = changed(logits[:rows], bias).log_softmax(1)
        before = list(biased.sampler_state.scores) if step else [0.0]
        histories = [list(each) for each in tokens_of(biased)] if step else [[]]
        steps = searcher.advance(logits.clone(), [biased, plain], [rows, rows])
        if steps[0].answers is not None:
            break
        for parent, token, score in zip(
            steps[0].parents, steps[0].token_ids, biased.sampler_state.scores, strict=True
        ):
            tokens = [*histories[parent], token]
            assert all(tokens[-len(form) :] != form for form in forms)
            assert score == pytest.approx(before[parent] + float(logprobs[parent, token]), abs=1e-4)


def changed(logits, bias):
    logits = logits.clone()
    for token, value in bias.items():
        logits[:, token] += value
    return logits


def tokens_of(sequence):
    return [beam.token_ids() for beam in sequence.sampler_state._beams]
