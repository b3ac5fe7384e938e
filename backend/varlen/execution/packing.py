"""Packs sequences, each with some tokens, into the inputs of a program.

Sequences that run as a whole bring prompts and options, sequences of a step bring chunks. Inputs are arrays by name. On
a GPU they lie in one buffer, which one copy moves. The program declares which inputs it reads, and their shapes.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, pairwise
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.memory.planner import Dims
from varlen.program.adapters import AdaptedRows
from varlen.request.request import (
    MAX_MASKS,
    MAX_SPAN_SHARE,
    Float32Array,
    Int32Array,
    Masks,
    Prompt,
    RequestOptions,
    Spans,
    Unpooled,
    Vectors,
    Words,
)
from varlen.request.spans import MAX_LABEL_ROWS
from varlen.scheduling.batch import Batch, Chunk
from varlen.scheduling.device_plan import BeamStep, DevicePlan, Draws, Edits, SampledToken
from varlen_kernels.functions import (
    ENDS_WHEN_FULL,
    FOLLOW_COLUMNS,
    IS_LAST,
    MAX_WIDTH,
    NO_TOKEN,
    NOT_GIVEN,
)

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.program.program import Program, Value

# Inputs of a program, or arguments of an op, by name.
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Int64Array: TypeAlias = npt.NDArray[np.int64]
# The slot of a token that is written nowhere.
NO_SLOT = -1
# What steps and sources bring instead of the inputs of adapters: the number of the adapter of each sequence, or -1.
ADAPTERS = "adapters"
_LARGEST, _LEAST_DIVISOR = np.finfo(np.float32).max, np.finfo(np.float32).tiny
# Candidates of a beam are a multiple of this, so that few kernels are compiled for the language Triton.
_WIDTHS = 4


_NOTHING_CHOSEN = DevicePlan()
# Number of the step before, of a step that needs none.
_NO_STEP = -1
_NO_ORDER: Int64Array = np.array([0, _NO_STEP, 0, 0])
_NO_COPIES: Int32Array = np.empty((0, 2), np.int32)
_NO_SOURCES: Arrays = {}
_NO_SEARCHES: Int32Array = np.empty((0, FOLLOW_COLUMNS), np.int32)
_NO_ADAPTERS: Mapping[str, int] = {}
_NO_DRAFTS: Int32Array = np.empty(0, np.int32)
_NO_FOLLOWS: Int32Array = np.empty((2, 0), np.int32)


# Dimensions of a packed batch whose prompts have no payload.
_NO_PAYLOADS: Dims = dict.fromkeys(
    "masks words labels instances pairs pooled_tokens scores".split(), 0
)
_payload_of = attrgetter("payload")
# Inputs of a step that are bounds of rows, and the blocks that lie between them, if these are.
_BOUNDS = {
    "cu_seqlens": "",
    "cu_blocks": "block_ids",
    "source_rows": "",
    "cu_source_blocks": "source_block_ids",
}
# Inputs of a step with a number for each row of one token.
_OF_ROWS = ("token_ids", "position_ids", "slots", "context_lens")
# Alignment of each input, in bytes: kernels load 16 bytes at a time.
_ALIGNMENT = 16


def dims_of(lengths: Sequence[int], **others: int) -> Dims:
    """Return the dimensions of a batch of sequences of these lengths, with `payload_dims`."""
    count = len(lengths)
    batch = {"tokens": sum(lengths), "sequences": count, "pooled": count}
    return {**batch, **_NO_PAYLOADS, **others}


def payload_dims(prompts: Sequence[Prompt]) -> Dims:
    """Return the dimensions that payloads decide; a pair is a word and a label."""
    return {
        "masks": sum(prompt.num_masks for prompt in prompts),
        "words": sum(prompt.num_words for prompt in prompts),
        "labels": sum(prompt.num_labels for prompt in prompts),
        "instances": sum(prompt.num_instances for prompt in prompts),
        "pairs": sum(prompt.num_words * prompt.num_labels for prompt in prompts),
    }


def largest_dims(tokens: int, max_sequences: int | None = None) -> Dims:
    """Return the largest dimensions of a batch of `tokens` tokens.

    Args:
        max_sequences: None if each token may be a sequence.
    """
    sequences = min(tokens, max_sequences or tokens)
    return {"tokens": tokens, "sequences": sequences, **largest_payloads(tokens, sequences)}


def with_adapted(dims: Dims, programs: Sequence[Program]) -> Dims:
    """Return dimensions with rows of adapters, if programs read them: all rows."""
    names = {value.name for program in programs for value in program.inputs}
    adapted = {AdaptedRows(name).rows: count for name, count in dims.items()}
    return {**dims, **{name: count for name, count in adapted.items() if name in names}}


def largest_payloads(tokens: int, sequences: int) -> Dims:
    """Return the largest `payload_dims` of a batch of this size.

    A token is a word or a label, so a sequence has the most pairs if half of its tokens are words. Labels that are no
    tokens are as many as one sequence may have, or fewer; an instance has at least one.
    """
    most_labels = max(tokens, MAX_LABEL_ROWS)
    return {
        "masks": min(tokens, MAX_MASKS * sequences),
        "words": tokens,
        "labels": most_labels,
        "instances": most_labels,
        "pairs": max(tokens * tokens // 4, tokens * MAX_LABEL_ROWS),
        # a sequence has at most a span for each token
        "pooled": tokens,
        "pooled_tokens": MAX_SPAN_SHARE * tokens,
    }


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Where the inputs of a batch lie in one buffer.

    Attributes:
        parts: each input, its shape, and its bytes in the buffer.
    """

    num_bytes: int
    parts: tuple[tuple[Value, tuple[int, ...], slice], ...]

    @classmethod
    def of(cls, inputs: Sequence[Value], dims: Dims) -> InputLayout:
        """Return the layout of inputs, as a program declares them, of such a batch."""
        parts, begin = [], 0
        for value in inputs:
            shape = value.at(dims)
            end = begin + prod(shape) * value.dtype.itemsize
            parts.append((value, shape, slice(begin, end)))
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        return cls(begin, tuple(parts))

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the inputs by name, as views of a buffer: `[bytes]` uint8, at least `num_bytes`."""
        return {
            value.name: buffer[part].view(value.dtype).view(shape)
            for value, shape, part in self.parts
        }


def fill_inputs(views: Mapping[str, npt.NDArray[Any]], arrays: Arrays) -> None:
    """Write arrays into the inputs of a program; others are left out.

    Inputs may have more room, which becomes tokens of no sequence and sequences of no token.

    Args:
        views: inputs of an `InputLayout` in memory of the host.
        arrays: `prompt_arrays` or `step_arrays`.
    """
    for name, array in arrays.items():
        into = views.get(name)
        if into is None:
            # no program reads all of them
            continue
        used = len(array)
        into[:used] = array
        match name:
            case "slots":
                into[used:] = NO_SLOT
            case "cu_seqlens" | "cu_pooled" | "cu_blocks" | "cu_source_blocks":
                into[used:] = into[used - 1]
            case "source_rows":
                # each token is a row
                into[used:] = range(used, len(into))
            case "block_ids" | "source_block_ids":
                # nothing reads beyond the bounds
                pass
            case _:
                into[used:] = 0


def prompt_arrays(
    names: Iterable[str], prompts: Sequence[Prompt], options: Sequence[RequestOptions]
) -> Arrays:
    """Return inputs of a program that runs whole sequences, by name.

    Raises:
        ValueError: the program reads an input that prompts and options do not have.
    """
    lengths = [prompt.num_tokens for prompt in prompts]
    bounds = bounds_of(lengths)
    pooling: Arrays = {}
    arrays = {}
    for name in names:
        if name in _OF_POOLING:
            pooling = pooling or _pooling_arrays(prompts, options, bounds)
            arrays[name] = pooling[name]
        else:
            arrays[name] = _prompt_array(name, prompts, options, lengths, bounds)
    return arrays


def _prompt_array(
    name: str,
    prompts: Sequence[Prompt],
    options: Sequence[RequestOptions],
    lengths: Sequence[int],
    bounds: Int32Array,
) -> npt.NDArray[Any]:
    array: npt.NDArray[Any]
    match name:
        case "token_ids":
            array = np.concatenate([prompt.token_ids for prompt in prompts], dtype=np.int32)
        case "position_ids":
            array = positions_of(bounds, lengths)
        case "type_ids" if all(prompt.type_ids is None for prompt in prompts):
            array = np.zeros(bounds[-1], np.int32)
        case "type_ids":
            array = np.concatenate([_type_ids(prompt) for prompt in prompts], dtype=np.int32)
        case "cu_seqlens":
            array = bounds
        case "mask_rows":
            array = _mask_rows(prompts, bounds)
        case "word_rows" | "label_rows" | "cu_words" | "cu_labels":
            array = _of_words_and_labels(name, prompts, bounds)
        case "task_rows" | "instance_numbers" | "cu_instances":
            array = _of_instances(name, prompts, bounds)
        case "normalize_tokens":
            array = np.repeat(np.array([each.normalize for each in options], np.bool_), lengths)
        case "key_lengths":
            counts = [prompt.payload_count(Vectors) or prompt.num_tokens for prompt in prompts]
            array = np.array(counts, np.int32)
        case _:
            raise ValueError(f'the program reads an input "{name}", which prompts do not have')
    return array


# Inputs that pooling reads.
_OF_POOLING = frozenset({"cu_pooled", "pooled_rows", "normalize", "unpooled_lengths"})


def _has_spans(prompts: Sequence[Prompt]) -> bool:
    # every batch of embeddings is asked
    return Spans in set(map(type, map(_payload_of, prompts)))


def _pooled_parts(prompt: Prompt) -> list[tuple[int, int]]:
    """Return the tokens of each vector of a prompt, in a batch with spans."""
    spans = prompt.spans
    if spans is None:
        return [(prompt.payload_count(Unpooled) or 0, prompt.num_tokens)]
    return spans


def _pooling_arrays(
    prompts: Sequence[Prompt], options: Sequence[RequestOptions], bounds: Int32Array
) -> Arrays:
    """Return the inputs of pooling: one vector for a sequence, or one for each span."""
    normalize = np.array([each.normalize for each in options], np.bool_)
    if not _has_spans(prompts):
        unpooled = [prompt.payload_count(Unpooled) or 0 for prompt in prompts]
        return {
            "cu_pooled": bounds,
            "pooled_rows": np.empty(0, np.int32),
            "normalize": normalize,
            "unpooled_lengths": np.array(unpooled, np.int32),
        }
    parts = [_pooled_parts(prompt) for prompt in prompts]
    counts = [len(spans) for spans in parts]
    rows = [
        np.arange(first + begin, first + end, dtype=np.int32)
        for first, spans in zip(bounds.tolist(), parts, strict=False)
        for begin, end in spans
    ]
    return {
        "cu_pooled": bounds_of([len(each) for each in rows]),
        "pooled_rows": np.concatenate(rows),
        "normalize": np.repeat(normalize, counts),
        # the rows leave them out
        "unpooled_lengths": np.zeros(sum(counts), np.int32),
    }


def _type_ids(prompt: Prompt) -> Int32Array:
    return np.zeros_like(prompt.token_ids) if prompt.type_ids is None else prompt.type_ids


def _mask_rows(prompts: Sequence[Prompt], bounds: Int32Array) -> Int32Array:
    """Return the masks of all sequences by their place in the batch, `[masks]` int32."""
    rows = [
        begin + places
        for begin, prompt in zip(bounds, prompts, strict=False)
        if (places := prompt.payload_tokens(Masks)) is not None
    ]
    return np.concatenate([np.empty(0, np.int32), *rows])


def _of_words_and_labels(name: str, prompts: Sequence[Prompt], bounds: Int32Array) -> Int32Array:
    if name.startswith("cu_"):
        of_words = name == "cu_words"
        return bounds_of([each.num_words if of_words else each.num_labels for each in prompts])
    rows = [np.empty(0, np.int32)]
    for begin, prompt in zip(bounds, prompts, strict=False):
        payload = prompt.payload
        if isinstance(payload, Words) and payload.tokens is not None:
            first = payload.first_word
            part = slice(first - prompt.num_labels, first)
            if name == "word_rows":
                part = slice(first, None)
            rows.append(begin + payload.tokens[part])
    return np.concatenate(rows)


def _of_instances(name: str, prompts: Sequence[Prompt], bounds: Int32Array) -> Int32Array:
    found = [
        (begin + instances[:, 0], instances[:, 1], instances[:, 2])
        for begin, prompt in zip(bounds, prompts, strict=False)
        if isinstance(prompt.payload, Words) and (instances := prompt.payload.instances).size
    ]
    column = ("task_rows", "instance_numbers", "cu_instances").index(name)
    values = np.concatenate([np.empty(0, np.int32), *(each[column] for each in found)])
    return bounds_of(values) if name == "cu_instances" else values.astype(np.int32)


def split_answers(output: Float32Array, prompts: Sequence[Prompt], rows: str) -> list[Float32Array]:
    """Return the answer of each sequence, a view of the batch's output.

    Args:
        output: `[rows, ...]`.
        rows: things with a row each: tokens, masks, pairs, pooled vectors or sequences.
    """
    if rows == "sequences" or (rows == "pooled" and not _has_spans(prompts)):
        return list(output)
    if rows == "pooled":
        return _split_pooled(output, prompts)
    counts = [_num_rows(prompt, rows) for prompt in prompts]
    return [output[begin:end] for begin, end in pairwise(bounds_of(counts).tolist())]


def _split_pooled(output: Float32Array, prompts: Sequence[Prompt]) -> list[Float32Array]:
    bounds = bounds_of([len(_pooled_parts(prompt)) for prompt in prompts]).tolist()
    return [
        output[begin] if prompt.spans is None else output[begin:end]
        for prompt, (begin, end) in zip(prompts, pairwise(bounds), strict=True)
    ]


def _num_rows(prompt: Prompt, rows: str) -> int:
    if rows == "pairs":
        return prompt.num_words * prompt.num_labels
    return prompt.num_masks if rows == "masks" else prompt.num_tokens


def bounds_of(lengths: Sequence[int] | Int32Array) -> Int32Array:
    """Return cumulative starts, then the sum: `[lengths + 1]`."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.add.accumulate(lengths, out=bounds[1:])
    return bounds


