"""Answers: their text in parts, their end, and what of it is kept."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.decoding.text.small_tokenizers import END, PAD, byte_level
from varlen.decoding.text.writer import StopStrings, TextWriter, TokenBytes
from varlen.request.generation import GenerationOptions
from varlen.request.request import TokenLogprobs
from varlen.scheduling.device_plan import SampledToken

TOKENIZER = byte_level()
EOS = TOKENIZER.token_to_id(END)
SPECIAL = TOKENIZER.token_to_id(PAD)
BYTES = TokenBytes(TOKENIZER)


def parts_of(ids, prompt_ids=(), **options):
    """Return the parts of an answer, up to its end."""
    writer = TextWriter(
        TOKENIZER,
        GenerationOptions(**{"max_tokens": 1000, **options}),
        prompt_ids=prompt_ids,
        eos_ids=[EOS],
        token_bytes=BYTES,
    )
    parts = []
    for token_id in ids:
        parts.append(writer.write(SampledToken(token_id)))
        if parts[-1].finish_reason:
            break
    return parts


def answer_of(ids, **options):
    """Return text, number of tokens and finish reason of an answer."""
    parts = parts_of(ids, **options)
    tokens = [token_id for part in parts for token_id in part.token_ids]
    assert tokens == ids[: len(tokens)]
    return "".join(part.text for part in parts), len(tokens), parts[-1].finish_reason


def letters(text):
    """Return one token for each letter."""
    return [TOKENIZER.token_to_id(letter) for letter in text]


def test_each_token_brings_its_text_until_the_last_one():
    parts = parts_of(letters("abc"), max_tokens=3)

    assert [part.text for part in parts] == ["a", "b", "c"]
    assert [part.finish_reason for part in parts] == [None, None, "length"]


def test_the_checkpoint_s_end_token_ends_the_answer_without_its_text():
    assert answer_of([*letters("ab"), EOS, *letters("c")]) == ("ab", 3, "stop")
    assert answer_of([*letters("ab"), EOS], skip_special_tokens=False) == ("ab", 3, "stop")


def test_an_end_token_in_the_last_place_is_a_stop():
    assert answer_of([*letters("ab"), EOS], max_tokens=3) == ("ab", 3, "stop")


def test_an_end_token_may_be_ignored():
    ids = [*letters("a"), EOS, *letters("b")]

    assert answer_of(ids, ignore_eos=True, max_tokens=3) == ("ab", 3, "length")


def test_a_stop_token_ends_the_answer_without_its_text():
    [stop] = letters("b")

    assert answer_of(letters("abc"), stop_token_ids=(stop,)) == ("a", 2, "stop")
    kept = answer_of(letters("abc"), stop_token_ids=(stop,), include_stop_str_in_output=True)
    assert kept == ("ab", 2, "stop")


def test_the_text_leaves_out_special_tokens_unless_they_are_asked_for():
    ids = [*letters("a"), SPECIAL, *letters("b")]

    assert answer_of(ids, max_tokens=3)[0] == "ab"
    assert answer_of(ids, max_tokens=3, skip_special_tokens=False)[0] == f"a{PAD}b"


def test_an_unfinished_character_is_written_at_the_end():
    first = TOKENIZER.encode("€").ids[0]

    text, _, reason = answer_of([*letters("a"), first], max_tokens=2)

    assert (text, reason) == ("a\ufffd", "length")


def test_text_that_may_begin_a_stop_string_waits():
    parts = parts_of(letters("abxabc"), stop=("abc",))

    assert [part.text for part in parts] == ["", "", "abx", "", "", ""]
    assert parts[-1].finish_reason == "stop"


def test_text_that_waited_is_written_at_the_end():
    assert answer_of(letters("xab"), stop=("abc",), max_tokens=3) == ("xab", 3, "length")
    assert answer_of([*letters("xab"), EOS], stop=("abc",)) == ("xab", 4, "stop")


def test_the_answer_may_keep_its_stop_string_but_not_what_follows_it():
    [token] = [TOKENIZER.encode("the").ids[-1]]
    assert TOKENIZER.decode([token])[1:]
    stop = TOKENIZER.decode([token])[0]
    ids = [*letters("x"), token]

    assert answer_of(ids, stop=(stop,)) == ("x", 2, "stop")
    assert answer_of(ids, stop=(stop,), include_stop_str_in_output=True) == ("x" + stop, 2, "stop")


def test_a_stop_string_in_the_last_place_is_a_stop():
    assert answer_of(letters("abc"), stop=("bc",), max_tokens=3) == ("a", 3, "stop")


def test_a_stop_string_counts_after_the_smallest_number_of_tokens():
    assert answer_of(letters("aba"), stop=("a",), min_tokens=2) == ("ab", 3, "stop")
    # it may begin earlier
    assert answer_of(letters("abcd"), stop=("bc",), min_tokens=2) == ("a", 3, "stop")


def test_log_probabilities_come_with_their_token():
    writer = TextWriter(
        TOKENIZER, GenerationOptions(), prompt_ids=[], eos_ids=[], token_bytes=BYTES
    )
    [letter] = letters("x")

    [found] = writer.write(SampledToken(letter, TokenLogprobs(letter, -1.0))).logprobs

    assert found == TokenLogprobs(letter, -1.0, token_bytes=b"x")
    assert writer.write(SampledToken(letter)).logprobs == ()


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@given(
    stops=STOPS,
    parts=st.lists(st.text("abc", max_size=5), max_size=12),
    keep=st.booleans(),
)
@settings(max_examples=200)
def test_the_text_ends_at_the_stop_string_that_is_complete_first(stops, parts, keep):
    strings = StopStrings(stops, keep=keep)
    written, ended = "", False
    for part in parts:
        text, ended = strings.add(part, may_end=True)
        written += text
        if ended:
            break
    if not ended:
        written += strings.finish()

    whole = "".join(parts)
    ends = [(whole.find(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
    end, longest = min(ends, default=(len(whole), 0))
    assert ended == bool(ends)
    assert written == whole[: end if keep else end + longest]


@given(stops=STOPS, parts=st.lists(st.text("abc", max_size=5), max_size=12))
@settings(max_examples=120)
def test_no_more_text_waits_than_may_begin_a_stop_string(stops, parts):
    strings = StopStrings(stops, keep=False)
    whole, written = "", ""
    for part in parts:
        text, ended = strings.add(part, may_end=True)
        if ended:
            return
        whole, written = whole + part, written + text
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        longest = max(len(each) for each in beginnings if whole.endswith(each))
        assert len(whole) - len(written) == longest


@pytest.mark.parametrize("stop", ["quick", "the", "你", "é", "\n"])
def test_stop_strings_are_found_in_the_text_of_any_tokens(stop):
    text = "A quick fox: 你好 café, over the\nlazy dog"
    ids = TOKENIZER.encode(text).ids

    assert answer_of(ids, stop=(stop,))[0] == re.split(stop, text)[0]
