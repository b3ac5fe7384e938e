"""Tokenizing one end of a long text gives the result of the whole text.

This holds for every kind of tokenizer that has safe boundaries.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.backend.fakes.input_limits import input_limits
from varlen.intake.boundaries import safe_boundary, safe_start
from varlen.intake.tokenization import Tokenizer as OurTokenizer

# A text of more than 36 characters is long.
MAX_TOKENS = 6
SIDES = ("right", "left")
EXAMPLES = 20
# Pairs need fewer: their texts are cut like single ones.
PAIRS = 8
WORDS = "the cat's river runs to 42 seas, and he said: don't stop at 3.14! the thermal catfish ran".split()
CORPUS = [" ".join(WORDS[start:]) for start in range(len(WORDS))] * 3
LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PIECES = (
    *WORDS,
    *(" ", " ", " ", " ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u2003", "\u3000", "\u200b"),
    *("!", "!!", "...", "-", "_", "'", "``", "''", "“", "”", "(", "]", "。", "\u00b4", "^"),
    *(
        "中",
        "文字",
        "日本",
        "カタ",
        "한",
        "\u1112\u1161\u11ab",
        "ก\u0e33",
        "\u0d4e",
        "\u0600",
        "ال",
        "ש",
    ),
    *("e\u0301", "é", "\u0301", "İ", "ß", "ﬁ", "Ⅷ", "²", "ΑΣ", "\u2581", "\ufffd", "\u00ad"),
    *("👍🏽", "👩\u200d👩\u200d👧", "\U000110bd", "<mask>", "[MASK]", "<k>", "one k", "k"),
)
ODD_TEXTS = st.lists(st.sampled_from(PIECES), min_size=5, max_size=80).map("".join)
TEXTS = st.one_of(
    ODD_TEXTS,
    st.text(min_size=20, max_size=200),
    st.tuples(st.sampled_from(PIECES), st.integers(1, 150)).map(lambda pair: pair[0] * pair[1]),
)


def byte_pairs(splitter, normalizer=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_pieces(**normalizer):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=30))
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(["".join(PIECES), *CORPUS], trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def unigrams(normalizer, splitter):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    trainer = trainers.UnigramTrainer(
        vocab_size=150, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer


def words(splitter):
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    tokenizer.pre_tokenizer = splitter
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def with_added_tokens(tokenizer):
    tokenizer.add_tokens(
        [
            AddedToken("<mask>", lstrip=True, rstrip=True),
            AddedToken("k", single_word=True),
            AddedToken("  ", normalized=False),
        ]
    )
    return tokenizer


def words_without_spaces():
    tokenizer = words(pre_tokenizers.Whitespace())
    tokenizer.normalizer = normalizers.Replace(" ", "")
    return tokenizer


def with_phrase(tokenizer):
    tokenizer.add_tokens([AddedToken("one k")])
    return tokenizer


def spaced(*parts):
    return normalizers.Sequence([normalizers.Replace(*part) for part in parts])


SAFE = {
    "BERT": word_pieces,
    "BERT cased": lambda: word_pieces(lowercase=False, handle_chinese_chars=False),
    "BERT with added tokens": lambda: with_added_tokens(word_pieces()),
    "GPT-2": lambda: byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "RoBERTa": lambda: with_added_tokens(byte_pairs(pre_tokenizers.ByteLevel())),
    "Llama 3": lambda: byte_pairs(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        normalizers.NFC(),
    ),
    "XLM-RoBERTa": lambda: with_added_tokens(
        unigrams(
            normalizers.Sequence(
                [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
            ),
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        )
    ),
    "T5": lambda: unigrams(
        normalizers.Sequence([normalizers.Strip(), spaced(("``", '"'), ("''", '"'))]),
        pre_tokenizers.Metaspace(),
    ),
    "Metaspace after a replaced space": lambda: unigrams(
        normalizers.Sequence([normalizers.Prepend("\u2581"), spaced((" ", "\u2581"))]),
        pre_tokenizers.Metaspace(prepend_scheme="first"),
    ),
    "words": lambda: words(pre_tokenizers.Whitespace()),
    "digits and words": lambda: words(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(),
                pre_tokenizers.Punctuation(),
                pre_tokenizers.WhitespaceSplit(),
            ]
        )
    ),
}
UNSAFE = {
    "Llama 2": lambda: byte_pairs(
        None, normalizers.Sequence([normalizers.Prepend("\u2581"), spaced((" ", "\u2581"))])
    ),
    "Metaspace without splitting": lambda: unigrams(None, pre_tokenizers.Metaspace(split=False)),
    "dropout": lambda: byte_pairs(pre_tokenizers.ByteLevel(), dropout=0.5),
    "spaces removed": words_without_spaces,
    "a phrase as a token": lambda: with_phrase(word_pieces()),
    "a splitter with an unknown pattern": lambda: byte_pairs(
        pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated")
    ),
    "bytes, not split": lambda: byte_pairs(pre_tokenizers.ByteLevel(use_regex=False)),
}


# Tokenizers that change the beginning of a text.
NO_STARTS = ("T5", "Metaspace after a replaced space")


@pytest.fixture(scope="module", params=(*SAFE, "MiniLM"), ids=str)
def pair_of_tokenizers(request, tmp_path_factory, minilm):
    """Return a tokenizer of ours and the library's, which truncates on each side."""
    if request.param == "MiniLM":
        return load(minilm)
    return save(SAFE[request.param](), tmp_path_factory.mktemp("tokenizer"))


