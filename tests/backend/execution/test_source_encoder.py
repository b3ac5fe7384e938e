"""Sources of a step are encoded into their own blocks."""

from array import array

import numpy as np
import pytest
import torch

from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from varlen.config import EngineConfig
from varlen.errors import ConfigError
from varlen.execution.arenas import KvSize, step_arenas
from varlen.execution.cpu.runner import CpuRunner
from varlen.execution.packing import source_arrays, source_dims
from varlen.execution.programs import record_steps
from varlen.memory.arena import Arena, alignment_of
from varlen.memory.planner import Layout
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder
from varlen.scheduling.batch import Chunk
from varlen_kernels import reference

from .test_step_packing import sequence_of_source

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS = 4, 40
LARGEST = {"tokens": 64, "sequences": 8, "logit_rows": 8}
LENGTHS = [9, 1, 16, 5]


@pytest.fixture(scope="module", params=["MarianMTModel", "T5ForConditionalGeneration"])
def folder(request, tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture(scope="module")
def programs(folder):
    model = load_decoder(Checkpoint.open(folder), torch.float32, CPU)
    return record_steps(model, KvSize(BLOCKS, BLOCK_SIZE, 0, torch.float32))


def encoded(programs, *steps):
    """Return the caches after some steps; slots that are not written hold NaN."""
    encoder = programs[1]
    caches = {state.name: torch.full(state.shape, torch.nan) for state in encoder.states}
    arena = Arena(Layout(encoder.buffers, 64), LARGEST, CPU)
    runner = CpuRunner(encoder, reference, arena, caches, of_steps=True)
    with torch.inference_mode():
        for chunks in steps:
            arrays = source_arrays(chunks, BLOCK_SIZE)
            if arrays:
                runner.run(arrays, source_dims(arrays), [])
    return caches


def chunk_of(length, blocks, *, encodes=True):
    """Return the first chunk of a translation whose source has these blocks."""
    source = np.random.default_rng(length).integers(6, 250, length).tolist()
    text = tuple(source) if encodes else ()
    return Chunk(sequence_of_source(length), 0, (2,), array("i", [0]), (), tuple(blocks), text)


@pytest.fixture
def chunks():
    """Return chunks with sources of all lengths, whose blocks are in no order."""
    free = np.random.default_rng(0).permutation(BLOCKS).tolist()
    return [chunk_of(length, [free.pop() for _ in range(-(-length // 4))]) for length in LENGTHS]


def test_sources_of_one_step_have_the_keys_and_values_that_they_have_alone(
    folder, programs, chunks
):
    together = encoded(programs, chunks)

    alone = encoded(programs, *([chunk] for chunk in chunks))
    for name, cache in together.items():
        assert_close(cache, alone[name], roundings=encoder_roundings(folder))


def test_only_slots_of_tokens_are_written(programs, chunks):
    slots = {
        (chunk.source_block_ids[place // BLOCK_SIZE], place % BLOCK_SIZE)
        for chunk in chunks
        for place in range(len(chunk.encodes))
    }

    for cache in encoded(programs, chunks).values():
        # [blocks, heads, block_size, dim]
        is_written = ~cache.isnan().any(1).any(-1)
        assert set(map(tuple, is_written.nonzero().tolist())) == slots
        assert not cache.isnan().all(1).all(-1)[is_written].any()


def test_sources_that_are_encoded_are_not_encoded_again(folder, programs, chunks):
    old = chunk_of(7, [3, 4], encodes=False)

    mixed = encoded(programs, [chunks[0], old, chunks[1]], [old])

    expected = encoded(programs, chunks[:2])
    for name, cache in mixed.items():
        assert_close(cache, expected[name], roundings=encoder_roundings(folder))


def test_arenas_of_both_programs_share_the_memory_that_is_allowed(programs):
    def arenas(allowed):
        config = EngineConfig(
            task="translate", max_running_sequences=LARGEST["sequences"], arena_bytes=allowed
        )
        return step_arenas(programs, config, CPU, max_step_tokens=LARGEST["tokens"])

    layouts = [Layout(program.buffers, alignment_of(CPU)) for program in programs]
    sizes = [layout.plan(LARGEST).footprint for layout in layouts]

    for arena in arenas(sum(sizes)):
        assert arena.max_tokens == LARGEST["tokens"]
    with pytest.raises(
        ConfigError,
        match=f"arena_bytes allows {sum(sizes) - 1} bytes; a step of 64 tokens needs {sum(sizes)}",
    ):
        arenas(sum(sizes) - 1)
    assert max(sizes) < sum(sizes) - 1
