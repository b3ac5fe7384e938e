"""The windows of contexts match the library tokenizers, with its words and offsets."""

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from varlen.intake.found import ContextWindows
from varlen.intake.long_texts import InputLimits
from varlen.intake.tokenization import Tokenizer as Intake
from varlen.request.spans import QuestionForm

WORDS = ["the", "cat", "é", "...", "  ", "🐈the", "can't"]
LIMITS = InputLimits(
    max_sequence_tokens=48, max_text_bytes=10_000, vocab_size=10_000, type_vocab_size=2
)


def byte_pairs():
    """Return a byte-level tokenizer with the special tokens of RoBERTa."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {each: number for number, each in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 1), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    return tokenizer


def unigrams():
    """Return a tokenizer of pieces with the special tokens of BERT."""
    letters = [(each, -3.0) for each in "▁abcdefghijklmnopqrstuvwxyz.,?!é"]
    pieces = [("<unk>", 0.0), *letters, ("▁the", -1.0), ("▁c", -1.5)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]",
        "[CLS] $A [SEP] $B:1 [SEP]:1",
        [(each, tokenizer.token_to_id(each)) for each in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def some(random_, words, most):
    return " ".join(random_.choice(words) for _ in range(random_.randint(1, most)))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", [byte_pairs, unigrams])
def test_windows_words_and_offsets_are_those_of_the_library(tmp_path, make, side):
    library = make()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer, random_, compared = Intake(tmp_path, 48, side=side), random.Random(0), 0
    for _ in range(100):
        question, context = some(random_, ["the", "who", "?"], 3), some(random_, WORDS, 40)
        longest, stride = random_.randint(34, 48), random_.randint(0, 6)
        library.enable_truncation(longest, stride=stride, strategy="only_second", direction=side)
        first = library.encode(question, context)
        form = QuestionForm(max_seq_len=longest, doc_stride=stride)

        windows = ContextWindows(tokenizer, LIMITS, [(question, context)], form)

        prompts = [prompt for step in windows.steps for prompt in step.run()]
        for prompt, window, expected in zip(
            prompts, windows.windows[0], [first, *first.overflowing], strict=True
        ):
            assert prompt.token_ids.tolist() == expected.ids
            assert prompt.type_ids.tolist() == expected.type_ids
            places = [place for place, each in enumerate(expected.sequence_ids) if each == 1]
            bounds = [expected.word_to_chars(expected.token_to_word(each), 1) for each in places]
            assert list(zip(window.starts, window.ends, strict=True)) == bounds
            assert not places or window.first == places[0]
            assert window.others.tolist() == [0]
            compared += len(places)
    assert compared > 1000