def positions_of(
    bounds: Int32Array, lengths: Sequence[int] | Int32Array, starts: Int32Array | int = 0
) -> Int32Array:
    """Return the position of each token, `[tokens]`; each row counts from its start."""
    positions = np.arange(bounds[-1], dtype=np.int32)
    positions -= (bounds[:-1] - starts).repeat(lengths)
    return positions


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step as arrays, which its runner needs and no more.

    Attributes:
        copies: `[copies, 2]`, source and destination of blocks to copy before the step.
        sources: inputs of the encoder, if source texts are encoded before the step; else empty.
        order: its number, the number of the step that it needs, or -1, the slot of its logits, and whether the engine
            reads these.
        follows: `[2, tokens]`, places of tokens that the step before chooses, and the rows of its logits.
        edits: arguments of `edit_logits`: `rows`, `penalties`, and lists if any begin; empty without edits.
        draws: arguments of `sample_tokens` by name, of them only `temperature` if all are greedy; empty if the engine
            chooses the tokens.
        beams: arguments of `follow_beams`; empty without beams.
        searches: arguments of `advance_searches`, with `rows` of the logits, `banned_rows` of these and
            `banned_tokens`, and `sizes`: candidates of a beam, all beams, and whether log probabilities are normalized
            again without banned tokens. With `later`, `[later steps, searches, 2]`, as many more steps may run, which
            have these divisors. Empty if no search takes its step here.
        drafts: `[drafted rows]`, the row of the logits that each drafted token guesses. These rows come first.
    """

    copies: Int32Array
    sources: Arrays
    inputs: Arrays
    order: Int64Array
    follows: Int32Array
    edits: Arrays
    draws: Arrays
    beams: Arrays
    searches: Arrays
    drafts: Int32Array

    @property
    def number(self) -> int:
        return int(self.order[0])

    @property
    def after(self) -> int | None:
        after = int(self.order[1])
        return None if after == _NO_STEP else after

    @property
    def slot(self) -> int:
        return int(self.order[2])

    @property
    def is_read(self) -> bool:
        """Whether the engine reads its logits: it chooses some of what follows."""
        return bool(self.order[3])

    def keep_logits(self, slot: int) -> None:
        self.order[2] = slot

    def take_tokens(self, chosen: npt.NDArray[np.integer[Any]]) -> None:
        """Set the tokens that the step before has chosen.

        Args:
            chosen: a token for each row of its logits.
        """
        places, rows = self.follows
        self.inputs["token_ids"][places] = chosen[rows]


def pack_step(
    step: Batch,
    block_size: int,
    plan: DevicePlan = _NOTHING_CHOSEN,
    adapters: Mapping[str, int] = _NO_ADAPTERS,
) -> PackedStep:
    """Return a step as arrays.

    Args:
        plan: the plan of the process that runs it.
    """
    sources = source_arrays(step.chunks, block_size)
    inputs = step_arrays(step.chunks, block_size)
    if adapters:
        sources, inputs = _with_adapters(step.chunks, adapters, sources, inputs)
    after = _NO_STEP if step.after is None else step.after
    return PackedStep(
        np.array(step.copies, np.int32).reshape(-1, 2),
        sources,
        inputs,
        np.array([step.number, after, 0, not plan.is_whole], np.int64),
        followed(step.chunks),
        {} if plan.draws is None else edit_arrays(plan.draws),
        {} if plan.draws is None else draw_arrays(plan.draws),
        beam_arrays(step.chunks),
        search_arrays(step.chunks, plan),
        draft_array(step.chunks),
    )


def _with_adapters(
    chunks: Sequence[Chunk], numbers: Mapping[str, int], sources: Arrays, inputs: Arrays
) -> tuple[Arrays, Arrays]:
    """Return the inputs of encoder and decoder with the number of each sequence's adapter."""
    of_chunks = [
        NO_SLOT if not (name := chunk.sequence.options.adapter) else numbers[name]
        for chunk in chunks
    ]
    # each beam is a row
    of_rows = np.repeat(np.array(of_chunks, np.int32), [max(1, chunk.beams) for chunk in chunks])
    if sources:
        new = [each for each, chunk in zip(of_chunks, chunks, strict=True) if chunk.encodes]
        sources = {**sources, ADAPTERS: np.array(new, np.int32)}
    return sources, {**inputs, ADAPTERS: of_rows}


