"""Limits follow the checkpoint, and what is less than its own is said."""

import logging

import pytest
import torch
from transformers import AutoModel

from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.config import EngineConfig
from varlen.errors import ConfigError
from varlen.execution import arenas
from varlen.execution.arenas import kv_size
from varlen.execution.model_info import limit_notes, queue_limit, text_limit
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.rank import AttentionHeads

from ..refusals import refused_request as refused

LONG = 9000


@pytest.fixture(scope="module")
def long_bert(make_checkpoint):
    """Return a checkpoint of more tokens than a batch of several sequences may have."""
    return make_checkpoint(max_position_embeddings=LONG, num_hidden_layers=1)


@pytest.mark.parametrize(
    ("longest", "num_bytes", "queued"),
    [(512, 65_536, 131_072), (8192, 262_144, 131_072), (1 << 18, 1 << 23, 1 << 18)],
)
def test_bytes_and_queue_follow_the_longest_sequence(longest, num_bytes, queued):
    assert text_limit(EngineConfig(), longest) == num_bytes
    assert queue_limit(EngineConfig(), longest) == queued
    own = EngineConfig(max_text_bytes=7, max_queued_tokens=9)
    assert (text_limit(own, longest), queue_limit(own, longest)) == (7, 9)


def test_a_text_is_cut_where_the_checkpoint_says_it(long_bert):
    with Encoder.from_pretrained(long_bert, dtype="fp32") as encoder:
        [found] = encoder.embed(["the cat " * LONG], truncate=True, normalize=False)
        ids = encoder._service.intake.texts(["the cat " * LONG], truncate=True)[0].token_ids

    assert len(ids) == LONG
    model = AutoModel.from_pretrained(long_bert)
    with torch.inference_mode():
        hidden = model(torch.tensor(ids[None].astype("int64"))).last_hidden_state[0]
    pooling = Checkpoint.open(long_bert).pooling
    assert pooling == ("mean",)
    expected = hidden.mean(dim=0).numpy()
    assert_close(found, expected, roundings=encoder_roundings(long_bert))


def test_short_and_long_sequences_of_one_call_are_all_answered(long_bert):
    rows = [[5, 6, 7], [5] * LONG, [6] * 4097, *[[7] * 100] * 50]
    with Encoder.from_pretrained(long_bert, dtype="fp32") as encoder:
        together = encoder.embed(rows)
        alone = [encoder.embed([row])[0] for row in rows[:4]]

    for vector, expected in zip(together, alone, strict=False):
        assert_close(vector, expected, roundings=encoder_roundings(long_bert))


def test_a_sequence_that_memory_does_not_hold_is_refused_and_not_cut(long_bert, caplog):
    caplog.set_level(logging.WARNING)
    with Encoder.from_pretrained(
        long_bert, dtype="fp32", threads=1, arena_bytes=4_000_000
    ) as encoder:
        held = encoder._service.model.info.max_arena_tokens
        assert 100 < held < LONG
        remedy = f"truncate_prompt_tokens={held} cuts a text there"
        with refused(f"row 0: {LONG} tokens; the memory of this model is enough for {held} tokens"):
            encoder.embed(["the cat " * LONG], truncate=True)
        with pytest.raises(Exception, match=remedy):
            encoder.embed(["the cat " * LONG], truncate=True)
        assert encoder.embed(["the cat " * LONG], truncate_prompt_tokens=held).shape == (1, 24)

    assert f"memory holds a sequence of {held} tokens (arena_bytes)" in caplog.text


@pytest.mark.parametrize(
    ("settings", "longest", "note"),
    [
        ({}, LONG, None),
        (
            {"max_sequence_tokens": 4096},
            4096,
            "the checkpoint takes 9000 tokens, this model 4096 (max_sequence_tokens)",
        ),
        (
            {"max_queued_tokens": 5000},
            5000,
            "the checkpoint takes 9000 tokens, this model 5000 (max_queued_tokens)",
        ),
        ({"max_text_bytes": 65_536}, LONG, "texts have up to 65536 bytes (max_text_bytes)"),
    ],
    ids=str,
)
def test_a_limit_that_is_less_than_the_checkpoints_is_said(long_bert, settings, longest, note):
    notes = limit_notes(Checkpoint.open(long_bert), EngineConfig(**settings), longest)

    assert len(notes) == (note is not None)
    assert all(each.startswith(note) for each in notes)


@pytest.mark.parametrize(
    ("device", "capability", "found"),
    [("cpu", (9, 0), "a CPU"), ("cuda", (8, 0), r"a GPU of compute capability 8\.0")],
)
def test_keys_and_values_of_fp8_are_refused_where_nothing_converts_them(
    device, capability, found, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    with pytest.raises(ConfigError, match=f"or later; the device is {found}; allowed here: auto"):
        size_of("fp8", device, monkeypatch)


def test_keys_and_values_of_fp8_are_refused_beside_fp32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    with pytest.raises(ConfigError, match="dtype is fp32; allowed with it: bf16, fp16"):
        size_of("fp8", "cuda", monkeypatch, torch.float32)


def test_as_much_memory_holds_twice_as_many_blocks_of_fp8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    auto, fp8 = (size_of(each, "cuda", monkeypatch) for each in ("auto", "fp8"))

    assert (auto.dtype, fp8.dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    assert fp8.block_bytes * 2 == auto.block_bytes
    assert fp8.num_blocks == 2 * auto.num_blocks


def size_of(kv_cache_dtype, device, monkeypatch, dtype=torch.bfloat16):
    """Return the size of caches with 1 MB."""
    monkeypatch.setattr(arenas, "memory_of", lambda *_: 1 << 30)
    config = EngineConfig(kv_cache_dtype=kv_cache_dtype, kv_bytes=1 << 20)
    heads = AttentionHeads(queries=4, keys=2, dim=64)
    return kv_size(
        config,
        torch.device(device),
        dtype,
        heads,
        num_layers=2,
        lengths=[8192],
        has_beams=False,
    )
