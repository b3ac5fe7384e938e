"""Edits of log probabilities in beam search: what is banned, penalized and forced."""

import math

import numpy as np

from varlen.decoding.token_edits import TokenEditor, TokenRules
from varlen.request.generation import GenerationOptions

VOCABULARY = 30


def editor_of(prompt, rules=None, **options):
    generation = GenerationOptions(num_beams=2, **options)
    return TokenEditor(rules or TokenRules((3,)), generation, prompt, vocab_size=VOCABULARY)


def edits_of(editor, *beams):
    """Return the factor of each edited token, by row, after these generated tokens."""
    histories = []
    for tokens in beams:
        history = editor.start
        for token in tokens:
            history = editor.extend(history, token)
        histories.append(history)
    edits = editor.edits(histories, len(beams[0]))
    if edits is None:
        return None
    rows = edits.rows.tolist()
    assert rows == sorted(rows)
    pairs = list(zip(rows, edits.tokens.tolist(), strict=True))
    assert len({*pairs}) == len(pairs)
    factors = zip(pairs, edits.factors.tolist(), strict=True)
    found = [{} for _ in beams]
    for (row, token), factor in factors:
        found[row][token] = factor
    return found


def test_without_rules_there_are_no_edits():
    assert edits_of(editor_of([1, 2]), (4, 5), (6, 7)) is None


def test_tokens_of_prompt_and_answer_are_penalized():
    editor = editor_of([1, 2, 1], repetition_penalty=1.5)

    assert edits_of(editor, ()) == [{1: 1.5, 2: 1.5}]
    assert edits_of(editor, (4, 1), (5, 5)) == [
        {1: 1.5, 2: 1.5, 4: 1.5},
        {1: 1.5, 2: 1.5, 5: 1.5},
    ]


def test_a_ban_comes_before_a_penalty():
    rules = TokenRules((3, 2), suppressed_ids=(1,))
    editor = editor_of([1, 2], rules, repetition_penalty=2.0, min_tokens=3, no_repeat_ngram_size=1)

    assert edits_of(editor, (4,)) == [
        {1: math.inf, 2: math.inf, 3: math.inf, 4: math.inf},
    ]


def test_an_ngram_does_not_repeat_across_prompt_and_answer():
    editor = editor_of([5, 6, 7, 5, 6], no_repeat_ngram_size=3)

    assert edits_of(editor, ()) == [{7: math.inf}]
    # 6 8 9 and 5 6 8 begin in the prompt
    assert edits_of(editor, (8, 9, 6, 8), (8, 9, 5, 6)) == [
        {9: math.inf},
        {7: math.inf, 8: math.inf},
    ]


def test_a_token_that_follows_an_ngram_many_times_is_kept_once():
    # each one was kept, so a long prompt and an n-gram of one token stopped the engine for minutes
    editor = editor_of([5, 6] * 50, no_repeat_ngram_size=1)

    assert sum(map(len, editor._prompt_followers.values())) == 2
    assert edits_of(editor, (7,)) == [{5: math.inf, 6: math.inf, 7: math.inf}]


def test_end_tokens_and_first_tokens_are_banned_in_time():
    rules = TokenRules((3, 4), first_suppressed_ids=(8,))
    editor = editor_of([1], rules, min_tokens=1)

    assert edits_of(editor, ()) == [dict.fromkeys((3, 4, 8), math.inf)]
    assert edits_of(editor, (5,)) is None


def test_the_first_token_after_a_forced_one_is_the_first():
    rules = TokenRules((3,), forced_first_id=7, first_suppressed_ids=(8,))

    assert edits_of(editor_of([1], rules), (7,)) == [{8: math.inf}]
    # a longer prompt has its first token already
    assert editor_of([1, 2], rules).forced(0) is None
    assert edits_of(editor_of([1, 2], rules), ()) == [{8: math.inf}]


def test_the_last_token_is_forced_where_max_tokens_ends_the_answer():
    editor = editor_of([1], TokenRules((3,), forced_last_id=3), max_tokens=4)

    assert [editor.forced(number) for number in range(4)] == [None, None, None, 3]


def test_what_a_request_has_replaces_the_rules_of_the_checkpoint():
    rules = TokenRules((3,), 7, 3, (5,), (6,), banned_ids=(8,))
    options = GenerationOptions(
        num_beams=2, ignore_eos=True, forced_bos_token_id=9, suppress_tokens=()
    )

    assert rules.with_options(GenerationOptions()) == rules
    assert rules.with_options(options) == TokenRules((), 9, 3, (), (6,), banned_ids=(8,))


def test_banned_and_suppressed_tokens_are_never_generated():
    [found] = edits_of(editor_of([1], TokenRules((3,), suppressed_ids=(5,), banned_ids=(8, 5))), ())

    assert found == {5: math.inf, 8: math.inf}


def test_tokens_beyond_the_vocabulary_are_no_edits():
    rules = TokenRules((3, 99), suppressed_ids=(5, 99), first_suppressed_ids=(6, 99))
    options = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1, "min_tokens": 1}

    [found] = edits_of(editor_of([1, 99], rules, **options), ())

    assert sorted(found) == [1, 3, 5, 6]


def test_random_histories_give_each_token_one_edit():
    rng = np.random.default_rng(0)
    for _ in range(100):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 12)).tolist()
        rules = TokenRules((3, 4), suppressed_ids=tuple(range(3, 9)), first_suppressed_ids=(4, 9))
        size = int(rng.integers(0, 4))
        editor = editor_of(
            prompt, rules, min_tokens=2, repetition_penalty=1.2, no_repeat_ngram_size=size
        )
        beams = rng.integers(0, VOCABULARY, (3, rng.integers(0, 9))).tolist()

        found = edits_of(editor, *beams)

        for tokens, factors in zip(beams, found, strict=True):
            seen = [*prompt, *tokens]
            ngrams = (
                {tuple(seen[at : at + size]) for at in range(len(seen) - size + 1)}
                if size
                else set()
            )
            banned = {*rules.suppressed_ids, *((3, 4) if len(tokens) < 2 else ())}
            banned |= {4, 9} if not tokens else set()
            banned |= {t for t in range(VOCABULARY) if (*seen[len(seen) - size + 1 :], t) in ngrams}
            expected = dict.fromkeys(seen, np.float32(1.2)) | dict.fromkeys(banned, math.inf)
            assert factors == expected
