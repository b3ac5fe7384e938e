"""What a sampler keeps of one sequence, from token to token."""

import logging
import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from varlen.decoding.grammar_matcher import BoolArray, Matcher
from varlen.decoding.grammars import Grammars
from varlen.decoding.random_numbers import random_key
from varlen.decoding.token_bias import BadWords, TokenBias
from varlen.decoding.token_counts import TokenCounts
from varlen.errors import EngineError, RequestError, VarlenError
from varlen.scheduling.sequence import GeneratedSequence

_log = logging.getLogger(__name__)

_CHOICE_FAILED = "no token could be chosen for this request; the server's log says why"


class SamplerState:
    """What the sampler keeps of a sequence.

    Attributes:
        plain_from: number of generated tokens from which the next token is that with the largest logit; infinity if it
            never is.
        drawn_from: number of generated tokens from which the next token depends only on the logits, the limits and a
            random number; infinity if it never does.
        key: key of its random numbers.
        limits: temperature, top-k, top-p and min-p.
        penalties: repetition, presence and frequency penalty.
        end_ids: tokens that end its answer.
        counts: its tokens, if it has penalties.
        bias: changes of its logits by `logit_bias` and `bad_words`, if it has any.
        matcher: its place in its grammar, if it has one.
        allowed: tokens that its grammar allows next, `[vocabulary]`; None without one, or while it is not known.
        token_ids: tokens of the prompt and of the answer so far, where the choice depends on them.
        is_void: whether no token is wanted: the sequence has ended, or the token before could not be chosen.
        has_waited: whether a step has waited for its mask in vain.
        max_tokens: most tokens of its answer.
        error: reason why no token can be chosen; it ends this sequence and no other.
    """

    __slots__ = (
        "_chosen",
        "_num_read",
        "allowed",
        "bias",
        "counts",
        "drawn_from",
        "end_ids",
        "error",
        "has_waited",
        "is_void",
        "key",
        "limits",
        "matcher",
        "max_tokens",
        "min_tokens",
        "num_logprobs",
        "penalties",
        "plain_from",
        "temperature",
        "token_ids",
    )

    def __init__(
        self, sequence: GeneratedSequence, grammars: Grammars, bad_words: BadWords
    ) -> None:
        options = sequence.generation
        self.end_ids: list[int] = []
        self.temperature = options.temperature
        self.limits = (options.temperature, options.top_k, options.top_p, options.min_p)
        self.min_tokens, self.max_tokens = options.min_tokens, options.max_tokens
        self.num_logprobs = options.logprobs
        seed = secrets.randbits(64) if options.seed is None else options.seed
        self.key = random_key(seed, sequence.sample)

        repetition = options.repetition_penalty
        self.penalties = (repetition, options.presence_penalty, options.frequency_penalty)
        self.counts: TokenCounts | None = None
        if self.penalties != (1.0, 0.0, 0.0):
            # only a repetition penalty is for tokens of the prompt too
            prompt_ids = [] if repetition == 1 else sequence.token_ids[: sequence.num_tokens]
            self.counts = TokenCounts(prompt_ids)
        self.matcher: Matcher | None = None
        self.allowed: BoolArray | None = None
        self.has_waited = False
        self.error: VarlenError | None = None
        if options.grammar is not None:
            with self.guard():
                self.matcher = grammars.matcher(options.grammar)
        self.bias: TokenBias | None = None
        if options.logit_bias or options.bad_words:
            with self.guard():
                self.bias = TokenBias(options.logit_bias, bad_words.forbidden(options.bad_words))
        self.token_ids: list[int] = []
        self.is_void = False
        self._num_read = sequence.num_tokens
        # the number of tokens of the answer before the last token that was chosen, and that token
        self._chosen = (-1, 0)
        # a grammar that could not be opened is an error that only `sample` reports
        is_drawn = not self._needs_tokens and self.num_logprobs is None and self.error is None
        self.drawn_from = self.min_tokens if is_drawn else math.inf
        self.plain_from = self.drawn_from if self.temperature == 0 else math.inf

    @property
    def _needs_tokens(self) -> bool:
        """Whether its choices depend on the tokens of the answer."""
        return self.counts is not None or self.bias is not None or self.matcher is not None

    def is_drawn(self, length: int) -> bool:
        """Return whether the next token depends only on logits, limits and a random number.

        Args:
            length: number of tokens of the answer before it.
        """
        return length >= self.drawn_from

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
        """Whether its mask is not known yet."""
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
        """Remember a chosen token, and start to compute the mask of the next step.

        Args:
            token_id: the token.
            length: number of tokens of the answer before it.
        """
        self._chosen = length, token_id
        if self.matcher is None:
            return
        self.allowed, self.has_waited = None, False
        if length + 1 < self.max_tokens and token_id not in self.end_ids:
            self.matcher.expect(token_id)

    def read(self, sequence: GeneratedSequence, length: int) -> None:
        """Read the tokens that have been generated since the last call.

        Args:
            sequence: its sequence.
            length: number of tokens of the answer.
        """
        self.is_void = sequence.status == "finished"
        if self.is_void or not self._needs_tokens:
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
        if self.counts is not None:
            for token_id in self.token_ids[self._num_read :]:
                self.counts.add(token_id)
            self._num_read = begin + length

    def _fail(self, error: VarlenError) -> None:
        self.error = error
        self.matcher = None
        self.allowed = None