def part_of_step(
    inputs: Arrays,
    copies: Int32Array = _NO_COPIES,
    sources: Arrays = _NO_SOURCES,
    order: Int64Array = _NO_ORDER,
) -> PackedStep:
    """Return the part of a step that every rank or stage of a model runs.

    Args:
        inputs: `step_arrays`.
        sources: `source_arrays`, encoded before it.
        order: see `PackedStep`.
    """
    return PackedStep(copies, sources, inputs, order, _NO_FOLLOWS, {}, {}, {}, {}, _NO_DRAFTS)


def searches_of_step(
    step: PackedStep, first: int, last: int, *, begins: bool = False
) -> PackedStep:
    """Return the part of some searches of a step that only searches take.

    Args:
        step: has a source for each search that begins, or none.
        first, last: the first of these searches, and the one after the last.
        begins: whether prompts have one row each, not one a beam.
    """
    rules, follows = step.searches, step.beams.get("searches", _NO_SEARCHES)
    searches, is_prompt = rules["searches"][first:last].copy(), rules["searches"][:, 3] == 1
    counts = np.where(is_prompt[first:last] & begins, 1, searches[:, 1])
    bounds = bounds_of(counts)
    if bounds[-1] == len(rules["rows"]):
        return step
    rows = positions_of(bounds, counts, searches[:, 0])
    has_row = np.zeros(len(rules["rows"]), np.bool_)
    has_row[rows] = True
    is_banned = has_row[rules["banned_rows"]]
    slots = slice(searches[0, 8], searches[-1, [2, 8]].sum())
    ends = slice(searches[0, 6], searches[-1, 7])
    searches[:, 0], searches[:, 1] = bounds[:-1], counts
    searches[:, 6:8] -= ends.start
    searches[:, 8] -= slots.start
    # prompts with one row follow no beams
    follows = follows[has_row[follows[:, 0]] & (follows[:, 2] >= begins)]
    beams = {}
    if len(follows):
        of_beams = slice(follows[0, 3], follows[-1, [1, 3]].sum())
        follows[:, 0] = np.searchsorted(rows, follows[:, 0])
        follows[:, 3] -= of_beams.start
        beams = {name: step.beams[name][of_beams] for name in ("beam_slots", "given")}
        beams["searches"] = follows
    sources = step.sources if last - first == len(is_prompt) else {}
    begun = np.count_nonzero(is_prompt[:first]), np.count_nonzero(is_prompt[:last])
    if step.sources and not sources and begun[0] < begun[1]:
        of_sources = step.sources["cu_seqlens"][begun[0] : begun[1] + 1]
        tokens = slice(of_sources[0], of_sources[-1])
        sources = {name: array[tokens] for name, array in step.sources.items()}
        sources["cu_seqlens"] = of_sources - of_sources[0]
    return replace(
        step,
        sources=sources,
        inputs=rows_of_step(step.inputs, rows),
        beams=beams,
        searches={
            **rules,
            "searches": searches,
            "beam_slots": rules["beam_slots"][slots],
            "divisors": rules["divisors"][first:last],
            "ends": rules["ends"][ends],
            "rows": np.arange(len(rows), dtype=np.int32),
            "banned_rows": np.searchsorted(rows, rules["banned_rows"][is_banned]).astype(np.int32),
            "banned_tokens": rules["banned_tokens"][is_banned],
        },
    )


