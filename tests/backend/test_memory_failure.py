"""Running out of memory in a batch: it runs in parts, and requests are answered."""

import logging

import numpy as np
import pytest
import torch

from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.errors import EngineError
from varlen.memory.arena import Arena

# More than the address space of any machine.
TOO_MANY_BYTES = 1 << 60


def torch_refuses():
    torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)


def numpy_refuses():
    np.empty(TOO_MANY_BYTES, dtype=np.uint8)


def onednn_refuses():
    # oneDNN's error without address space, which a test cannot provoke reliably
    raise RuntimeError("could not create a primitive")


@pytest.fixture
def limit_memory(monkeypatch):
    """Return a function that makes batches fail above a number of tokens."""
    allocate = Arena.allocate

    def make(refuse, max_tokens):
        def limited(arena, dims):
            if dims["tokens"] > max_tokens:
                refuse()
            return allocate(arena, dims)

        monkeypatch.setattr(Arena, "allocate", limited)

    return make


@pytest.fixture
def roundings(small_bert):
    return encoder_roundings(small_bert)


@pytest.fixture
def encoder(small_bert):
    with Encoder.from_pretrained(small_bert, device="cpu", dtype="fp32", threads=1) as encoder:
        yield encoder


def random_rows(count):
    rng = np.random.default_rng(0)
    return [rng.integers(5, 50, length) for length in rng.integers(1, 60, count)]


@pytest.mark.parametrize("refuse", [torch_refuses, numpy_refuses, onednn_refuses])
def test_a_batch_that_runs_out_of_memory_is_answered_in_parts(
    encoder, roundings, limit_memory, caplog, refuse
):
    rows = random_rows(100)
    expected = encoder.embed(rows)
    limit_memory(refuse, 500)

    with caplog.at_level(logging.WARNING):
        answers = encoder.embed(rows)

    assert "too little memory for a batch of " in caplog.text
    assert_close(answers, expected, roundings=roundings)


def test_a_sequence_that_runs_out_of_memory_alone_fails_and_no_other_does(
    encoder, roundings, limit_memory
):
    rows = random_rows(50)
    expected = encoder.embed(rows)
    limit_memory(torch_refuses, 60)

    with pytest.raises(EngineError, match="too little memory to run this request"):
        encoder.embed([[5] * 61])

    assert_close(encoder.embed(rows), expected, roundings=roundings)
