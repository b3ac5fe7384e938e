"""The real MiniLM weights match sentence-transformers, whatever else is in the batch."""

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer

from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.errors import RequestError

TEXTS = [
    "A cat sits on the mat.",
    "a",
    "Was passiert mit Umlauten wie äöü und ß?",
    "日本語のテキストも来ます。",
    "emoji 🙂🙃 and\ttabs\nand new lines",
    "http://example.org/path?query=1&other=2#fragment",
    "[MASK] [SEP] [CLS] are only words here",
    "The quick brown fox jumps over the lazy dog. " * 5,
    "supercalifragilisticexpialidocious " * 12,
    "!!! ... ???",
]
LONG_TEXTS = ["word " * 400, "one two, three. " * 300, "unbelievabilities " * 260]
# 1 to 512, dense around the sizes of blocks and vector registers
LENGTHS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 200, 257, 400, 511, 512]


@pytest.fixture(scope="module")
def fp32(minilm):
    with Encoder.from_pretrained(minilm, dtype="fp32", max_sequence_tokens=512) as encoder:
        yield encoder


@pytest.fixture(scope="module")
def roundings(minilm):
    return encoder_roundings(minilm)


@pytest.fixture(scope="module")
def sentence_transformer(minilm):
    return SentenceTransformer(str(minilm), device="cpu", model_kwargs={"dtype": torch.float32})


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return [rng.integers(1000, 30000, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def exact(fp32, rows):
    return fp32.embed(rows)


def test_texts_match_sentence_transformers(fp32, sentence_transformer, roundings):
    expected = sentence_transformer.encode(TEXTS, batch_size=1, show_progress_bar=False)

    assert_close(fp32.embed(TEXTS), expected, roundings=roundings)


def test_truncated_texts_match_sentence_transformers(minilm, sentence_transformer, roundings):
    assert sentence_transformer.max_seq_length == 256
    texts = [*LONG_TEXTS, *TEXTS[:3]]
    expected = sentence_transformer.encode(texts, batch_size=1, show_progress_bar=False)

    with Encoder.from_pretrained(minilm, dtype="fp32") as encoder:
        actual = encoder.embed(texts, truncate=True)
        with pytest.raises(RequestError, match="more than 256 tokens"):
            encoder.embed(texts)

    assert_close(actual, expected, roundings=roundings)


def test_vectors_have_length_one_unless_asked_otherwise(fp32, roundings):
    normalized = fp32.embed(TEXTS)
    plain = fp32.embed(TEXTS, normalize=False)

    # the model sums 384 squares, and so does this
    assert_close(np.linalg.norm(normalized, axis=1), np.ones(len(TEXTS)), roundings=2 * 384)
    assert (np.linalg.norm(plain, axis=1) > 1.5).all()
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    assert_close(plain / lengths, normalized, roundings=roundings)


@torch.inference_mode()
def test_every_length_matches_transformers(minilm, rows, exact, roundings):
    model = transformers.BertModel.from_pretrained(minilm, dtype=torch.float32).eval()
    for row, mine in zip(rows, exact, strict=True):
        mean = model(input_ids=torch.tensor([row])).last_hidden_state[0].mean(dim=0)
        assert_close(mine, (mean / mean.norm()).numpy(), roundings=roundings)


def test_bf16_keeps_a_cosine_of_999_in_1000_for_every_length(minilm, rows, exact):
    with Encoder.from_pretrained(
        minilm, dtype="bf16", max_sequence_tokens=512, max_batch_tokens=1024
    ) as encoder:
        rough = encoder.embed(rows)

    cosines = (rough * exact).sum(axis=1)
    assert cosines.min() >= 0.999, dict(zip(LENGTHS, cosines.tolist(), strict=True))


def test_a_sequence_alone_gives_the_vector_that_it_gives_in_a_batch(fp32, rows, exact, roundings):
    for index in range(0, len(rows), 3):
        alone = fp32.embed([rows[index]])

        assert_close(alone[0], exact[index], roundings=roundings)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_a_batch_changes_nothing(fp32, rows, exact, seed, roundings):
    order = np.random.default_rng(seed).permutation(len(rows))

    actual = fp32.embed([rows[i] for i in order])

    assert_close(actual, exact[order], roundings=roundings)


@pytest.mark.parametrize("max_batch_tokens", [512, 1500])
def test_small_batches_give_what_large_ones_give(minilm, rows, exact, max_batch_tokens, roundings):
    with Encoder.from_pretrained(
        minilm, dtype="fp32", max_sequence_tokens=512, max_batch_tokens=max_batch_tokens
    ) as encoder:
        actual = encoder.embed(rows)

    assert_close(actual, exact, roundings=roundings)


def test_equal_sequences_of_one_batch_get_equal_vectors(fp32, rows, roundings):
    row = rows[9]

    vectors = fp32.embed([row, rows[3], row, rows[12], row])

    assert_close(vectors[[2, 4]], vectors[[0, 0]], roundings=roundings)