def in_order(copies: Int32Array) -> list[Int32Array]:
    """Return copies of blocks, `[copies, 2]`, in groups that run one after another."""
    begins, read, written = [0], set[int](), set[int]()
    for place, (source, target) in enumerate(copies.tolist()):
        if source in written or target in read or target in written:
            begins.append(place)
            read, written = set(), set()
        read.add(source)
        written.add(target)
    return np.split(copies, begins[1:])


def followed(chunks: Sequence[Chunk]) -> Int32Array:
    """Return where tokens of the step before go, `[2, tokens]`.

    The first row has their places in this step, the second one the rows of its logits.
    """
    # chunks of one token, or of beams, come first
    begins = accumulate([len(chunk.token_ids) for chunk in chunks], initial=0)
    follows = [chunk.follows for chunk in chunks]
    places = [begin for begin, row in zip(begins, follows, strict=False) if row is not None]
    rows = [row for row in follows if row is not None]
    return np.array([places, rows], np.int32)


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


def draft_array(chunks: Sequence[Chunk]) -> Int32Array:
    """Return `PackedStep.drafts`."""
    if not chunks[0].drafted:
        return _NO_DRAFTS
    count = sum([bool(chunk.drafted) for chunk in chunks])
    ends = accumulate([chunk.num_logit_rows for chunk in chunks[count:]], initial=count)
    rows = {chunk.sequence: row for chunk, row in zip(chunks[count:], ends, strict=False)}
    guessed = []
    for row, chunk in enumerate(chunks[:count]):
        guessed.append(rows[chunk.sequence])
        rows[chunk.sequence] = row
    return np.array(guessed, np.int32)


