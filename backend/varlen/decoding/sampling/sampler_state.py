"""The state of a sampler for one sequence: its edit list and its random numbers.

Edit lists are as `reference.logit_edits` takes them. A random number depends only on the seed, the sample and the
position in the answer, so a sequence that is computed again continues as before, whatever runs beside it.
Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators" (SplitMix64).
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.decoding.grammar.compiled_grammar import BoolArray, Matcher
from varlen.decoding.grammar.grammars import Grammars
from varlen.decoding.token_edits import NOTHING_FORBIDDEN, BadWords
from varlen.errors import EngineError, RequestError, VarlenError
from varlen.request.request import Float32Array, Int32Array
from varlen.scheduling.batch import GeneratedSequence
from varlen.scheduling.device_plan import Edits
from varlen_kernels.reference.logit_edits import EDIT_COLUMNS, KEPT, NO_BIAS, UNSEEN


class EditList:
    """The edit list of one sequence: end tokens, then biased tokens, then others."""

    def __init__(
        self,
        end_ids: Sequence[int],
        biases: Mapping[int, float],
        prompt_ids: Int32Array,
        answer: Sequence[int] = (),
    ) -> None:
        """Start with the tokens of an answer.

        Args:
            end_ids: distinct tokens that end the answer, if they may come too early.
            biases: number that is added to the logit of a token; -inf bans it.
            prompt_ids: distinct tokens of the prompt, if penalties are for them too; else none.
        """
        first = np.array([*dict.fromkeys((*end_ids, *biases))], np.int32)
        chosen, numbers = np.unique(np.array(answer, np.int32), return_counts=True)
        others = np.union1d(prompt_ids, chosen)
        others = others[~np.isin(others, first)]
        size = len(first) + len(others)
        self._size = size
        # made where a token is added: many lists are only sent
        self._index: dict[int, int] | None = None
        self._tokens, self._counts = np.zeros((2, size + 64), np.int32)
        self._biases = np.full(size + 64, NO_BIAS, np.float32)
        self._tokens[:size] = np.concatenate((first, others))
        self._counts[: len(first)] = np.where(np.isin(first, prompt_ids), 0, UNSEEN)
        index_of = {token: index for index, token in enumerate(first.tolist())}
        for token, bias in biases.items():
            self._biases[index_of[token]] = bias
        order = np.argsort(self._tokens[:size])
        at = np.searchsorted(self._tokens[:size], chosen, sorter=order)
        self._counts[order[at]] = numbers

    @property
    def arrays(self) -> tuple[Int32Array, Int32Array, Float32Array]:
        """Tokens, counts and biases, as `EditLists` has them."""
        size = self._size
        return self._tokens[:size], self._counts[:size], self._biases[:size]

    def add(self, token_id: int) -> None:
        if self._index is None:
            tokens = self._tokens[: self._size].tolist()
            self._index = {token: index for index, token in enumerate(tokens)}
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = self._size
            if index == len(self._tokens):
                self._grow()
            self._tokens[index] = token_id
            self._size += 1
        self._counts[index] = max(self._counts[index], 0) + 1

    def _grow(self) -> None:
        nothing = np.zeros_like(self._tokens)
        self._tokens = np.concatenate((self._tokens, nothing))
        self._counts = np.concatenate((self._counts, nothing))
        self._biases = np.concatenate((self._biases, np.full_like(self._biases, NO_BIAS)))


class EditedRow(NamedTuple):
    """A row of logits that is edited.

    Attributes:
        slot: slot of its list on the device, or NO_SLOT.
        is_added: whether the token of the step is added to the list first.
        num_banned: number of first tokens of the list that are banned.
        penalties: repetition, presence and frequency penalty.
        begun: its list; None if the device has it.
    """

    row: int
    slot: int
    is_added: bool
    num_banned: int
    penalties: tuple[float, float, float]
    begun: EditList | None


def edits_of(rows: Sequence[EditedRow]) -> Edits:
    """Return edited rows as arrays."""
    table = np.empty((len(rows), EDIT_COLUMNS), np.int32)
    lists: list[tuple[Int32Array, Int32Array, Float32Array]] = [
        (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))
    ]
    end = 0
    for columns, each in zip(table, rows, strict=True):
        bounds = KEPT, KEPT
        if each.begun is not None:
            lists.append(each.begun.arrays)
            bounds = end, end + len(lists[-1][0])
            end = bounds[1]
        columns[:] = each.row, each.slot, each.is_added, each.num_banned, *bounds
    penalties = np.array([each.penalties for each in rows], np.float32)
    return Edits(table, penalties, *(np.concatenate(parts) for parts in zip(*lists, strict=True)))


_log = logging.getLogger(__name__)

_CHOICE_FAILED = "no token could be chosen for this request; the server's log says why"


class SamplerState:
    """The state of the sampler for a sequence.

    Attributes:
        is_drawn: whether the device can choose its tokens: they depend only on the logits, its options, random numbers
            and the tokens before.
        edited_until: number of generated tokens from which no logit changes before the choice; perhaps infinity.
        limits: temperature, top-k, top-p and min-p.
        penalties: repetition, presence and frequency penalty.
        most_edits: upper bound of the length of its edit list.
        biases: numbers that are added to logits by token; -inf bans a token.
        edits: its edit list, if the host has edited its logits.
        matcher: its position in its grammar, if it has one.
        allowed: tokens that its grammar allows next, `[vocabulary]`; None without one, or while it is not known.
        token_ids: tokens of the prompt and of the answer so far, where the choice depends on them.
        is_void: whether no token is wanted: the sequence has ended, or the token before could not be chosen.
        has_waited: whether a step has waited for its mask in vain.
        error: reason why no token can be chosen; it ends this sequence and no other.
    """

    __slots__ = (
        "__weakref__",
        "_chosen",
        "_num_read",
        "_prompt_ids",
        "allowed",
        "biases",
        "edited_until",
        "edits",
        "end_ids",
        "error",
        "forbidden",
        "has_waited",
        "is_drawn",
        "is_void",
        "key",
        "limits",
        "matcher",
        "max_tokens",
        "min_tokens",
        "most_edits",
        "num_logprobs",
        "penalties",
        "temperature",
        "token_ids",
    )

    def __init__(
        self,
        sequence: GeneratedSequence,
        end_ids: Sequence[int],
        grammars: Grammars,
        bad_words: BadWords,
    ) -> None:
        options = sequence.generation
        self.end_ids = end_ids
        self.temperature = options.temperature
        self.limits = (options.temperature, options.top_k, options.top_p, options.min_p)
        self.min_tokens, self.max_tokens = options.min_tokens, options.max_tokens
        self.num_logprobs = options.logprobs
        seed = secrets.randbits(64) if options.seed is None else options.seed
        self.key = random_key(seed, sequence.sample)

        self.penalties = (
            options.repetition_penalty,
            options.presence_penalty,
            options.frequency_penalty,
        )
        self.edits: EditList | None = None
        self.matcher: Matcher | None = None
        self.allowed: BoolArray | None = None
        self.has_waited = False
        self.error: VarlenError | None = None
        if options.grammar is not None:
            with self.guard():
                self.matcher = grammars.matcher(options.grammar)
        self.biases, self.forbidden = dict(options.logit_bias), NOTHING_FORBIDDEN
        if options.bad_words:
            with self.guard():
                self.forbidden = bad_words.forbidden(options.bad_words)
                self.biases |= dict.fromkeys(self.forbidden.always, -math.inf)
        self.token_ids: list[int] = []
        self.is_void = False
        self._num_read = sequence.num_tokens
        # the number of tokens of the answer before the last token that was chosen, and that token
        self._chosen = (-1, 0)
        self._prompt_ids: Int32Array | None = None
        self.is_drawn = (
            self.matcher is None
            and not self.forbidden.after
            and self.num_logprobs is None
            # only `sample` reports it
            and self.error is None
        )
        self.edited_until = math.inf if self.has_penalties or self.biases else self.min_tokens
        self.most_edits = len(end_ids) + len(self.biases) + sequence.num_tokens + options.max_tokens

    @property
    def has_penalties(self) -> bool:
        """Whether its logits depend on how often its answer has each token."""
        return self.penalties != (1.0, 0.0, 0.0)

    @property
    def _needs_tokens(self) -> bool:
        return self.has_penalties or bool(self.forbidden.after) or self.matcher is not None

    def num_early_ends(self, length: int) -> int:
        return len(self.end_ids) if length < self.min_tokens else 0

    def banned(self, length: int) -> list[int]:
        size = min(length, self.forbidden.longest)
        return self.forbidden.next(self.token_ids[len(self.token_ids) - size :])

    def begin_edits(
        self, sequence: GeneratedSequence, length: int, drafted: Sequence[int] = ()
    ) -> tuple[EditList, bool]:
        """Return its edit list, and whether the device has to add the last token.

        Args:
            sequence: its sequence, whose last token is perhaps known only to the device.
            drafted: guesses of its last tokens.
        """
        if not self.has_penalties:
            return self._new_edits(sequence), False
        begin, end = sequence.num_tokens, sequence.num_tokens + length - len(drafted)
        known = [*sequence.token_ids[begin:end], *drafted]
        return self._new_edits(sequence, known), len(known) < length

    def _new_edits(self, sequence: GeneratedSequence, answer: Sequence[int] = ()) -> EditList:
        # only a repetition penalty is for tokens of the prompt too
        if self._prompt_ids is None:
            has_repetition = self.penalties[0] != 1
            prompt_ids = sequence.token_ids[: sequence.num_tokens] if has_repetition else ()
            self._prompt_ids = np.unique(np.array(prompt_ids, np.int32))
        ends = self.end_ids if self.min_tokens else ()
        return EditList(ends, self.biases, self._prompt_ids, answer)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Return a context that turns an exception into the error of this sequence."""
        try:
            yield
        except VarlenError as error:
            self._fail(error.with_traceback(None))
        except BaseException:
            # also a panic of a library, which is no Exception
            _log.exception("choosing a token failed; its request fails")
            self._fail(EngineError(_CHOICE_FAILED))

    @property
    def is_pending(self) -> bool:
        return self.matcher is not None and self.allowed is None and not self.is_void

    def read_mask(self) -> None:
        """Set the tokens that its grammar allows next, if its mask has come."""
        if self.matcher is not None:
            self.allowed = self.matcher.allowed_tokens()
            if self.allowed is not None and not self.allowed.any():
                raise RequestError(
                    "structured_outputs cannot be served: no token of this model can go on with the answer"
                )

    def expect(self, token_id: int, length: int) -> None:
        """Remember a chosen token, and start to compute the mask of the next step."""
        self._chosen = length, token_id
        if self.matcher is None:
            return
        self.allowed, self.has_waited = None, False
        if length + 1 < self.max_tokens and token_id not in self.end_ids:
            self.matcher.expect(token_id)

    def read(self, sequence: GeneratedSequence, length: int) -> None:
        """Read the tokens that have been generated since the last call."""
        self.is_void = sequence.status == "finished"
        if self.is_void:
            return
        if self.edits is None and length < self.edited_until:
            self.edits = self._new_edits(sequence)
        if not self._needs_tokens:
            return
        begin, tokens = sequence.num_tokens, sequence.token_ids
        # the engine's thread may append the last token meanwhile
        known = len(tokens) - begin
        is_known = known == length or (known, self._chosen[0]) == (length - 1, length - 1)
        self.is_void = not is_known
        if self.is_void:
            return
        self.token_ids = tokens if known == length else [*tokens[: begin + known], self._chosen[1]]
        if self.matcher is not None:
            self.matcher.advance(self.token_ids, begin)
        if self.has_penalties and self.edits is not None:
            for token_id in self.token_ids[self._num_read :]:
                self.edits.add(token_id)
            self._num_read = begin + length

    def _fail(self, error: VarlenError) -> None:
        self.error = error
        self.matcher = None
        self.allowed = None


