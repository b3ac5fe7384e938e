"""Runs a decoder step by step over KV blocks."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from varlen.execution.cpu.compiled_program import compile_program
from varlen.execution.cpu.linear_paths import use_paths
from varlen.memory.arena import Arena
from varlen.memory.planner import Layout
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import PagedAttention
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder
from varlen.program.program import PackedBatch
from varlen.program.recorder import Recorder
from varlen_kernels import cpu, reference
from varlen_kernels.cpu.native.threads import using_cores

CPU = torch.device("cpu")


@dataclass
class Row:
    """A sequence whose tokens are run chunk by chunk."""

    token_ids: list[int]
    done: int = 0
    blocks: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def run_in_chunks(
    folder,
    rows,
    sizes,
    *,
    block_size=4,
    dtype=torch.float32,
    compiled=False,
    path="",
    seed=0,
    keeps_codes=False,
):
    """Return hidden states and logits of all tokens of each row.

    Args:
        rows: token ids.
        sizes: tokens of each row's chunks; a row begins at the step of its number.
        compiled: whether to run compiled steps on two cores, as generation on CPUs does, and not the reference.
        keeps_codes: whether linear layers keep codes, which compiled steps read.
        path: op of their linear layers; "" is the default of the dtype.
    """
    rows = [Row(list(map(int, row))) for row in rows]
    needed = [-(-len(row.token_ids) // block_size) for row in rows]
    ids = np.random.default_rng(seed).permutation(sum(needed) + 3).tolist()
    for row, count in zip(rows, needed, strict=True):
        row.blocks = [ids.pop() for _ in range(count)]
    program, arena, caches = record_step(
        folder, sum(needed) + 3, block_size, dtype, keeps_codes=keeps_codes
    )
    program = use_paths(program, {}, path) if compiled else program
    run = runner_of(program, caches, compiled=compiled)
    step = 0
    while any(row.done < len(row.token_ids) for row in rows):
        chunks = [
            (row, row.token_ids[row.done : row.done + size])
            for number, (row, size) in enumerate(zip(rows, sizes, strict=True))
            if number <= step and row.done < len(row.token_ids)
        ]
        batch = _pack(chunks, block_size)
        region = arena.allocate(batch.dims)
        region.memory.fill_(0xFF)
        with torch.inference_mode():
            hidden, logits = run(batch, region=region)
        begin = 0
        for row, new in chunks:
            row.hidden.append(hidden[begin : begin + len(new)])
            row.logits.append(logits[begin : begin + len(new)])
            begin += len(new)
            row.done += len(new)
        step += 1
    return [torch.cat(row.hidden) for row in rows], [torch.cat(row.logits) for row in rows]


def runner_of(program, caches, *, compiled):
    """Return a function that runs a batch of a program in a region."""
    if not compiled:
        return partial(program.run, kernels=reference, states=caches)
    calls = compile_program(program, cpu, caches)

    def run(batch, region):
        with using_cores(2):
            return calls.run(batch, cpu, region)

    return run


def record_step(folder, num_blocks, block_size, dtype, *, keeps_codes=False):
    """Return a program for hidden states and logits, its arena and poisoned caches."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.check_task("generate")
    decoder = load_decoder(checkpoint, dtype, CPU, keeps_codes=keeps_codes)
    ops = Recorder()
    hidden = decoder.record(ops, PagedAttention(num_blocks, block_size, dtype))
    logits = decoder.record_logits(ops, ops.select_rows(hidden, inputs.logit_rows(ops)))
    program = ops.finish(hidden, logits)
    assert len(program.states) == 2 * len(decoder.layers)
    largest = {"tokens": 1024, "sequences": 16, "blocks": 1024, "logit_rows": 1024}
    arena = Arena(Layout(program.buffers, 64), largest, CPU)
    caches = {
        state.name: torch.full(state.shape, torch.nan, dtype=state.dtype)
        for state in program.states
    }
    return program, arena, caches


def _pack(chunks, block_size):
    """Return the batch of chunks `(row, new tokens)`."""
    positions = [np.arange(row.done, row.done + len(new)) for row, new in chunks]
    contexts = [row.done + len(new) for row, new in chunks]
    tables = [
        row.blocks[: -(-context // block_size)]
        for (row, _), context in zip(chunks, contexts, strict=True)
    ]
    slots = [
        np.array(row.blocks)[at // block_size] * block_size + at % block_size
        for (row, _), at in zip(chunks, positions, strict=True)
    ]
    lengths = [len(new) for _, new in chunks]
    arrays = {
        "token_ids": np.concatenate([new for _, new in chunks]),
        "position_ids": np.concatenate(positions),
        "slots": np.concatenate(slots),
        "cu_seqlens": np.cumsum([0, *lengths]),
        "context_lens": np.array(contexts),
        "block_ids": np.concatenate(tables),
        "cu_blocks": np.cumsum([0, *map(len, tables)]),
        "logit_rows": np.arange(sum(lengths)),
    }
    tensors = {
        name: torch.tensor(array, dtype=torch.int64 if name == "slots" else torch.int32)
        for name, array in arrays.items()
    }
    dims = {
        "tokens": sum(lengths),
        "sequences": len(chunks),
        "blocks": sum(map(len, tables)),
        "logit_rows": sum(lengths),
    }
    return PackedBatch(tensors, dims)