def rows_of_step(inputs: Arrays, rows: Int32Array) -> Arrays:
    """Return inputs of some rows of a step that have one token each."""
    places = np.arange(len(rows) + 1, dtype=np.int32)
    own = {name: inputs[name][rows] for name in (*_OF_ROWS, "source_lens") if name in inputs}
    for name, of_blocks in _BOUNDS.items():
        if name not in inputs:
            continue
        own[name] = places
        if of_blocks:
            bounds = inputs[name]
            lengths = np.diff(bounds)[rows]
            own[name] = bounds_of(lengths)
            own[of_blocks] = inputs[of_blocks][positions_of(own[name], lengths, bounds[rows])]
    return {**own, "logit_rows": places[:-1]}


def joined_rows(steps: Sequence[Arrays]) -> Arrays:
    """Return the inputs of one step of the rows of several, each as of `rows_of_step`."""
    names = (*_OF_ROWS, "block_ids")
    joined = {name: np.concatenate([each[name] for each in steps]) for name in names}
    tables = np.concatenate([np.diff(each["cu_blocks"]) for each in steps])
    places = np.arange(len(tables) + 1, dtype=np.int32)
    bounds = {"cu_seqlens": places, "cu_blocks": bounds_of(tables)}
    return {**joined, **bounds, "logit_rows": places[:1]}


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