_GAMMA = 0x9E37_79B9_7F4A_7C15
_MULTIPLIERS = (0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
_MASK = 2**64 - 1


def random_key(seed: int, sample: int) -> int:
    """Return the key of the numbers of one sequence, of 64 bits.

    Args:
        seed: seed of its request, 64 bits, signed or not.
        sample: its number among the samples of its prompt.
    """
    key = _mix(np.array([seed & _MASK], dtype=np.uint64))
    return int(_mix(key + np.uint64(sample))[0])


def uniform_numbers(keys: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return a number from 0 to below 1 for each key and position, `[keys]` fp64."""
    counter = np.array(positions, dtype=np.uint64) * np.uint64(_GAMMA)
    bits = _mix(np.array(keys, dtype=np.uint64) + counter)
    return (bits >> np.uint64(11)) * 2.0**-53


def uniform_range(key: int, first: int, count: int) -> npt.NDArray[np.float64]:
    """Return the numbers of `count` positions from `first` on, `[count]` fp64."""
    counter = np.arange(first, first + count, dtype=np.uint64) * np.uint64(_GAMMA)
    bits = _mix(np.array([key], dtype=np.uint64) + counter)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each value; arrays wrap around at 64 bits."""
    values = values + np.uint64(_GAMMA)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(multiplier)
    return values ^ (values >> np.uint64(31))
