"""Input checks: each error names the row, the value and the allowed values."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import processors

from tests.backend.fakes.input_limits import input_limits
from tests.backend.refusals import refused_checkpoint
from tests.backend.refusals import refused_request as refused
from tests.checkpoints import set_fields
from varlen.errors import RequestError
from varlen.intake.checks import Intake
from varlen.intake.tokenization import Tokenizer

LIMITS = input_limits(max_text_bytes=40)


@pytest.fixture(scope="module")
def tokenizer(small_bert):
    return Tokenizer(small_bert, LIMITS.max_sequence_tokens)


@pytest.fixture(scope="module")
def intake(tokenizer):
    return Intake(tokenizer, LIMITS)


def ids(*row):
    return np.array(row, dtype=np.int64)


def test_a_text_becomes_its_tokens(intake):
    [sequence] = intake.texts(["the cat"], truncate=False)

    assert sequence.token_ids.tolist() == [2, 5, 6, 3]
    assert sequence.token_ids.dtype == np.int32
    assert sequence.type_ids is None


def test_a_pair_gets_token_types(intake):
    [sequence] = intake.texts([("the cat", "river")], truncate=False)

    assert sequence.token_ids.tolist() == [2, 5, 6, 3, 7, 3]
    assert sequence.type_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert sequence.type_ids.dtype == np.int32


def test_rows_of_texts_keep_their_order(intake):
    sequences = intake.texts(["cat", "the", "the river"], truncate=False)

    assert [s.token_ids.tolist() for s in sequences] == [[2, 6, 3], [2, 5, 3], [2, 5, 7, 3]]


class PlainPairs:
    ending = np.array([7], dtype=np.int32)
    takes_instruction = False

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def tokens(self, query, document, instruction, max_tokens):
        text = f"{query} {document} river"
        [found] = self._tokenizer.encode([text], truncate=False, special_tokens=False)
        return found


def test_a_long_document_is_cut_before_the_end_of_a_pair_template(tokenizer):
    intake = Intake(tokenizer, LIMITS, pair_template=PlainPairs(tokenizer))

    # as few tokens as this text's could change, if they were its last ones
    [sequence] = intake.texts([("the", "cat " * 1000)], truncate=True)

    assert sequence.token_ids.tolist() == [5] + [6] * 10 + [7]


def test_texts_and_pairs_may_come_together(intake):
    sequences = intake.texts(["cat", ("the", "cat")], truncate=False)

    assert [s.type_ids is None for s in sequences] == [True, False]


@pytest.mark.parametrize("text", ["", " ", "\n", "\u3000", "\u00a0", "\0", "\u200b"], ids=repr)
def test_a_blank_text_is_its_special_tokens(intake, text):
    alone, pair, other = intake.texts([text, (text, "cat"), ("cat", text)], truncate=False)

    assert alone.token_ids.tolist() == [2, 3]
    assert pair.token_ids.tolist() == [2, 3, 6, 3]
    assert other.token_ids.tolist() == [2, 6, 3, 3]


def test_the_tokenizer_decides_what_a_nul_is(intake):
    assert intake.texts(["c\0at"], truncate=False)[0].token_ids.tolist() == [2, 6, 3]


def test_a_text_without_any_token_is_refused_by_its_row(small_bert, tmp_path):
    bare = HuggingFaceTokenizer.from_file(str(small_bert / "tokenizer.json"))
    bare.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    bare.save(str(tmp_path / "tokenizer.json"))

    with refused("row 1: text has no tokens, and the tokenizer adds none"):
        Intake(Tokenizer(tmp_path, 12), LIMITS).texts(["cat", " "], truncate=False)


def test_refuses_half_a_surrogate_pair(intake):
    with refused("row 0: text holds half a surrogate pair; send valid Unicode"):
        intake.texts(["a\ud800"], truncate=False)


@pytest.mark.parametrize("text, kind", [(b"cat", "bytes"), (5, "int"), (None, "NoneType")])
def test_refuses_what_is_not_a_string(intake, text, kind):
    with refused(f"row 1: text is a {kind}; send a string"):
        intake.texts(["cat", text], truncate=False)


@pytest.mark.parametrize("pair", [("a",), ("a", "b", "c"), ()], ids=str)
def test_refuses_tuples_that_are_no_pairs(intake, pair):
    with refused("row 0"):
        intake.texts([pair], truncate=False)


def test_counts_a_text_s_bytes_before_tokenizing_it(intake):
    with refused("row 0: text has 42 bytes; this model takes at most 40 (truncate=true cuts it)"):
        intake.texts(["é" * 21], truncate=False)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_text_of_any_length_is_cut(tokenizer, side):
    intake = Intake(tokenizer, input_limits(max_text_bytes=4000))
    text = ("the cat " * 500_000).encode()

    part = intake.limits.decoded(0, "text", text, side)

    assert 4000 < len(part) <= 4004
    [found] = intake.texts([part], truncate=True, side=side)
    assert found.token_ids.tolist() == [2, *[5, 6] * 5, 3]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_part_begins_and_ends_with_whole_characters(side):
    for size in range(40, 48):
        part = input_limits(max_text_bytes=size).decoded(0, "text", "a中é😀".encode() * 9, side)
        assert size < len(part.encode()) <= size + 4
        assert part in "a中é😀" * 9


@pytest.mark.parametrize("side, position", [("right", 3), ("left", 96), (None, 3)])
def test_names_the_byte_that_is_no_utf_8(side, position):
    data = bytearray(b"a" * 100)
    data[position] = 0xFF

    with refused(f"row 5: text is not UTF-8 at byte {position}; send UTF-8"):
        input_limits(max_text_bytes=40 if side else 100).decoded(5, "text", bytes(data), side)


def test_a_part_without_enough_tokens_is_refused_by_its_row(tokenizer):
    intake = Intake(tokenizer, input_limits(max_text_bytes=4000))

    with refused("row 1: 4000 bytes of text are read (max_text_bytes), which have too few tokens"):
        intake.texts(["cat", " " * 4001], truncate=True)


def test_refuses_a_long_text_unless_it_may_be_cut(intake):
    assert len(intake.texts(["a " * 10], truncate=False)[0].token_ids) == 12
    with refused("row 0: text has 13 tokens; this model takes at most 12 (truncate=true cuts it)"):
        intake.texts(["a " * 11], truncate=False)


def test_names_no_truncation_that_a_request_cannot_ask_for(tokenizer):
    intake = Intake(tokenizer, replace(LIMITS, can_truncate=False))

    with pytest.raises(RequestError) as refusal:
        intake.texts(["a " * 11], truncate=False)

    assert str(refusal.value) == "row 0: text has 13 tokens; this model takes at most 12"


def test_a_cut_text_keeps_its_last_special_token(intake):
    [sequence] = intake.texts(["the cat " * 5], truncate=True)

    assert sequence.token_ids.tolist() == [2, *[5, 6] * 5, 3]
    [longer] = intake.texts(["a " * 20], truncate=True)
    assert longer.token_ids.tolist() == [2, *[8] * 10, 3]


def test_a_cut_pair_loses_its_longer_text_first(intake):
    [sequence] = intake.texts([("a " * 19, "the cat")], truncate=True)

    assert sequence.token_ids.tolist() == [2, *[8] * 7, 3, 5, 6, 3]


@pytest.mark.parametrize("length", [2, 3, 7, 12])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_request_may_cut_to_a_length_of_its_own(tokenizer, length, side):
    intake = Intake(tokenizer, input_limits())
    [found] = intake.texts(["the cat river " * 9], truncate=True, side=side, max_tokens=length)

    expected = HuggingFaceTokenizer.from_str(tokenizer.huggingface.to_str())
    expected.enable_truncation(length, direction=side)
    assert found.token_ids.tolist() == expected.encode("the cat river " * 9).ids
    assert len(found.token_ids) == length


@pytest.mark.parametrize(
    "text, length, allowed",
    [("cat", 1, "2 to 12"), ("cat", 13, "2 to 12"), (("cat", "cat"), 2, "3 to 12")],
    ids=str,
)
def test_a_length_has_room_for_special_tokens_and_is_none_beyond_the_model(
    intake, text, length, allowed
):
    message = f"truncate_prompt_tokens is {length}; allowed: whole numbers from {allowed}"
    for read in (intake.texts, intake.text_steps):
        with refused(message):
            read([text], truncate=True, max_tokens=length)


def test_texts_are_cut_on_the_side_of_the_checkpoint(small_bert):
    intake = Intake(Tokenizer(small_bert, 12, side="left"), input_limits())

    def last(**side):
        return intake.texts(["the " * 12 + "cat"], truncate=True, **side)[0].token_ids.tolist()

    assert last() == last(side="left") == [2, *[5] * 9, 6, 3]
    assert last(side="right") == [2, *[5] * 10, 3]


def test_a_short_text_is_not_changed_by_truncate(intake):
    whole, cut = (intake.texts(["the cat"], truncate=t)[0] for t in (False, True))

    assert whole.token_ids.tolist() == cut.token_ids.tolist()


def test_padding_and_truncation_in_tokenizer_json_are_dropped(small_bert, tmp_path):
    changed = HuggingFaceTokenizer.from_file(str(small_bert / "tokenizer.json"))
    changed.enable_padding(length=128)
    changed.enable_truncation(4)
    changed.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path, 12)

    [sequence] = tokenizer.encode(["the cat river the"], truncate=False)

    assert sequence.token_ids.tolist() == [2, 5, 6, 7, 5, 3]


def test_refuses_a_damaged_tokenizer(small_bert, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")

    with refused_checkpoint("tokenizer.json cannot be read: "):
        Tokenizer(tmp_path, 12)
    shutil.copy(small_bert / "tokenizer.json", tmp_path)
    [sequence] = Tokenizer(tmp_path, 12).encode(["the cat"], truncate=False)
    assert sequence.token_ids.tolist() == [2, 5, 6, 3]


def test_refuses_a_text_without_tokens(small_bert, tmp_path):
    # the tokenizer adds no special tokens, and its normalizer removes the character
    shutil.copy(small_bert / "tokenizer.json", tmp_path)
    set_fields(tmp_path, "tokenizer.json", post_processor=None)
    intake = Intake(Tokenizer(tmp_path, 12), LIMITS)

    assert intake.texts(["cat"], truncate=False)[0].token_ids.tolist() == [6]
    with refused("row 1: text has no tokens"):
        intake.texts(["cat", "\u200b"], truncate=False)


def test_refuses_a_text_whose_token_the_model_does_not_know(small_bert):
    few = replace(LIMITS, vocab_size=7, type_vocab_size=1)
    intake = Intake(Tokenizer(small_bert, 12), few)

    with refused("row 1"):
        intake.texts(["cat", "river"], truncate=False)
    with refused("row 0"):
        intake.texts([("cat", "the")], truncate=False)


def test_refuses_a_sequence_that_does_not_fit_the_arena(tokenizer):
    intake = Intake(tokenizer, replace(LIMITS, max_arena_tokens=3))

    assert intake.token_ids([ids(2, 5, 3)])
    assert intake.texts(["the"], truncate=False)
    with refused("row 1: 4 tokens; the memory of this model is enough for 3 tokens (arena_bytes)"):
        intake.token_ids([ids(2), ids(2, 5, 6, 3)])
    # truncating a text to fit memory would change its meaning
    for truncate in (False, True):
        with refused("row 0: 4 tokens; the memory of this model is enough for 3"):
            intake.texts(["the cat"], truncate=truncate)


def test_token_ids_become_sequences(intake):
    plain, typed = (
        intake.token_ids([ids(2, 5, 3)])[0],
        intake.token_ids([ids(2, 5, 3)], [ids(0, 1, 1)])[0],
    )

    assert (plain.token_ids.tolist(), plain.type_ids) == ([2, 5, 3], None)
    assert (typed.token_ids.tolist(), typed.type_ids.tolist()) == ([2, 5, 3], [0, 1, 1])
    assert plain.token_ids.dtype == typed.type_ids.dtype == np.int32


def test_a_sequence_keeps_no_memory_of_the_caller(intake):
    row = ids(2, 5, 3)
    [sequence] = intake.token_ids([row], [row * 0])
    row[:] = 9

    assert sequence.token_ids.tolist() == [2, 5, 3]


def test_refuses_too_many_tokens(intake):
    assert intake.token_ids([ids(*[5] * 12)])
    with refused("row 1: input_ids has 13 tokens; this model takes at most 12"):
        intake.token_ids([ids(2), ids(*[5] * 13)])


def test_refuses_rows_that_are_not_one_sequence(intake):
    with refused("row 0"):
        intake.token_ids([np.array([[2, 5], [5, 3]], dtype=np.int64)])
    with refused("row 0"):
        intake.token_ids([np.array(5, dtype=np.int64)])


def test_the_read_end_of_a_text_is_utf_8_too():
    with pytest.raises(RequestError, match="row 0: text is not UTF-8 at byte 60; send UTF-8"):
        LIMITS.decoded(0, "text", b"\x80" * 100, "left")
