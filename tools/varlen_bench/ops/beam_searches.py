"""Calls of the ops of searches with beams, before the model and after it."""

from typing import Any

import torch
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall, Tensors, bounds, poison
from varlen_kernels.reference.beam import BeamCandidates
from varlen_kernels.reference.beam_search import (
    ADVANCE_COLUMNS,
    FOLLOW_COLUMNS,
    NOT_GIVEN,
    SearchResults,
    SearchState,
)

# Most beams of a model, and blocks of its longest table.
_PLACES, _BLOCKS = 256, 128


def follow_beams(
    searches: int, beams: int, blocks: int, dtype: torch.dtype, *, block_size: int = 16
) -> OpCall:
    """Return beams that take the tables of others, in the middle of their last block.

    Args:
        searches: number of searches.
        beams: beams of each.
        blocks: blocks of each table.
    """
    rows = searches * beams
    position = blocks * block_size - block_size // 2

    def state(make: Tensors) -> SearchState:
        # every second beam is continued twice
        parents = [beam // 2 * 2 for beam in range(beams)] * searches
        found = _state(make)
        found.parents[0, :rows] = make.ints(parents)
        # of beams with a token less
        found.tables[1, :rows, :blocks] = make.ints(list(range(rows * blocks))).view(rows, blocks)
        return found

    def read(result: Any, _: Inputs) -> Tensor:
        return torch.cat([each.flatten() for each in result]).double()

    columns = [[i * beams, beams, 2, i * beams] for i in range(searches)]
    return OpCall(
        "follow_beams",
        f"{searches}x{beams} of {blocks}",
        dtype,
        {
            "state": state,
            "searches": lambda make: _table(make, columns, FOLLOW_COLUMNS),
            "places": [*range(rows)],
            "given": lambda make: make.ints([NOT_GIVEN] * rows * 2).view(rows, 2),
            "token_ids": lambda make: make.ids(1, rows),
            "context_lens": [position + 1] * rows,
            "cu_blocks": bounds([blocks] * rows),
            "block_ids": lambda make: make.ids(1, rows * blocks),
            "slots": lambda make: make.ids(1, rows).long(),
            "copies": lambda make: make.ids(1, rows * 2).view(rows, 2),
        },
        options={"block_size": block_size},
        read=read,
        written=("token_ids", "block_ids", "slots", "copies"),
        threshold=0.0,
    )


def advance_searches(searches: int, beams: int, vocabulary: int, dtype: torch.dtype) -> OpCall:
    """Return searches that choose their next beams.

    Args:
        searches: number of searches.
        beams: beams of each.
        vocabulary: number of tokens.
    """
    rows, width = searches * beams, min(beams + 1, vocabulary)
    columns = [[i * beams, beams, beams, 2, 0, -1, i, i + 1, i * beams] for i in range(searches)]

    def found(make: Tensors) -> BeamCandidates:
        logprobs = make.random(rows, width, dtype=torch.float32).sort(1, descending=True).values
        tokens = make.ints([*range(width)] * rows).view(rows, width)
        return BeamCandidates(tokens, tokens, logprobs)

    def out(make: Tensors) -> SearchResults:
        numbers = SearchResults.numbers(searches, rows, make.device)
        results = SearchResults.views(numbers, searches)
        poison(results)
        return results

    def read(result: Any, _: Inputs) -> Tensor:
        ends, of_beams, _ = result[0]
        # places without an answer are not written
        return torch.cat([ends.flatten(), of_beams[:, :2].flatten()]).double()

    return OpCall(
        "advance_searches",
        f"{searches}x{beams}x{vocabulary}",
        dtype,
        {
            "found": found,
            "searches": lambda make: _table(make, columns, ADVANCE_COLUMNS),
            "places": [*range(rows)],
            "divisors": lambda make: torch.full((searches, 2), 2.0, device=make.device),
            "ends": [width - 1] * searches,
            "state": _state,
            "out": out,
        },
        read=read,
        written=("out",),
        threshold=0.0,
    )


def _table(make: Tensors, rows: list[list[int]], columns: int) -> Tensor:
    return make.ints([number for row in rows for number in row]).view(-1, columns)


def _state(make: Tensors) -> SearchState:
    """Return searches that have no answers."""
    state = SearchState.new(_PLACES, _BLOCKS, make.device)
    return state._replace(scores=make.random(2, _PLACES, dtype=torch.float32))
