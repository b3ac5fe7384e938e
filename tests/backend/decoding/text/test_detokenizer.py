"""Text of tokens as they come: whole characters, and together the text of all tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.decoding.text.small_tokenizers import (
    END,
    KINDS,
    TEXTS,
    byte_fallback,
    byte_level,
    metaspace,
)
from varlen.decoding.text.writer import Detokenizer, TokenBytes


def parts_of(tokenizer, ids, prompt_ids=(), *, skip_special_tokens=True):
    """Return the text of each token, then the rest; another answer has the same."""
    texts = TokenBytes(tokenizer).texts(skip_special_tokens=skip_special_tokens)
    answers = []
    for _ in range(2):
        detokenizer = Detokenizer(
            tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens, texts=texts
        )
        answers.append([*map(detokenizer.add, ids), detokenizer.finish()])
    assert answers[0] == answers[1]
    return answers[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False], ids=["without_special", "with_special"])
@given(data=st.data())
@settings(max_examples=60)
def test_parts_are_together_the_text_of_all_tokens(kind, skip, data):
    tokenizer = KINDS[kind]()
    # tokens of bytes: only such as are text, since a decoder changes its mind about a run of bytes that are none
    ids = data.draw(
        st.lists(st.sampled_from(text_ids(tokenizer)), max_size=60)
        if kind != "byte_level"
        else st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60)
    )

    parts = parts_of(tokenizer, ids, skip_special_tokens=skip)

    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)


def text_ids(tokenizer):
    vocabulary = tokenizer.get_vocab()
    return sorted(index for token, index in vocabulary.items() if not token.startswith("<0x"))


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(alphabet=st.sampled_from("ab 你😀é\n🇩🇪\u200d"), max_size=80))
@settings(max_examples=60)
def test_no_part_splits_a_character_of_a_text(kind, text):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text).ids

    parts = parts_of(tokenizer, ids)

    assert "".join(parts) == tokenizer.decode(ids)
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=st.sampled_from(TEXTS), text=st.sampled_from(TEXTS))
@settings(max_examples=30)
def test_an_answer_at_once_has_the_text_of_its_parts(kind, prompt, text):
    tokenizer = KINDS[kind]()
    prompt_ids, ids = tokenizer.encode(prompt).ids, tokenizer.encode(text).ids
    detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=True, texts=None)

    whole = detokenizer.whole(ids)

    assert whole == "".join(parts_of(tokenizer, ids, prompt_ids))


@given(data=st.binary(max_size=120))
@settings(max_examples=120)
def test_any_bytes_come_out_as_they_are_decoded_together(data):
    tokenizer = byte_level()
    alphabet = byte_tokens(tokenizer)
    ids = [alphabet[byte] for byte in data]

    parts = parts_of(tokenizer, ids)

    assert "".join(parts) == data.decode("utf-8", errors="replace")


def byte_tokens(tokenizer):
    """Return the token of each byte of a byte-level tokenizer."""
    # printable bytes stand for themselves, the others for characters from 256 on, in order
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [tokenizer.token_to_id(characters[byte]) for byte in range(256)]


@given(data=st.binary(max_size=200))
@settings(max_examples=100)
def test_a_run_of_bytes_that_starts_with_none_of_a_character_is_replaced_whole(data):
    # what this decoder does with all bytes of such a run, valid or not
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in b"\xff" + data]

    assert "".join(parts_of(tokenizer, ids)) == tokenizer.decode(ids) == "\ufffd" * len(ids)


@given(data=st.binary(max_size=200))
@settings(max_examples=100)
def test_any_run_of_bytes_gives_some_text(data):
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in b"x" + data]

    text = "".join(parts_of(tokenizer, ids))

    assert text[0] in "x\ufffd"
    assert len(text) >= len(ids) // 4


def test_a_window_may_be_cut_between_the_bytes_of_many_characters():
    tokenizer = byte_fallback()
    text = "ก" * 200
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]

    parts = parts_of(tokenizer, ids)

    assert "".join(parts) == text
    assert parts[:6] == ["", "", "ก", "", "", "ก"]


def test_a_prompt_may_end_between_words():
    tokenizer = metaspace()
    prompt, answer = tokenizer.encode("the quick brown").ids, tokenizer.encode("fox jumps").ids

    assert "".join(parts_of(tokenizer, answer, prompt)) == " fox jumps"
    assert "".join(parts_of(tokenizer, answer)) == "fox jumps"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", range(1, 70, 7))
def test_prompt_and_answer_are_together_the_text_of_all_tokens(kind, cut):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(TEXTS[1] + TEXTS[0], add_special_tokens=False).ids
    prompt, answer = ids[:cut], ids[cut:]
    # a prompt that ends inside a character has no text of its own
    while "\ufffd" in tokenizer.decode(prompt):
        prompt, answer = ids[: len(prompt) + 1], ids[len(prompt) + 1 :]

    text = "".join(parts_of(tokenizer, answer, prompt))

    assert tokenizer.decode(prompt) + text == tokenizer.decode(ids)


def test_special_tokens_do_not_hide_the_space_before_a_word():
    tokenizer = byte_fallback()
    the, dog = (tokenizer.token_to_id(token) for token in ("▁the", "▁d"))
    end = tokenizer.token_to_id(END)

    assert "".join(parts_of(tokenizer, [the, end, end, dog])) == "the d"


def test_a_replacement_character_of_the_text_is_kept():
    tokenizer = byte_level()
    text = "a\ufffdb\ufffd\ufffd\ufffd\ufffd\ufffd c\ufffd"

    assert "".join(parts_of(tokenizer, tokenizer.encode(text).ids)) == text
