"""Requests of clients and their replies: prompts, options, drafts, request and reply.

A draft is checked where that is cheap, and the rest is split into tasks: texts of other requests are tokenized between
the tasks of a large one. A probe is a tiny request that asks whether this replica takes work. It runs for real. It is
admitted to a full queue, since a replica that has much to do is not broken: otherwise all replicas would be taken out
of service together. A full queue admits a bounded number of probes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError
from varlen.request.generation import GenerationOptions
from varlen.tasks import Task
from varlen.telemetry.tracing import RequestTrace

Bytes: TypeAlias = npt.NDArray[np.uint8]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]


# Most masks of one row, and most answers for each.
MAX_MASKS = 8
MAX_TOP_K = 100
# Numbers before the values of each output: its dimensions, as bits of fp32; an absent one is -1.
_DIMENSIONS = 2
_ABSENT = -1
# Most spans that a token is in, on average over the tokens of a sequence.
MAX_SPAN_SHARE = 8


@dataclass(frozen=True, slots=True)
class Payload:
    """The part of a prompt that only one task reads; its class says which.

    Attributes:
        tokens: `[tokens]` int32, tokens by place, ascending, or by id.
        count: a number of tokens, from the first.
    """

    tokens: Int32Array | None = None
    count: int | None = None


class Masks(Payload):
    """The places of the tokens that `fill_mask` predicts, at most MAX_MASKS."""


class Vectors(Payload):
    """The places of the vectors that `token_embed` returns; None is all.

    Other tokens read `count` tokens; None is all.
    """


class Unpooled(Payload):
    """The count of tokens that `embed` does not pool."""


class Spans(Payload):
    """The first token of each span that `embed` pools, then the first behind each."""


class Words(Payload):
    """The places of labels, then of words that `extract` scores.

    Before them, `tokens` has the number of instances of a schema, and of each the place of its task, its number and how
    many labels it has. `count` is the number of labels of all instances.
    """

    @property
    def instances(self) -> Int32Array:
        """Place of the task, number and number of labels of each instance, `[instances, 3]`."""
        assert self.tokens is not None
        return self.tokens[1 : 1 + 3 * self.tokens[0]].reshape(-1, 3)

    @property
    def first_word(self) -> int:
        """Index of the place of the first word in `tokens`."""
        return 1 + self.instances.size + (self.count or 0)

    @classmethod
    def at(
        cls,
        labels: Int32Array,
        words: Int32Array,
        instances: Sequence[tuple[int, int, int]] = (),
    ) -> "Words":
        head = np.array([len(instances), *chain.from_iterable(instances)], np.int32)
        return cls(np.concatenate([head, labels, words], dtype=np.int32), len(labels))


class ApartLabels(Words):
    """Labels that another encoder reads, and the places of words that `extract` scores.

    `tokens` has the length of each label, the token ids of all labels, then the places; `count` is as in `Words`.
    """

    @property
    def instances(self) -> Int32Array:
        return np.empty((0, 3), np.int32)

    @property
    def first_word(self) -> int:
        assert self.tokens is not None
        return (self.count or 0) + int(self.tokens[: self.count].sum())

    @property
    def labels(self) -> list[Int32Array]:
        """Token ids of each label."""
        assert self.tokens is not None
        count = self.count or 0
        ends = count + np.cumsum(self.tokens[:count])
        return np.split(self.tokens[: self.first_word], [count, *ends[:-1]])[1:]

    @classmethod
    def of(cls, labels: Sequence[Int32Array], places: Int32Array) -> "ApartLabels":
        lengths = np.array([len(each) for each in labels], np.int32)
        return cls(np.concatenate([lengths, *labels, places], dtype=np.int32), len(labels))


class Terms(Payload):
    """The prompt is no sequence of a model: its tokens are looked up by `sparse_embed`."""


class Source(Payload):
    """The ids of the text that `translate` reads; its prompt is how each answer begins."""


# Worker processes send the index of a payload's type in this tuple.
PAYLOADS = (Payload, Masks, Vectors, Unpooled, Spans, Words, ApartLabels, Terms, Source)
_NOTHING = Payload()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The checked tokens of one row of a request.

    Attributes:
        token_ids: `[tokens]` int32, at least one.
        type_ids: `[tokens]` int32, or None for all zero.
        payload: part that only the task of the model reads.
        num_source_tokens: length of the source text; 0 without one.
        num_tokens: length with the source text.
    """

    token_ids: Int32Array
    type_ids: Int32Array | None = None
    payload: Payload = _NOTHING
    num_source_tokens: int = field(init=False, repr=False, compare=False)
    num_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        source = self.payload_tokens(Source)
        count = 0 if source is None else len(source)
        object.__setattr__(self, "num_source_tokens", count)
        object.__setattr__(self, "num_tokens", count + len(self.token_ids))

    def payload_tokens(self, kind: type[Payload]) -> Int32Array | None:
        """Return the tokens of its payload, if it is of this kind."""
        return self.payload.tokens if type(self.payload) is kind else None

    def payload_count(self, kind: type[Payload]) -> int | None:
        """Return the count of its payload, if it is of this kind."""
        return self.payload.count if type(self.payload) is kind else None

    @property
    def num_vectors(self) -> int:
        """Rows of its answer, where tokens have a row each."""
        places = self.payload_tokens(Vectors)
        return self.num_tokens if places is None else len(places)

    @property
    def spans(self) -> list[tuple[int, int]] | None:
        """First token of each span, and the first behind it; None without spans."""
        places = self.payload_tokens(Spans)
        if places is None:
            return None
        begins, ends = places.reshape(2, -1).tolist()
        return list(zip(begins, ends, strict=True))

    @property
    def num_masks(self) -> int:
        places = self.payload_tokens(Masks)
        return 0 if places is None else len(places)

    @property
    def num_labels(self) -> int:
        return (isinstance(self.payload, Words) and self.payload.count) or 0

    @property
    def num_instances(self) -> int:
        return len(self.payload.instances) if isinstance(self.payload, Words) else 0

    @property
    def num_words(self) -> int:
        payload = self.payload
        if not isinstance(payload, Words) or payload.tokens is None:
            return 0
        return len(payload.tokens) - payload.first_word


