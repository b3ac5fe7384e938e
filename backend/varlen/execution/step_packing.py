"""Packs the inputs of one step of generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.execution.packing import bounds_of, positions_of
from varlen.memory.usage import Dims
from varlen.request.request import Int32Array
from varlen.scheduling.batch import Batch, Chunk
from varlen.scheduling.device_plan import (
    BeamStep,
    ChosenBeams,
    DevicePlan,
    Draws,
    EditLimits,
    Edits,
    SampledToken,
)
from varlen_kernels.reference.beam import MAX_WIDTH, NO_TOKEN, BeamEdits
from varlen_kernels.reference.beam_search import (
    ENDS_WHEN_FULL,
    IS_LAST,
    NOT_GIVEN,
    SearchResults,
    SearchState,
)
from varlen_kernels.reference.logit_edits import EditLists, EditState

_LARGEST, _LEAST_DIVISOR = np.finfo(np.float32).max, np.finfo(np.float32).tiny
# Candidates of a beam are a multiple of this, so that few kernels are compiled for the language Triton.
_WIDTHS = 4
# Arguments of an op by name.
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


def beam_arrays(chunks: Sequence[Chunk]) -> Arrays:
    """Return the arguments of `follow_beams`; nothing is given by the host. Empty without beams."""
    if not any(each.beams for each in chunks):
        return {}
    rows: list[tuple[int, ...]] = []
    places: list[int] = []
    row = 0
    for each in chunks:
        if each.beams:
            rows.append((row, each.beams, each.num_generated, len(places)))
            places += each.beam_slots
        # a chunk of several tokens comes after all beams
        row += each.beams or 1
    return {
        "searches": np.array(rows, np.int32),
        "places": np.array(places, np.int32),
        "given": np.full((len(places), 2), NOT_GIVEN, np.int32),
    }


def search_arrays(chunks: Sequence[Chunk], choice: DevicePlan) -> Arrays:
    """Return what searches take their steps with; empty if none does."""
    if not any(choice.searches):
        return {}
    rows: list[tuple[int, ...]] = []
    ends: list[int] = []
    banned: list[Int32Array] = []
    logit_rows: list[int] = []
    divisors: list[tuple[float, float]] = []
    places: list[int] = []
    rules, logit_row, row, width = iter(choice.searches), 0, 0, 0
    for each in chunks:
        count = each.num_logit_rows
        if each.beam_slots and each.samples and (own := next(rules, None)) is not None:
            flags = IS_LAST * own.is_last | ENDS_WHEN_FULL * own.ends_when_full
            forced = NO_TOKEN if own.forced is None else own.forced
            of_ends = len(ends), len(ends) + len(own.end_ids)
            length = each.num_generated + 1
            beams = len(places)
            rows.append((row, count, own.num_beams, length, flags, forced, *of_ends, beams))
            places += each.beam_slots
            ends += own.end_ids
            divisors.append((own.divisor, own.best_divisor))
            logit_rows += range(logit_row, logit_row + count)
            banned += [own.banned] * count
            row += count
            width = max(width, own.num_beams + len(own.end_ids))
        logit_row += count
    sizes = [len(each) for each in banned]
    width = min(-(-width // _WIDTHS) * _WIDTHS, MAX_WIDTH)
    return {
        "searches": np.array(rows, np.int32),
        "places": np.array(places, np.int32),
        # fp32 holds no larger ones, and none may be 0
        "divisors": np.clip(np.array(divisors), _LEAST_DIVISOR, _LARGEST).astype(np.float32),
        "ends": np.array(ends, np.int32),
        "rows": np.array(logit_rows, np.int32),
        "banned_rows": np.repeat(np.arange(row, dtype=np.int32), sizes),
        "banned_tokens": np.concatenate(banned),
        "sizes": np.array([width, len(places), choice.renormalizes], np.int32),
    }


class DeviceEdits:
    """The edit lists of one model on its device."""

    def __init__(self, kernels: Any, device: torch.device, limits: EditLimits) -> None:
        """Start without a list.

        Args:
            kernels: module with the op.
            device: device of the logits.
            limits: number and size of lists.
        """
        self._kernels = kernels
        self._state = EditState.new(*limits, device)
        ids = torch.empty(0, dtype=torch.int32, device=device)
        self._none_begun = EditLists(ids, ids, torch.empty(0, device=device))

    def apply(
        self,
        logits: Tensor,
        token_ids: Tensor,
        logit_rows: Tensor,
        rows: Tensor,
        penalties: Tensor,
        begun: Mapping[str, Tensor],
    ) -> None:
        """Edit the logits of a step.

        Args:
            logits, token_ids, logit_rows, rows, penalties: see `reference.edit_logits`.
            begun: `begun_arrays` on the device.
        """
        lists = EditLists(**begun) if begun else self._none_begun
        self._kernels.edit_logits(
            logits, token_ids, logit_rows, rows, penalties, lists, self._state
        )


def begun_arrays(edits: Edits | None) -> Mapping[str, npt.NDArray[np.int32 | np.float32]]:
    """Return the lists that the host sends; empty if there are none."""
    if edits is None or not len(edits.tokens):
        return {}
    return {"tokens": edits.tokens, "counts": edits.counts, "biases": edits.biases}


Int64Array: TypeAlias = npt.NDArray[np.int64]
# Packed inputs by name, each one-dimensional.
StepArrays: TypeAlias = Mapping[str, Int32Array | Int64Array]
_NOTHING_CHOSEN = DevicePlan()
# Number of the step before, of a step that needs none.
_NO_STEP = -1
_NO_ORDER: Int64Array = np.array([0, _NO_STEP, 0])
_NO_COPIES: Int32Array = np.empty((0, 2), np.int32)
_NO_SOURCES: StepArrays = {}


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step as arrays, which its runner needs and no more.

    Attributes:
        copies: `[copies, 2]`, source and destination of blocks to copy before the step.
        sources: inputs of the encoder, if source texts are encoded before the step; else empty.
        inputs: inputs of the decoder.
        order: its number, the number of the step that it needs, or -1, and the place of its logits.
        follows: `[2, tokens]`, places of tokens that the step before chooses, and the rows of its logits.
        edits: arguments of `edit_logits`: `rows`, `penalties`, and lists if any begin; empty without edits.
        draws: arguments of `sample_tokens` by name, of them only `temperature` if all are greedy; empty if the engine
            chooses the tokens.
        beams: arguments of `follow_beams`; empty without beams.
        searches: arguments of `advance_searches`, with `rows` of the logits, `banned_rows` of these and
            `banned_tokens`, and `sizes`: candidates of a beam, all beams, and whether log probabilities are normalized
            again without banned tokens. Empty if no search takes its step here.
    """

    copies: Int32Array
    sources: StepArrays
    inputs: StepArrays
    order: Int64Array
    follows: Int32Array
    edits: Arrays
    draws: Arrays
    beams: Arrays
    searches: Arrays

    @property
    def number(self) -> int:
        """Its number."""
        return int(self.order[0])

    @property
    def after(self) -> int | None:
        """Number of the step that it needs."""
        after = int(self.order[1])
        return None if after == _NO_STEP else after

    @property
    def place(self) -> int:
        """Number of its place among the logits of steps in flight."""
        return int(self.order[2])

    def keep_logits(self, place: int) -> None:
        """Set the place of its logits."""
        self.order[2] = place

    def take_tokens(self, chosen: npt.NDArray[np.integer[Any]]) -> None:
        """Set the tokens that the step before has chosen.

        Args:
            chosen: a token for each row of its logits.
        """
        places, rows = self.follows
        self.inputs["token_ids"][places] = chosen[rows]


