"""Requests of clients and their replies: prompts, options, request and reply."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.request.generation import GenerationOptions
from varlen.telemetry.tracing import RequestTrace

Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]


# Most masks of one row, and most answers for each.
MAX_MASKS = 8
MAX_TOP_K = 100


class Payload(Protocol):
    """What only one task reads of a prompt.

    Worker processes and the response cache know it as an array of numbers.
    """

    def numbers(self) -> Int32Array:
        """Return all of it as numbers, `[numbers]` int32."""

    @classmethod
    def of(cls, numbers: Int32Array) -> "Payload":
        """Return the payload of these `numbers()`."""


@dataclass(frozen=True, slots=True)
class Unpooled:
    """What `embed` leaves out: the first `count` tokens, which are a prompt before the text."""

    count: int

    def numbers(self) -> Int32Array:
        """Return the count."""
        return np.array([self.count], np.int32)

    @classmethod
    def of(cls, numbers: Int32Array) -> "Unpooled":
        """Return the payload of these `numbers()`."""
        return cls(int(numbers[0]))


@dataclass(frozen=True, slots=True)
class Masks:
    """What `fill_mask` predicts: the tokens at `places`, `[masks]` int32, at most MAX_MASKS."""

    places: Int32Array

    def numbers(self) -> Int32Array:
        """Return the places."""
        return self.places

    @classmethod
    def of(cls, numbers: Int32Array) -> "Masks":
        """Return the payload of these `numbers()`."""
        return cls(numbers)


@dataclass(frozen=True, slots=True)
class Vectors:
    """Which vectors `token_embed` returns, and what they depend on.

    Attributes:
        num_keys: the number of tokens, from the first, that other tokens read; None is all.
        places: `[vectors]` int32, the tokens whose vectors are returned, ascending; None is all.
    """

    num_keys: int | None = None
    places: Int32Array | None = None

    def numbers(self) -> Int32Array:
        """Return the number of keys, whether there are places, and these."""
        num_keys = -1 if self.num_keys is None else self.num_keys
        head = np.array([num_keys, self.places is not None], np.int32)
        return head if self.places is None else np.concatenate([head, self.places])

    @classmethod
    def of(cls, numbers: Int32Array) -> "Vectors":
        """Return the payload of these `numbers()`."""
        num_keys, has_places = numbers[:2].tolist()
        return cls(None if num_keys < 0 else num_keys, numbers[2:] if has_places else None)


@dataclass(frozen=True, slots=True)
class Source:
    """The text that `translate` reads, `[tokens]` int32; the prompt is how each answer begins."""

    token_ids: Int32Array

    def numbers(self) -> Int32Array:
        """Return the tokens."""
        return self.token_ids

    @classmethod
    def of(cls, numbers: Int32Array) -> "Source":
        """Return the payload of these `numbers()`."""
        return cls(numbers)


# A payload is sent and stored with its place here.
PAYLOADS: tuple[type[Payload], ...] = (Unpooled, Masks, Vectors, Source)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The checked tokens of one row of a request.

    Attributes:
        token_ids: `[tokens]` int32, at least one.
        type_ids: `[tokens]` int32, or None for all zero.
        payload: what only the task of the model reads, if there is anything.
    """

    token_ids: Int32Array
    type_ids: Int32Array | None = None
    payload: Payload | None = None

    @property
    def num_vectors(self) -> int:
        """Rows of its answer, where tokens have a row each."""
        places = self.payload.places if isinstance(self.payload, Vectors) else None
        return self.num_tokens if places is None else len(places)

    @property
    def num_masks(self) -> int:
        """Number of tokens to predict."""
        return len(self.payload.places) if isinstance(self.payload, Masks) else 0

    @property
    def source_ids(self) -> Int32Array | None:
        """`[tokens]` int32, the text that a translation reads."""
        return self.payload.token_ids if isinstance(self.payload, Source) else None

    @property
    def num_source_tokens(self) -> int:
        """Length of the source text in tokens; 0 without one."""
        return len(self.payload.token_ids) if isinstance(self.payload, Source) else 0

    @property
    def num_tokens(self) -> int:
        """Length in tokens, with the source text."""
        return len(self.token_ids) + self.num_source_tokens


# One token, which every vocabulary has.
SHORTEST_PROMPT = Prompt(np.zeros(1, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Checked options of a request, the same for all its prompts.

    Attributes:
        normalize: whether embeddings are divided by their length.
        priority: 0 to 9; higher runs sooner.
        deadline_seconds: seconds from arrival after which the answer is useless; None if there is no deadline.
        generation: how tokens are generated; None for tasks that generate none.
    """

    normalize: bool = False
    priority: int = 0
    deadline_seconds: float | None = None
    generation: GenerationOptions | None = None

    def deadline(self, arrival: float) -> float:
        """Return the time after which an answer is useless; infinity if there is none."""
        return math.inf if self.deadline_seconds is None else arrival + self.deadline_seconds


DEFAULT_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request: one or many prompts with their options.

    Attributes:
        prompts, options: what runs, and how.
        arrival: when it came, in seconds of the engine's clock; None if it comes when it is submitted.
        trace: gets the times of the request, if it is traced.
    """

    prompts: tuple[Prompt, ...]
    options: RequestOptions = DEFAULT_OPTIONS
    arrival: float | None = None
    trace: RequestTrace | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(prompt.num_tokens for prompt in self.prompts)

    def arrived(self, now: float) -> float:
        """Return when it came, if it is submitted now."""
        return now if self.arrival is None else self.arrival

    def deadline(self, now: float) -> float:
        """Return the time after which its answer is useless; infinity if there is none."""
        return self.options.deadline(self.arrived(now))


FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one generated token, before temperature, penalties and limits.

    Attributes:
        token_id, logprob: of the token that was chosen.
        top: the most likely tokens and theirs, the most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GeneratedPart:
    """A part of a generated answer.

    Attributes:
        text: the next part of the text, in whole characters.
        token_ids: the tokens that were generated since the last part.
        logprobs: one per token, if the request asks for them.
        finish_reason: set in the last part: a stop condition held, or `max_tokens` was reached.
        score: of an answer that a beam search has found, which comes in one part.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    score: float | None = None


Output: TypeAlias = Float32Array | GeneratedPart


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