# One token, which every vocabulary has.
SHORTEST_PROMPT = Prompt(np.zeros(1, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Checked options of a request, the same for all its prompts.

    Attributes:
        normalize: whether embeddings are divided by their length.
        outputs: tasks whose outputs it asks for, in this order; none is the output of the model's own task.
        priority: 0 to 9; higher runs sooner.
        deadline_seconds: seconds from arrival after which the answer is useless; None if there is no deadline.
        generation: options of generation; None for tasks that generate none.
        tenant: name of the client that shares the server equally with others; requests without one share a part.
        cache_salt: text that separates the cache entries of callers.
        streams: whether the client reads each token as it comes.
        probe: whether the request only asks if this replica takes work, see `request.probe`.
        adapter: name of the adapter that changes the model for it; empty for none.
        cache_scope: text that separates cache entries: the salt, and the adapter.
    """

    normalize: bool = False
    outputs: tuple[Task, ...] = ()
    priority: int = 0
    deadline_seconds: float | None = None
    generation: GenerationOptions | None = None
    tenant: str = ""
    cache_salt: str = ""
    streams: bool = False
    probe: bool = False
    adapter: str = ""
    cache_scope: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # a name of an adapter has no NUL
        scope = f"{self.adapter}\0{self.cache_salt}" if self.adapter or self.cache_salt else ""
        object.__setattr__(self, "cache_scope", scope)

    def deadline(self, arrival: float) -> float:
        """Return the time after which an answer is useless; infinity if there is none."""
        return math.inf if self.deadline_seconds is None else arrival + self.deadline_seconds


DEFAULT_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request: one or many prompts with their options.

    Attributes:
        arrival: arrival time, in seconds of the engine's clock; None is the time of submission.
        trace: gets the times of the request, if it is traced.
    """

    prompts: tuple[Prompt, ...]
    options: RequestOptions = DEFAULT_OPTIONS
    arrival: float | None = None
    trace: RequestTrace | None = None
    num_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum([prompt.num_tokens for prompt in self.prompts]))

    def arrived(self, now: float) -> float:
        """Return when it came, if it is submitted now."""
        return now if self.arrival is None else self.arrival

    def deadline(self, now: float) -> float:
        return self.options.deadline(self.arrived(now))


FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one generated token, before temperature, penalties and limits.

    Attributes:
        token_id, logprob: token id and logprob of the token that was chosen.
        top: the most likely tokens and theirs, the most likely first.
        token_bytes: UTF-8 that the token adds to the text: part of a character, or nothing for an end token.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    token_bytes: bytes = b""


# Makes a named tuple of all its fields in half the time that its class takes.
new_tuple = tuple.__new__


class GeneratedPart(NamedTuple):
    """A part of a generated answer; a tuple, as `Chunk` is one.

    Attributes:
        text: the next part of the text, in whole characters.
        token_ids: the tokens that were generated since the last part.
        logprobs: one per token, if the request asks for them.
        finish_reason: set in the last part: a stop condition held, or `max_tokens` was reached.
        score: score of an answer that a beam search has found, which comes in one part.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    score: float | None = None


Output: TypeAlias = Float32Array | GeneratedPart


def join_outputs(outputs: Sequence[Float32Array]) -> Float32Array:
    """Return several outputs of a sequence as one array, `[numbers]` fp32.

    So they travel, and are stored, as one output is.

    Args:
        outputs: arrays of one or two dimensions.
    """
    parts: list[Float32Array] = []
    for output in outputs:
        shape = [*output.shape, *[_ABSENT] * (_DIMENSIONS - output.ndim)]
        parts += [np.array(shape, np.int32).view(np.float32), output.reshape(-1)]
    return np.concatenate(parts, dtype=np.float32)


def split_outputs(joined: Float32Array) -> list[Float32Array]:
    """Return the outputs of `join_outputs`, views of it, in their order."""
    outputs, begin = [], 0
    while begin < len(joined):
        shape = joined[begin : begin + _DIMENSIONS].view(np.int32).tolist()
        shape = [size for size in shape if size != _ABSENT]
        begin += _DIMENSIONS
        end = begin + math.prod(shape)
        outputs.append(joined[begin:end].reshape(shape))
        begin = end
    return outputs


class Reply(Protocol):
    """Where the answer of a request goes: parts, then exactly one `finish` or `fail`.

    If `send` or `finish` raises, `fail` is called.
    """

    def is_cancelled(self) -> bool:
        """Return whether the client has gone away. Not called after `finish` or `fail`."""

    def send(self, row: int, output: Output) -> None:
        """Take the output of a sequence, or its next part, by its row."""

    def finish(self) -> None:
        """End the answer: every part has been sent."""

    def fail(self, error: Exception) -> None:
        """End the answer with an error; parts sent before it do not count."""


# Probes that a full queue admits.
_ADMITTED = 4
# A prompt template of a reranker has more than a hundred tokens.
MAX_PROBE_TOKENS = 256
MAX_PROBE_BYTES = 1024
_MAX_NEW_TOKENS = 4


def check_probe(request: Request) -> None:
    """Refuse a probe that asks for more than a tiny answer.

    Raises:
        RequestError: the request is a probe with several rows, a long prompt, or more than 4 tokens to generate.
    """
    if not request.options.probe:
        return
    tokens = request.num_tokens
    if len(request.prompts) != 1 or tokens > MAX_PROBE_TOKENS:
        raise RequestError(
            f"the probe has {len(request.prompts)} rows and {tokens} tokens;"
            f" send one row of at most {MAX_PROBE_TOKENS} tokens"
        )
    generation = request.options.generation
    if generation is not None and generation.max_tokens > _MAX_NEW_TOKENS:
        raise RequestError(
            f"the probe has max_tokens {generation.max_tokens}; send at most {_MAX_NEW_TOKENS}"
        )


def reserve(options: RequestOptions, each: int) -> int:
    """Return by how much a limit on queued work is larger for a request.

    Args:
        each: share of one probe in what the limit counts.
    """
    return _ADMITTED * each if options.probe else 0


# Rows of short texts that are tokenized in one step have about this many bytes; a longer text is a step of its own.
_STEP_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TokenizationTask:
    """Tokenizes some rows of a request, or prepares an option of it.

    Attributes:
        num_bytes: length of the texts in UTF-8, as a measure of the work.
        run: function that returns the prompts of these rows, perhaps none; raises RequestError.
        wait: function that waits, at most some seconds, for work of a process, and returns whether the task can run.
    """

    num_bytes: int
    run: Callable[[], tuple[Prompt, ...]]
    wait: Callable[[float], bool] = lambda _: True


@dataclass(frozen=True, slots=True)
class Draft:
    """A request whose texts are checked, but not tokenized.

    Attributes:
        num_bytes: length of the texts in UTF-8; 0 if no work is left.
    """

    steps: tuple[TokenizationTask, ...]
    options: RequestOptions
    num_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", sum([step.num_bytes for step in self.steps]))

    @classmethod
    def of_prompts(cls, prompts: tuple[Prompt, ...], options: RequestOptions) -> "Draft":
        """Return the draft of a request that came with token ids."""
        return cls((TokenizationTask(0, lambda: prompts),), options)

    def and_then(self, step: TokenizationTask) -> "Draft":
        return replace(self, steps=(*self.steps, step))

    def complete(self) -> Request:
        """Run every task, and return the request.

        Raises:
            RequestError: the request cannot be served.
        """
        prompts = tuple(prompt for step in self.steps for prompt in step.run())
        return Request(prompts, self.options)


def steps_of(
    sizes: Sequence[int], run: Callable[[range], tuple[Prompt, ...]]
) -> tuple[TokenizationTask, ...]:
    """Return the steps of rows: short texts share one.

    Args:
        sizes: length of each row in UTF-8.
        run: does the work of some rows, and returns their prompts; raises RequestError.
    """
    steps = []
    begin = num_bytes = 0
    for end, size in enumerate(sizes, start=1):
        num_bytes += size
        if num_bytes >= _STEP_BYTES or end == len(sizes):
            steps.append(TokenizationTask(num_bytes, partial(run, range(begin, end))))
            begin, num_bytes = end, 0
    return tuple(steps)
