"""Usage records, chunk planner and request streams of TurboTransformers' paper.

`python -m varlen_bench.paper_plan` draws the records at 200 and 240 tokens: docs/concepts/plan-paper.svg.
What is published about the paper's allocator rests on these, so our planner is compared with them.
The records are one encoder layer of 12 heads in fp32, which all layers share.

Source: Fang et al. 2021, arXiv:2010.05680, algorithm 1, and the code published with it.
"""

import random
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import typer

from varlen.memory.planner import Size, Usage, best_offset, conflicts, largest_first, live_sizes
from varlen_bench import pictures
from varlen_bench.show_plan.maps import Area, Map
from varlen_bench.show_plan.picture import draw, render

# A new chunk is a fifth larger than its first buffer, in steps of 32 bytes, and at least two megabytes.
_GROWTH_PERCENT = 120
_CHUNK_STEP = 32
_LEAST_BYTES = 2 << 20
_OUTPUT = [Path("plan-paper.svg"), Path("plan-paper.html")]


class Place(NamedTuple):
    """The place of a buffer: number of its chunk, and offset in bytes."""

    chunk: int
    offset: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The places of all buffers of one batch.

    Attributes:
        chunks: sizes in bytes; existing chunks first, then new ones.
        extents: used bytes of each chunk, from its start.
    """

    places: tuple[Place, ...]
    chunks: tuple[int, ...]
    extents: tuple[int, ...]


def plan_chunks(usages: Sequence[Usage], chunks: Sequence[int] = ()) -> ChunkPlan:
    """Return the place of each usage: the first chunk with room, else a new one.

    Args:
        chunks: sizes of the existing chunks, in bytes, in the order in which they were opened.
    """
    sizes = [usage.size.fixed for usage in usages]
    masks = conflicts([[(usage.first_op, usage.last_op)] for usage in usages])
    capacities = list(chunks)
    extents = [0] * len(capacities)
    # of each chunk: (offset, end, usage), by offset
    placed: list[list[tuple[int, int, int]]] = [[] for _ in capacities]
    places = [Place(0, 0)] * len(sizes)
    for number in largest_first(sizes):
        size = sizes[number]
        for chunk, capacity in enumerate(capacities):
            offset = best_offset(placed[chunk], masks[number], size)
            if offset + size <= capacity:
                break
        else:
            chunk, offset = len(capacities), 0
            capacities.append(_new_chunk(size))
            extents.append(0)
            placed.append([])
        places[number] = Place(chunk, offset)
        extents[chunk] = max(extents[chunk], offset + size)
        insort(placed[chunk], (offset, offset + size, number))
    return ChunkPlan(tuple(places), tuple(capacities), tuple(extents))


def _new_chunk(size: int) -> int:
    """Return the size of the chunk to open for a buffer."""
    grown = size * _GROWTH_PERCENT // 100
    return max(_LEAST_BYTES, -(-grown // _CHUNK_STEP) * _CHUNK_STEP)


def bert_usages(batch: int, length: int) -> list[Usage]:
    """Return the records of `batch` padded sequences of `length` tokens.

    Two sizes are as the published code has them, not as its ops need: `batch_gemm4` is recorded as large as
    the scores, and `seqpool` without the batch.
    """
    ids = 8 * batch * length
    hidden = 4 * batch * length * 768
    scores = 4 * batch * 12 * length * length
    pooled = 4 * batch * 768
    records = [
        ("position ids", 0, 1, ids),
        ("segment ids", 0, 1, ids),
        ("attmask", 0, 0, ids),
        ("extended mask", 0, 11, ids // 2),
        ("embedding", 1, 11, hidden),
        ("qkv_out1", 2, 3, 3 * hidden),
        ("q", 3, 4, hidden),
        ("k", 3, 4, hidden),
        ("v", 3, 5, hidden),
        ("batch_gemm3", 4, 5, scores),
        ("context", 5, 6, hidden),
        ("batch_gemm4", 6, 7, scores),
        ("gemm5", 7, 10, hidden),
        ("intermediate", 9, 10, 4 * hidden),
        ("pooler", 11, 12, pooled),
        ("seqpool", 12, 13, 4 * 768),
    ]
    return [Usage(name, first, last, Size(fixed=size)) for name, first, last, size in records]


def lengths(count: int, longest: int) -> list[int]:
    """Return the lengths of a published stream of requests, in tokens: uniform from 5."""
    numbers = random.Random(0)
    return [numbers.randint(5, longest) for _ in range(count)]


def paper_maps(lengths: Sequence[int]) -> list[Map]:
    """Return maps of the paper's records; each request finds the chunks before it."""
    maps: list[Map] = []
    for length in lengths:
        usages = bert_usages(1, length)
        made = plan_chunks(usages, maps[-1].chunks if maps else ())
        areas = tuple(
            Area((use.name,), chunk, offset, use.size.fixed, use.first_op, use.last_op)
            for use, (chunk, offset) in zip(usages, made.places, strict=True)
        )
        ops = tuple(f"op {op}" for op in range(1 + max(use.last_op for use in usages)))
        peak = max(size.fixed for size in live_sizes(usages))
        footprint = sum(made.extents)
        maps.append(Map(f"{length} tokens", areas, made.chunks, footprint, ops, peak))
    return maps


def main(output: pictures.OutputOption = _OUTPUT) -> None:
    """Draw where the paper's records lie in memory."""
    heading, maps = "BERT-base, one layer: the records of TurboTransformers", paper_maps([200, 240])
    note = "The records by the paper's rules: each batch finds the chunks of the one before."
    pictures.write_outputs(
        output, partial(draw, heading, maps), partial(render, heading, maps, note)
    )


if __name__ == "__main__":
    typer.run(main)