def save(tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))
    return load(folder)


def load(folder):
    return OurTokenizer(folder, MAX_TOKENS), {side: cutting(folder, side) for side in SIDES}


def cutting(folder, side):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS, direction=side)
    return tokenizer


def check(tokenizers, text):
    """Check the tokens of a text or a pair, cut and not cut."""
    ours, library = tokenizers
    pair = text if isinstance(text, tuple) else (text,)
    [found] = ours.encode([text], truncate=False)

    whole = ours.huggingface.encode(*pair)
    assert (len(found.token_ids) > MAX_TOKENS) == (len(whole.ids) > MAX_TOKENS)
    if found.is_complete:
        assert found.token_ids.tolist() == whole.ids
    for side in SIDES:
        [cut] = ours.encode([text], truncate=True, side=side)
        expected = library[side].encode(*pair)
        assert cut.token_ids.tolist() == expected.ids
        if isinstance(text, tuple):
            assert cut.type_ids.tolist() == expected.type_ids


def check_tokens(tokenizers, text):
    """Check what a client gets of the tokens of a text that is cut."""
    ours, library = tokenizers
    for side in SIDES:
        [found] = ours.tokens_of([text], truncate=True, side=side)
        expected = library[side].encode(text)
        assert found.token_ids == expected.ids
        assert found.tokens == expected.tokens
        assert found.is_special == [flag == 1 for flag in expected.special_tokens_mask]
        assert found.offsets == expected.offsets


@settings(max_examples=EXAMPLES)
@given(text=TEXTS)
@example(text="!" * 200)
@example(text="中" * 200)
@example(text=" " * 200)
@example(text="the cat " * 40)
@example(text="the\ncat\r\n" * 40)
@example(text="the\tcat  \n\n river " * 40)
@example(text="   the cat " * 40)
@example(text="the cat <mask> <mask>k " * 40)
@example(text="the cat" + " " * 200 + "river")
def test_a_long_text_is_cut_or_refused_like_the_whole_text(pair_of_tokenizers, text):
    check(pair_of_tokenizers, text)
    check_tokens(pair_of_tokenizers, text)


@settings(max_examples=PAIRS)
@given(first=TEXTS, second=TEXTS)
@example(first="the cat", second="the river runs " * 20)
@example(first="the river runs " * 20, second="the cat")
@example(first="the river runs " * 20, second="the cat " * 40)
def test_a_long_pair_is_cut_or_refused_like_the_whole_pair(pair_of_tokenizers, first, second):
    check(pair_of_tokenizers, (first, second))


# Bytes that are read of a text; its tokens may be fewer than are kept, and more than are spare.
READ_BYTES = 1200
LENGTHS = (3, MAX_TOKENS, 30)
PARTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join)


@pytest.mark.full
@settings(max_examples=EXAMPLES)
@given(first=PARTS, second=PARTS, repeats=st.tuples(st.integers(1, 200), st.integers(1, 200)))
@example(first="the cat ", second="x", repeats=(500, 1))
@example(first=" ", second="the cat ", repeats=(1500, 300))
@example(first="中文字", second="x", repeats=(600, 1))
@example(first="!", second="the cat ", repeats=(1, 600))
@example(first="a", second="b", repeats=(5000, 5000))
def test_a_part_gives_the_tokens_of_the_whole_text_or_none(
    pair_of_tokenizers, first, second, repeats
):
    ours, library = pair_of_tokenizers
    text = first * repeats[0] + second * repeats[1]
    for side in SIDES:
        part = input_limits(max_text_bytes=READ_BYTES).decoded(0, "text", text.encode(), side)
        assert len(part.encode()) <= READ_BYTES + 4
        for length in LENGTHS:
            library[side].enable_truncation(length, direction=side)
            for read, whole in (
                ([part], [text]),
                ([part, "the cat"], [text, "the cat"]),
                (["the cat", part], ["the cat", text]),
            ):
                [found] = ours.encode(
                    [read[0] if len(read) == 1 else tuple(read)],
                    truncate=True,
                    side=side,
                    max_tokens=length,
                    max_text_bytes=READ_BYTES,
                )
                if found.is_complete:
                    assert found.token_ids.tolist() == library[side].encode(*whole).ids
                else:
                    assert len(text.encode()) > READ_BYTES
        library[side].enable_truncation(MAX_TOKENS, direction=side)


