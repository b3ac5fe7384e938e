"""Runs a model with an encoder and a decoder step by step over KV blocks."""

from dataclasses import dataclass, field

import numpy as np
import torch

from varlen.execution.cpu.linear_paths import use_paths
from varlen.memory.arena import Arena
from varlen.memory.planner import Layout
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import CrossAttention, PagedAttention
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder
from varlen.program.program import PackedBatch
from varlen.program.recorder import Recorder

from .paged import runner_of

CPU = torch.device("cpu")
LARGEST_SOURCES = {"tokens": 512, "sequences": 16}
LARGEST = {**LARGEST_SOURCES, "blocks": 512, "source_blocks": 4096, "logit_rows": 512}


@dataclass
class Pair:
    """A source, and a target whose tokens are run chunk by chunk."""

    source: list[int]
    target: list[int]
    source_blocks: list[int]
    blocks: list[int]
    done: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


def run_in_chunks(
    folder, pairs, sizes, *, block_size=4, dtype=torch.float32, compiled=False, seed=0
):
    """Return the logits of all tokens of each target.

    Args:
        pairs: token ids `(source, target)`; sources are encoded together, before the first target.
        sizes: tokens of each target's chunks; a target begins at the step of its number.
        compiled: see `paged.run_in_chunks`.
    """
    counts = [-(-len(row) // block_size) for pair in pairs for row in pair]
    num_blocks = sum(counts) + 3
    ids = np.random.default_rng(seed).permutation(num_blocks).tolist()
    tables = iter([[ids.pop() for _ in range(count)] for count in counts])
    pairs = [Pair(source, target, next(tables), next(tables)) for source, target in pairs]
    encode, decode = _programs(folder, num_blocks, block_size, dtype, compiled=compiled)
    encode(_pack_sources(pairs, block_size))
    step = 0
    while any(pair.done < len(pair.target) for pair in pairs):
        chunks = [
            (pair, pair.target[pair.done : pair.done + size])
            for number, (pair, size) in enumerate(zip(pairs, sizes, strict=True))
            if number <= step and pair.done < len(pair.target)
        ]
        # chunks of one token first, as the steps of generation are packed
        chunks.sort(key=lambda chunk: len(chunk[1]) != 1)
        (logits,) = decode(_pack_targets(chunks, block_size))
        for (pair, new), rows in zip(
            chunks, logits.split([len(new) for _, new in chunks]), strict=True
        ):
            pair.logits.append(rows)
            pair.done += len(new)
        step += 1
    return [torch.cat(pair.logits) for pair in pairs]


def _programs(folder, num_blocks, block_size, dtype, *, compiled):
    """Return functions that run the encoder and the decoder on poisoned memory and common caches."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.check_task("translate")
    model = load_decoder(checkpoint, dtype, CPU)
    caches = (num_blocks, block_size, dtype)
    ops = Recorder()
    model.record_encoder(ops, CrossAttention(*caches))
    encoder = ops.finish()
    ops = Recorder()
    hidden = model.record(ops, PagedAttention(*caches), CrossAttention(*caches))
    decoder = ops.finish(model.record_logits(ops, ops.select_rows(hidden, inputs.logit_rows(ops))))
    assert len(decoder.states) == 2 * len(model.layers)
    assert set(encoder.states) == set(decoder.states)
    tensors = {
        state.name: torch.full(state.shape, torch.nan, dtype=state.dtype)
        for state in decoder.states
    }

    def runner(program, largest):
        program = use_paths(program, {}) if compiled else program
        arena = Arena(Layout(program.buffers, 64), largest, CPU)
        run_batch = runner_of(program, tensors, compiled=compiled)

        @torch.inference_mode()
        def run(batch):
            region = arena.allocate(batch.dims)
            region.memory.fill_(0xFF)
            return run_batch(batch, region=region)

        return run

    return runner(encoder, LARGEST_SOURCES), runner(decoder, LARGEST)


def _pack_sources(pairs, block_size):
    lengths = [len(pair.source) for pair in pairs]
    arrays = {
        "token_ids": np.concatenate([pair.source for pair in pairs]),
        "position_ids": np.concatenate([np.arange(length) for length in lengths]),
        "slots": np.concatenate(
            [_slots(pair.source_blocks, np.arange(len(pair.source)), block_size) for pair in pairs]
        ),
        "cu_seqlens": np.cumsum([0, *lengths]),
    }
    return _batch(arrays, {"tokens": sum(lengths), "sequences": len(pairs)})


def _pack_targets(chunks, block_size):
    """Return the batch of chunks `(pair, new tokens)`."""
    lengths = [len(new) for _, new in chunks]
    positions = [np.arange(pair.done, pair.done + len(new)) for pair, new in chunks]
    tables = [pair.blocks[: -(-(pair.done + len(new)) // block_size)] for pair, new in chunks]
    # each token reads the whole source
    sources = [pair for pair, new in chunks for _ in new]
    arrays = {
        "token_ids": np.concatenate([new for _, new in chunks]),
        "position_ids": np.concatenate(positions),
        "slots": np.concatenate(
            [
                _slots(pair.blocks, at, block_size)
                for (pair, _), at in zip(chunks, positions, strict=True)
            ]
        ),
        "cu_seqlens": np.cumsum([0, *lengths]),
        "context_lens": np.array([pair.done + len(new) for pair, new in chunks]),
        "block_ids": np.concatenate(tables),
        "cu_blocks": np.cumsum([0, *map(len, tables)]),
        "source_rows": np.arange(sum(lengths) + 1),
        "source_lens": np.array([len(pair.source) for pair in sources]),
        "source_block_ids": np.concatenate([pair.source_blocks for pair in sources]),
        "cu_source_blocks": np.cumsum([0, *(len(pair.source_blocks) for pair in sources)]),
        "logit_rows": np.arange(sum(lengths)),
    }
    dims = {
        "tokens": sum(lengths),
        "sequences": len(chunks),
        "blocks": sum(map(len, tables)),
        "source_blocks": len(arrays["source_block_ids"]),
        "logit_rows": sum(lengths),
    }
    return _batch(arrays, dims)


def _slots(blocks, at, block_size):
    return np.array(blocks)[at // block_size] * block_size + at % block_size


def _batch(arrays, dims):
    tensors = {
        name: torch.tensor(array, dtype=torch.int64 if name == "slots" else torch.int32)
        for name, array in arrays.items()
    }
    return PackedBatch(tensors, dims)
