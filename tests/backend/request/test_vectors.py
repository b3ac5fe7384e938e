"""Forms of embeddings match sentence-transformers, where it has them."""

import numpy as np
import pytest
from sentence_transformers.util import quantize_embeddings, truncate_embeddings

from varlen.request.vectors import VECTOR_DTYPES, VectorForm

VECTORS = np.random.default_rng(0).normal(0, 0.3, (5, 24)).astype(np.float32)
UNIT = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)


@pytest.mark.parametrize("size", [1, 7, 23, 24])
def test_fewer_dimensions_are_the_first_features(size):
    np.testing.assert_array_equal(VectorForm(size).of(VECTORS), truncate_embeddings(VECTORS, size))


@pytest.mark.parametrize("size", [1, 7, 23, 24])
def test_normalized_vectors_have_length_1_with_fewer_dimensions(size):
    shorter = VectorForm(size, normalize=True).of(UNIT)

    np.testing.assert_allclose(np.linalg.norm(shorter, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(
        shorter * np.linalg.norm(UNIT[:, :size], axis=1, keepdims=True), UNIT[:, :size], rtol=1e-5
    )


def test_a_vector_of_zeros_stays_one():
    zeros = np.zeros((1, 24), dtype=np.float32)

    for dtype in VECTOR_DTYPES[:3]:
        assert not VectorForm(8, normalize=True, dtype=dtype).of(zeros).any()


@pytest.mark.parametrize("dtype", ["binary", "ubinary"])
@pytest.mark.parametrize("size", [8, 24])
def test_bits_are_those_of_sentence_transformers(dtype, size):
    packed = VectorForm(size, dtype=dtype).of(VECTORS)

    expected = quantize_embeddings(VECTORS[:, :size], precision=dtype)
    np.testing.assert_array_equal(packed, expected)
    assert packed.dtype == expected.dtype
    assert packed.shape == (5, size // 8)


def test_float16_rounds():
    np.testing.assert_array_equal(
        VectorForm(dtype="float16").of(VECTORS), VECTORS.astype(np.float16)
    )


def test_int8_keeps_cosines_up_to_rounding():
    codes = VectorForm(dtype="int8").of(VECTORS)

    assert codes.dtype == np.int8
    assert (np.abs(codes.astype(int)).max(axis=1) == 127).all()
    floats = codes.astype(np.float64)
    floats /= np.linalg.norm(floats, axis=1, keepdims=True)
    # half a step of 1/127 of the largest feature, for each feature
    most = 0.5 / 127 * np.abs(UNIT).max() * 24**0.5 * 2
    assert np.abs(floats @ floats.T - UNIT @ UNIT.T).max() < most


def test_vectors_are_changed_in_no_form():
    before = UNIT.copy()

    for dtype in VECTOR_DTYPES:
        VectorForm(8, normalize=True, dtype=dtype).of(UNIT)

    np.testing.assert_array_equal(UNIT, before)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-6, 1.0, 1e18, 1e30, 1e38])
def test_vectors_of_any_size_equal_float64(size):
    vectors = (np.float64(VECTORS) * size).astype(np.float32)
    wide = vectors[:, :8].astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    # torch.nn.functional.normalize has this floor
    expected = wide / np.maximum(lengths, 1e-12)
    largest = np.abs(wide).max(axis=1, keepdims=True)

    unit = VectorForm(8, normalize=True).of(vectors)
    codes = VectorForm(8, dtype="int8").of(vectors)

    np.testing.assert_allclose(unit, expected, rtol=2**-23, atol=2**-149)
    np.testing.assert_array_equal(codes, np.rint(127 * wide / largest))
    np.testing.assert_array_equal(
        VectorForm(8, dtype="ubinary").of(vectors), np.packbits(wide > 0, axis=1)
    )


def test_int8_codes_are_rounded_once():
    # 127 * x / 1 in fp32 would be a half exactly, and round to an even number
    vector = np.array([[1.0, np.nextafter(np.float32(0.5 / 127), np.float32(1))]], np.float32)
    expected = np.rint(127 * vector.astype(np.float64))

    np.testing.assert_array_equal(VectorForm(dtype="int8").of(vector), expected)


def test_what_float16_cannot_hold_becomes_infinity():
    vector = np.array([[1e6, -1e6, 65504.0]], np.float32)

    halves = VectorForm(dtype="float16").of(vector)

    np.testing.assert_array_equal(halves, [[np.inf, -np.inf, 65504]])