def test_a_run_that_is_counted_from_its_beginning_has_no_part_without_it(tmp_path):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "aa": 1}, merges=[("a", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ours, library = save(tokenizer, tmp_path)
    text = "a" * 4001
    part = input_limits(max_text_bytes=2400).decoded(0, "text", text.encode(), "left")

    [left] = ours.encode([part], truncate=True, side="left", max_text_bytes=2400)
    [right] = ours.encode([part], truncate=True, side="right", max_text_bytes=2400)

    assert library["left"].encode(text).ids[-1] == 0
    assert not left.is_complete
    assert right.token_ids.tolist() == library["right"].encode(text).ids


def test_a_word_that_is_too_long_has_no_part_with_tokens(tmp_path):
    tokenizer = word_pieces()
    tokenizer.model.max_input_chars_per_word = 1000
    ours, library = save(tokenizer, tmp_path)
    text = "cat" * 400
    part = input_limits(max_text_bytes=900).decoded(0, "text", text.encode(), "right")

    [found] = ours.encode([part], truncate=True, side="right", max_text_bytes=900)

    assert not found.is_complete
    assert len(library["right"].encode(text).ids) == 3


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("word", ["the cat ", "!", "catfish, "])
def test_usual_texts_need_no_more_than_a_part(pair_of_tokenizers, word, side):
    ours, library = pair_of_tokenizers
    text = word * 3000
    part = input_limits(max_text_bytes=8000).decoded(0, "text", text.encode(), side)

    form = {"truncate": True, "side": side, "max_text_bytes": 8000}
    [found, pair] = ours.encode([part, (part, part)], **form)

    assert found.is_complete
    assert pair.is_complete
    assert found.token_ids.tolist() == library[side].encode(text).ids


def test_a_text_that_is_much_too_long_is_not_tokenized_as_a_whole(pair_of_tokenizers):
    ours, _ = pair_of_tokenizers

    alone, first, second = ours.encode(
        ["the cat " * 500, ("the cat " * 500, "cat"), ("cat", "the cat " * 500)], truncate=False
    )

    for found in (alone, first, second):
        assert not found.is_complete
        assert MAX_TOKENS < len(found.token_ids) < 200


@pytest.mark.parametrize("side", SIDES)
def test_a_text_that_is_cut_is_tokenized_on_the_kept_side_only(pair_of_tokenizers, request, side):
    ours, _ = pair_of_tokenizers
    kind = request.node.callspec.params["pair_of_tokenizers"]
    text = "the cat " * 500 + "river"

    part = first_part(ours, text, side)

    is_whole = side == "left" and kind in NO_STARTS
    assert part == text if is_whole else len(part) < 100


def first_part(tokenizer, text, side):
    """Return the part of a text that is tokenized first."""
    return text[next(tokenizer._parts(text, MAX_TOKENS, side), slice(0, len(text)))]


@pytest.mark.parametrize("text", ["!" * 5000, "中" * 1700, "the\ncat\n" * 600, "a\tb\r\n" * 1000])
@pytest.mark.parametrize("side", SIDES)
def test_bert_needs_no_spaces_to_stop_early(tmp_path, text, side):
    ours, _ = save(word_pieces(), tmp_path)

    [found] = ours.encode([text], truncate=False)

    assert not found.is_complete
    assert len(first_part(ours, text, side)) < 100


@pytest.mark.parametrize("kind", UNSAFE)
def test_a_tokenizer_without_safe_boundaries_sees_whole_texts(kind):
    assert safe_boundary(UNSAFE[kind]()) is None
    assert safe_start(UNSAFE[kind]()) is None


@pytest.mark.parametrize(
    "token",
    [AddedToken("the", rstrip=True), AddedToken(" cat", single_word=True)],
    ids=["takes spaces", "reads what is before it"],
)
def test_a_token_that_crosses_a_boundary_leaves_no_starts(token):
    tokenizer = word_pieces()
    tokenizer.add_tokens([token])

    assert safe_boundary(tokenizer) is not None
    assert safe_start(tokenizer) is None
