"""The state of a sampler for one sequence, from token to token."""

import logging
import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from varlen.decoding.grammar.compiled_grammar import BoolArray, Matcher
from varlen.decoding.grammar.grammars import Grammars
from varlen.decoding.sampling.edit_list import EditList
from varlen.decoding.sampling.random_numbers import random_key
from varlen.decoding.sampling.token_bias import NOTHING_FORBIDDEN, BadWords
from varlen.errors import EngineError, RequestError, VarlenError
from varlen.request.request import Int32Array
from varlen.scheduling.sequence import GeneratedSequence

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
        """Whether its choices depend on the tokens of the answer."""
        return self.has_penalties or bool(self.forbidden.after) or self.matcher is not None

    def num_early_ends(self, length: int) -> int:
        """Return the number of end tokens that are banned at this length.

        Args:
            length: number of tokens of the answer.
        """
        return len(self.end_ids) if length < self.min_tokens else 0

    def banned(self, length: int) -> list[int]:
        """Return last tokens of words that may not come now."""
        size = min(length, self.forbidden.longest)
        return self.forbidden.next(self.token_ids[len(self.token_ids) - size :])

    def begin_edits(self, sequence: GeneratedSequence, length: int) -> tuple[EditList, bool]:
        """Return its edit list, and whether the device has to add the last token.

        Args:
            sequence: its sequence, whose last token is perhaps known only to the device.
        """
        edits = self._new_edits(sequence)
        if not self.has_penalties:
            return edits, False
        known = sequence.token_ids[sequence.num_tokens : sequence.num_tokens + length]
        for token_id in known:
            edits.add(token_id)
        return edits, len(known) < length

    def _new_edits(self, sequence: GeneratedSequence) -> EditList:
        # only a repetition penalty is for tokens of the prompt too
        if self._prompt_ids is None:
            has_repetition = self.penalties[0] != 1
            prompt_ids = sequence.token_ids[: sequence.num_tokens] if has_repetition else ()
            self._prompt_ids = np.unique(np.array(prompt_ids, np.int32))
        return EditList(self.end_ids if self.min_tokens else (), self.biases, self._prompt_ids)

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