def step_dims(inputs: Arrays) -> Dims:
    """Return the dimensions of a step, given its inputs."""
    return {
        "tokens": len(inputs["token_ids"]),
        "sequences": len(inputs["context_lens"]),
        "blocks": len(inputs["block_ids"]),
        "source_blocks": len(inputs.get("source_block_ids", ())),
        "logit_rows": len(inputs["logit_rows"]),
    }


def step_arrays(chunks: Sequence[Chunk], block_size: int) -> Arrays:
    """Return every input that a program of a step may read, by name.

    Args:
        chunks: chunks of the step, at least one; all of them have a source text, or none has.
    """
    columns = zip(*chunks, strict=True)
    _, begins, tokens_of, blocks_of, samples_of, source_blocks, _, _, _, beams_of, _ = columns
    lengths, tables, samples = (
        np.fromiter(map(len, each), np.int32, len(chunks))
        for each in (tokens_of, blocks_of, samples_of)
    )
    starts = np.array(begins, np.int32)
    if any(beams_of):
        beams = np.array(beams_of)
        # each beam is a row with a token, a table and logits
        rows, is_search = np.maximum(beams, 1), beams > 0
        lengths = np.where(is_search, 1, lengths).astype(np.int32)
        samples = np.where(is_search, samples > 0, samples)
        lengths, starts, tables, samples = (
            np.repeat(each, rows) for each in (lengths, starts, tables // rows, samples)
        )
    bounds = bounds_of(lengths)
    table_bounds = bounds_of(tables)
    position_ids, first_blocks = starts, table_bounds[:-1]
    if bounds[-1] > len(lengths):
        position_ids = positions_of(bounds, lengths, starts)
        first_blocks = first_blocks.repeat(lengths)
    # as bytes: 64 sequences may have thousands of blocks
    block_ids = np.frombuffer(bytearray().join(blocks_of), np.int32)
    arrays: dict[str, Int32Array | Int64Array] = {
        "token_ids": flat(tokens_of, int(bounds[-1])),
        "position_ids": position_ids,
        "slots": slots_of(block_ids, first_blocks, position_ids, block_size),
        "cu_seqlens": bounds,
        "context_lens": starts + lengths,
        "block_ids": block_ids,
        "cu_blocks": table_bounds,
        "logit_rows": (bounds[1:] - 1).repeat(samples),
    }
    if source_blocks[0]:
        arrays |= _source_tables(chunks)
    return arrays


def source_arrays(chunks: Sequence[Chunk], block_size: int) -> Arrays:
    """Return every input that a program of an encoder may read, by name.

    There is none if no chunk encodes its source.
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
        "slots": slots_of(block_ids, tables[:-1].repeat(lengths), position_ids, block_size),
    }


def source_dims(arrays: Arrays) -> Dims:
    """Return the dimensions of the sources of a step, given `source_arrays`."""
    # an arena has the dimensions of all programs
    return {
        "tokens": len(arrays["token_ids"]),
        "sequences": len(arrays["cu_seqlens"]) - 1,
        "logit_rows": 0,
    }


def slots_of(
    block_ids: Int32Array, first_blocks: Int32Array, position_ids: Int32Array, block_size: int
) -> Int64Array:
    """Return the slot of each token in the KV caches: block · block_size + place.

    Args:
        block_ids: block tables of all sequences, one after another.
        first_blocks: first place of the table of each token's sequence in `block_ids`.
        position_ids: position of each token in its sequence.
    """
    columns, places = np.divmod(position_ids, block_size)
    columns += first_blocks
    blocks: Int64Array = block_ids[columns].astype(np.int64)
    blocks *= block_size
    blocks += places
    return blocks


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


def beam_arrays(chunks: Sequence[Chunk]) -> Arrays:
    """Return the arguments of `follow_beams`; nothing is given by the host. Empty without beams."""
    if not max([each.beams for each in chunks]):
        return {}
    rows: list[tuple[int, ...]] = []
    beam_slots: list[int] = []
    row = 0
    for each in chunks:
        if each.beams:
            rows.append((row, each.beams, each.num_generated, len(beam_slots)))
            beam_slots += each.beam_slots
        # a chunk of several tokens comes after all beams
        row += each.beams or 1
    return {
        "searches": np.array(rows, np.int32),
        "beam_slots": np.array(beam_slots, np.int32),
        "given": np.full((len(beam_slots), 2), NOT_GIVEN, np.int32),
    }


def search_arrays(chunks: Sequence[Chunk], plan: DevicePlan) -> Arrays:
    """Return what searches take their steps with; empty if none does."""
    if not any(plan.searches):
        return {}
    rows: list[tuple[int, ...]] = []
    ends: list[int] = []
    banned: list[Int32Array] = []
    logit_rows: list[int] = []
    divisors: list[tuple[float, float]] = []
    beam_slots: list[int] = []
    rules, logit_row, row, width = iter(plan.searches), 0, 0, 0
    for each in chunks:
        count = each.num_logit_rows
        if each.beam_slots and each.samples and (own := next(rules, None)) is not None:
            flags = IS_LAST * own.is_last | ENDS_WHEN_FULL * own.ends_when_full
            forced = NO_TOKEN if own.forced is None else own.forced
            of_ends = len(ends), len(ends) + len(own.end_ids), len(beam_slots)
            length = each.num_generated + 1
            rows.append((row, count, own.num_beams, length, flags, forced, *of_ends))
            beam_slots += each.beam_slots
            ends += own.end_ids
            divisors.append((own.divisor, own.best_divisor))
            logit_rows += range(logit_row, logit_row + count)
            banned += [own.banned] * count
            row += count
            width = max(width, own.num_beams + len(own.end_ids))
        logit_row += count
    sizes = [len(each) for each in banned]
    later = {} if plan.later is None else {"later": _divisors(plan.later)}
    width = min(-(-width // _WIDTHS) * _WIDTHS, MAX_WIDTH)
    return {
        "searches": np.array(rows, np.int32),
        "beam_slots": np.array(beam_slots, np.int32),
        "divisors": _divisors(np.array(divisors)),
        "ends": np.array(ends, np.int32),
        "rows": np.array(logit_rows, np.int32),
        "banned_rows": np.repeat(np.arange(row, dtype=np.int32), sizes),
        "banned_tokens": np.concatenate(banned),
        "sizes": np.array([width, len(beam_slots), plan.renormalizes], np.int32),
        **later,
    }


def _divisors(numbers: npt.NDArray[np.float64]) -> Float32Array:
    # fp32 holds no larger ones, and none may be 0
    return np.clip(numbers, _LEAST_DIVISOR, _LARGEST).astype(np.float32)


def begun_arrays(edits: Edits | None) -> Mapping[str, npt.NDArray[np.int32 | np.float32]]:
    """Return the lists that the host sends; empty if there are none."""
    if edits is None or not len(edits.tokens):
        return {}
    return {"tokens": edits.tokens, "counts": edits.counts, "biases": edits.biases}