def pack_step(step: Batch, block_size: int, choice: DevicePlan = _NOTHING_CHOSEN) -> PackedStep:
    """Return a step as arrays.

    Args:
        step: the step.
        block_size: tokens of a block.
        choice: the part of the choice that is left to the process that runs it.
    """
    return PackedStep(
        np.array(step.copies, np.int32).reshape(-1, 2),
        source_arrays(step.chunks, block_size),
        step_arrays(step.chunks, block_size),
        np.array([step.number, _NO_STEP if step.after is None else step.after, 0], np.int64),
        followed(step.chunks),
        {} if choice.draws is None else edit_arrays(choice.draws),
        {} if choice.draws is None else draw_arrays(choice.draws),
        beam_arrays(step.chunks),
        search_arrays(step.chunks, choice),
    )


def part_of_step(
    inputs: StepArrays,
    copies: Int32Array = _NO_COPIES,
    sources: StepArrays = _NO_SOURCES,
    order: Int64Array = _NO_ORDER,
) -> PackedStep:
    """Return the part of a step that every rank or stage of a model runs.

    Args:
        inputs: `step_arrays`.
        copies: `[copies, 2]`, blocks to copy before it.
        sources: `source_arrays`, encoded before it.
        order: see `PackedStep`.
    """
    return PackedStep(copies, sources, inputs, order, np.empty((2, 0), np.int32), {}, {}, {}, {})


