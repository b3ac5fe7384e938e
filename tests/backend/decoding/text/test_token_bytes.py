"""Bytes of tokens: together the UTF-8 of the answer, whatever the tokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tests.backend.decoding.text.small_tokenizers import (
    END,
    KINDS,
    PAD,
    TEXTS,
    byte_fallback,
    byte_level,
)
from varlen.decoding.text.writer import TextWriter, TokenBytes
from varlen.request.generation import GenerationOptions
from varlen.request.request import TokenLogprobs
from varlen.scheduling.device_plan import SampledToken


def answer_of(tokenizer, ids, prompt_ids=(), *, eos_ids=(), **options):
    """Return the text of an answer, and the bytes of each token."""
    writer = TextWriter(
        tokenizer,
        GenerationOptions(**{"max_tokens": max(len(ids), 1), **options}),
        prompt_ids=prompt_ids,
        eos_ids=eos_ids,
        token_bytes=TokenBytes(tokenizer),
    )
    text, found = "", []
    for token_id in ids:
        part = writer.write(SampledToken(token_id, TokenLogprobs(token_id, -1.0)))
        text += part.text
        found += [token.token_bytes for token in part.logprobs]
        if part.finish_reason:
            break
    return text, found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False], ids=["without_special", "with_special"])
@given(
    prompt=st.sampled_from(["", *TEXTS]),
    text=st.text(max_size=60)
    | st.text(alphabet=st.sampled_from("ab 你😀é\n🇩🇪\u200d\ufffd"), max_size=60),
)
@settings(max_examples=80)
def test_tokens_are_together_the_bytes_of_the_answer(kind, skip, prompt, text):
    tokenizer = KINDS[kind]()
    ids = [*tokenizer.encode(text).ids, *([tokenizer.token_to_id(PAD)] if skip else [])]

    answer, found = answer_of(
        tokenizer, ids, tokenizer.encode(prompt).ids, skip_special_tokens=skip
    )

    assert b"".join(found) == answer.encode()
    assert len(found) == len(ids)


@given(data=st.binary(max_size=80))
@settings(max_examples=200)
def test_bytes_that_are_no_character_stay_as_they_are(data):
    tokenizer = byte_level()
    tokens = TokenBytes(tokenizer)
    of_byte = {tokens.of(i, skip_special_tokens=True): i for i in range(tokenizer.get_vocab_size())}

    answer, found = answer_of(tokenizer, [of_byte[bytes([byte])] for byte in data])

    assert b"".join(found) == data
    assert answer == data.decode(errors="replace")


def test_each_byte_of_a_character_is_told_apart():
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]

    assert answer_of(tokenizer, ids) == ("€", [b"\xe2", b"\x82", b"\xac"])
    # an answer that ends before its character has a replacement for it
    assert answer_of(tokenizer, ids[:2]) == ("\ufffd\ufffd", [b"\xe2", b"\x82"])


def test_an_end_token_has_no_bytes_unless_the_answer_keeps_it():
    tokenizer = byte_level()
    end = tokenizer.token_to_id(END)
    ids = [tokenizer.token_to_id("a"), end]

    assert answer_of(tokenizer, ids, eos_ids=[end]) == ("a", [b"a", b""])
    kept = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert answer_of(tokenizer, ids, eos_ids=[end], **kept) == (f"a{END}", [b"a", END.encode()])


def test_tokens_that_a_stop_string_cuts_off_keep_their_bytes():
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(letter) for letter in "abcd"]

    assert answer_of(tokenizer, ids, stop=("bc",)) == ("a", [b"a", b"b", b"c"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_its_space_inside_of_a_text(kind):
    tokenizer = KINDS[kind]()
    tokens = TokenBytes(tokenizer)
    _, *ids = tokenizer.encode("the the", add_special_tokens=False).ids

    found = b"".join(tokens.of(each, skip_special_tokens=True) for each in ids)

    assert b" the".endswith(found) or found.endswith(b" the")
    assert b" " in found


@pytest.mark.parametrize("kind", KINDS)
def test_special_and_unknown_tokens(kind):
    tokenizer = KINDS[kind]()
    tokens = TokenBytes(tokenizer)
    pad = tokenizer.token_to_id(PAD)

    assert tokens.of(pad, skip_special_tokens=True) == b""
    assert PAD.encode() in tokens.of(pad, skip_special_tokens=False)
    # logits may be wider than the vocabulary
    assert tokens.of(tokenizer.get_vocab_size() + 5, skip_special_tokens=False) == b""


def test_a_tokenizer_without_a_decoder_has_its_tokens_as_they_are():
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))

    assert TokenBytes(tokenizer).of(1, skip_special_tokens=True) == b"two"