def followed(chunks: Sequence[Chunk]) -> Int32Array:
    """Return where tokens of the step before go, `[2, tokens]`.

    The first row has their places in this step, the second one the rows of its logits.
    """
    pairs: list[tuple[int, int]] = []
    place = 0
    # chunks of one token, or of beams, come first
    for each in chunks:
        if each.follows is not None:
            pairs.append((place, each.follows))
        place += len(each.token_ids)
    return np.array(pairs, np.int32).reshape(-1, 2).T


def edit_arrays(draws: Draws) -> Arrays:
    """Return what changes logits before tokens are drawn as arrays, see `PackedStep`."""
    if draws.edits is None:
        return {}
    rows, penalties, *_ = draws.edits
    return {"rows": rows, "penalties": penalties, **begun_arrays(draws.edits)}


def draw_arrays(draws: Draws) -> Arrays:
    """Return what tokens are drawn with as arrays, see `PackedStep`."""
    if draws.uniform is None:
        return {"temperature": np.zeros(len(draws.limits), np.float32)}
    temperatures, top_ks, top_ps, min_ps = zip(*draws.limits, strict=True)
    return {
        "temperature": np.array(temperatures, np.float32),
        "top_k": np.array(top_ks, np.int32),
        "top_p": np.array(top_ps, np.float32),
        "min_p": np.array(min_ps, np.float32),
        "uniform": draws.uniform,
    }


def tokens_of_rows(step: Batch, outputs: Sequence[SampledToken | BeamStep]) -> Int32Array:
    """Return a token for each row of the logits of a step; 0 for beams."""
    token_ids: list[int] = []
    of_step = iter(outputs)
    for chunk in step.chunks:
        for output in islice(of_step, len(chunk.samples)):
            if isinstance(output, SampledToken):
                token_ids.append(output.token_id)
            else:
                token_ids += [0] * chunk.num_logit_rows
    return np.array(token_ids, np.int32)


def step_dims(inputs: Mapping[str, Tensor]) -> Dims:
    """Return the dimensions of a step, given its inputs."""
    return {
        "tokens": len(inputs["token_ids"]),
        "sequences": len(inputs["context_lens"]),
        "blocks": len(inputs["block_ids"]),
        "source_blocks": len(inputs.get("source_block_ids", ())),
        "logit_rows": len(inputs["logit_rows"]),
    }


def step_inputs(chunks: Sequence[Chunk], block_size: int) -> dict[str, Tensor]:
    """Return `step_arrays` as tensors."""
    return tensors_of(step_arrays(chunks, block_size))


def tensors_of(arrays: StepArrays) -> dict[str, Tensor]:
    """Return arrays as tensors, which share their memory."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def step_arrays(chunks: Sequence[Chunk], block_size: int) -> StepArrays:
    """Return every input that a program of a step may read, by name.

    Args:
        chunks: chunks of the step, at least one; all of them have a source text, or none has.
        block_size: tokens of a block.
    """
    lengths = np.array([len(chunk.token_ids) for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    tables = np.array([len(chunk.block_ids) for chunk in chunks], np.int32)
    samples = np.array([len(chunk.samples) for chunk in chunks])
    beams = np.array([chunk.beams for chunk in chunks])
    if beams.any():
        # each beam is a row with a token, a table and logits
        rows, is_search = np.maximum(beams, 1), beams > 0
        lengths = np.where(is_search, 1, lengths).astype(np.int32)
        samples = np.where(is_search, samples > 0, samples)
        lengths, starts, tables, samples = (
            np.repeat(each, rows) for each in (lengths, starts, tables // rows, samples)
        )
    bounds = bounds_of(lengths)
    position_ids = positions_of(bounds, lengths, starts)
    table_bounds = bounds_of(tables)
    block_ids = flat([chunk.block_ids for chunk in chunks], int(table_bounds[-1]))
    arrays: dict[str, Int32Array | Int64Array] = {
        "token_ids": flat([chunk.token_ids for chunk in chunks], int(bounds[-1])),
        "position_ids": position_ids,
        "slots": slots_of(block_ids, table_bounds, position_ids, lengths, block_size),
        "cu_seqlens": bounds,
        "context_lens": starts + lengths,
        "block_ids": block_ids,
        "cu_blocks": table_bounds,
        "logit_rows": np.repeat(bounds[1:] - 1, samples).astype(np.int32),
    }
    if chunks[0].source_block_ids:
        arrays |= _source_tables(chunks)
    return arrays


def source_arrays(chunks: Sequence[Chunk], block_size: int) -> StepArrays:
    """Return every input that a program of an encoder may read, by name.

    There is none if no chunk encodes its source.

    Args:
        chunks: chunks of the step.
        block_size: tokens of a block.
    """
    new = [chunk for chunk in chunks if chunk.encodes]
    if not new:
        return {}
    lengths = np.fromiter((len(chunk.encodes) for chunk in new), np.int32, len(new))
    bounds = bounds_of(lengths)
    position_ids = positions_of(bounds, lengths)
    block_ids, tables = tables_of([chunk.source_block_ids for chunk in new])
    return {
        "token_ids": flat([chunk.encodes for chunk in new], int(bounds[-1])),
        "position_ids": position_ids,
        "cu_seqlens": bounds,
        "slots": slots_of(block_ids, tables, position_ids, lengths, block_size),
    }


def slots_of(
    block_ids: Int32Array,
    bounds: Int32Array,
    position_ids: Int32Array,
    lengths: Int32Array,
    block_size: int,
) -> Int64Array:
    """Return the slot of each token in the KV caches: block · block_size + place.

    Args:
        block_ids, bounds: block ids and bounds of the block tables of all sequences, see `tables_of`.
        position_ids: position ids of all tokens, sequence by sequence.
        lengths: number of tokens of each sequence.
        block_size: tokens of a block.
    """
    first = np.repeat(bounds[:-1], lengths)
    blocks: Int64Array = block_ids[first + position_ids // block_size].astype(np.int64)
    return blocks * block_size + position_ids % block_size


def flat(rows: Sequence[Sequence[int]], count: int) -> Int32Array:
    """Return the `count` numbers of all rows, one row after another."""
    return np.fromiter(chain.from_iterable(rows), np.int32, count)


def tables_of(tables: Sequence[Sequence[int]]) -> tuple[Int32Array, Int32Array]:
    """Return the blocks of all tables, and the bounds of each table."""
    bounds = bounds_of(np.fromiter(map(len, tables), np.int32, len(tables)))
    return flat(tables, int(bounds[-1])), bounds


def _source_tables(chunks: Sequence[Chunk]) -> dict[str, Int32Array]:
    """Return the tables of sources: each token is a row of its own."""
    sources = np.fromiter(
        (chunk.sequence.prompt.num_source_tokens for chunk in chunks), np.int32, len(chunks)
    )
    lengths = [len(chunk.token_ids) for chunk in chunks]
    tables = [chunk.source_block_ids for chunk in chunks for _ in chunk.token_ids]
    block_ids, bounds = tables_of(tables)
    return {
        "source_rows": np.arange(len(tables) + 1, dtype=np.int32),
        "source_lens": np.repeat(sources, lengths),
        "source_block_ids": block_ids,
        "cu_source_blocks": bounds,
    }


class DeviceSearches:
    """The searches of one model."""

    def __init__(
        self,
        kernels: Any,
        device: torch.device,
        *,
        rows: int,
        blocks: int,
        block_size: int,
    ) -> None:
        """Start without a search.

        Args:
            kernels: module with the ops of searches.
            device: device of the logits.
            rows: most rows of logits, which is the most beams at the same time.
            blocks: longest block table.
            block_size: tokens of a block.
        """
        self._kernels = kernels
        self._block_size = block_size
        self._state = SearchState.new(rows, blocks, device)
        # scores of beams before the step, which `advance_searches` adds
        self._zeros = torch.zeros(rows, 1, device=device)

    def follow(self, beams: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        """Give beams their tokens and block tables; return blocks to copy, `[copies, 2]` int32.

        Args:
            beams: `PackedStep.beams` on the device.
            inputs: inputs of the step; changed.
        """
        copies = torch.empty_like(beams["given"])
        self._kernels.follow_beams(
            self._state,
            beams["searches"],
            beams["places"],
            beams["given"],
            inputs["token_ids"],
            # every program that reads KV blocks has them; not all have positions
            inputs["context_lens"],
            inputs["cu_blocks"],
            inputs["block_ids"],
            inputs["slots"],
            copies,
            block_size=self._block_size,
        )
        return copies

    def advance(self, logits: Tensor, arrays: Arrays, on_device: Mapping[str, Tensor]) -> Tensor:
        """Return what searches choose, the numbers of `SearchResults`.

        Args:
            logits: `[logit rows, vocabulary]` fp32 of the step; may be overwritten.
            arrays, on_device: `PackedStep.searches`, on the host and on the device.
        """
        width, num_beams, renormalizes = arrays["sizes"].tolist()
        num_searches, device = len(arrays["searches"]), logits.device
        if len(arrays["rows"]) < len(logits):
            logits = logits[on_device["rows"].long()]
        rows, tokens = on_device["banned_rows"], on_device["banned_tokens"]
        edits = None
        if len(rows) and renormalizes:
            logits[rows.long(), tokens.long()] = -torch.inf
        elif len(rows):
            edits = BeamEdits(rows, tokens, torch.full(rows.shape, torch.inf, device=device))
        width = min(width, logits.shape[1])
        found = self._kernels.beam_step(
            logits, self._zeros[: len(logits)], width=width, edits=edits
        )
        numbers = SearchResults.numbers(num_searches, num_beams, device)
        self._kernels.advance_searches(
            found,
            on_device["searches"],
            on_device["places"],
            on_device["divisors"],
            on_device["ends"],
            self._state,
            SearchResults.views(numbers, num_searches),
        )
        return numbers


def choices_of(numbers: Tensor, arrays: Arrays) -> ChosenBeams:
    """Return what searches have chosen.

    Args:
        numbers: the result of `DeviceSearches.advance`, on the host.
        arrays: `PackedStep.searches`.
    """
    results = SearchResults.views(numbers, len(arrays["searches"]))
    return ChosenBeams(*(each.numpy() for each in results))
