"""Chooses the next token of each sequence from the logits of a step.

A sequence's tokens depend on its own logits, options and seed, never on what else is in the step. What has to be known
of its earlier tokens is kept with it and grows token by token.

A step may begin before the engine has read the tokens of the one before it, so the sampler knows by itself what it
chose last.
"""

import logging
import math
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.decoding.grammar_matcher import BoolArray, Matcher, wait_for_masks
from varlen.decoding.grammars import Grammars
from varlen.decoding.random_numbers import random_key, uniform_numbers
from varlen.decoding.token_bias import BadWords, TokenBias, add_to_rows
from varlen.decoding.token_counts import TokenCounts
from varlen.errors import EngineError, RequestError, VarlenError
from varlen.request.request import TokenLogprobs
from varlen.scheduling.sequence import Draws, GeneratedSequence, SampledToken
from varlen_kernels.cpu.greedy import best_tokens
from varlen_kernels.ops import kernels_for

_log = logging.getLogger(__name__)

# Longest wait of a step for the masks of its rows, in seconds, and of a step in which all rows have to wait: a request
# that comes meanwhile waits for it too. A row without a mask runs again in the next step.
_MASK_SECONDS, _ALL_MASKS_SECONDS = 0.01, 0.02
# Numbers of 4 bytes that keep the next row of them at an address of 16 bytes.
_ALIGNED = 4
_CHOICE_FAILED = "no token could be chosen for this request; the server's log says why"


class Sampler:
    """Chooses tokens of sequences of one model."""

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Collection[int],
        grammars: Grammars,
        bad_words: BadWords,
        device: torch.device,
    ) -> None:
        """Prepare the choice.

        Args:
            vocab_size: width of the logits.
            eos_ids: end tokens of the checkpoint.
            grammars: grammars of sequences with structured output.
            bad_words: tokens of words that requests forbid.
            device: device of the logits.
        """
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._grammars = grammars
        self._bad_words = bad_words
        self._kernels = kernels_for(device)

    def draws(self, sequences: Sequence[GeneratedSequence], lengths: Sequence[int]) -> Draws | None:
        """Return the numbers that tokens are drawn with, if nothing else decides them.

        They are known before the tokens before them are. None if anything else changes a choice or is asked for: then
        only `sample` can choose.

        Args:
            sequences, lengths: see `sample`.
        """
        states = [self._state(sequence) for sequence in sequences]
        if not all(map(_SamplerState.is_drawn, states, lengths)):
            return None
        limits = [state.limits for state in states]
        if all(state.temperature == 0 for state in states):
            return Draws(limits, None)
        return Draws(limits, uniform_numbers([state.key for state in states], lengths))

    def sample(
        self, logits: Tensor, sequences: Sequence[GeneratedSequence], lengths: Sequence[int]
    ) -> list[SampledToken]:
        """Return the next token of each sequence.

        Biases, bad words, penalties, the smallest number of tokens and the grammar change the logits, then temperature,
        top-k, top-p and min-p apply. Log probabilities come from the unchanged logits.

        Args:
            logits: `[sequences, vocabulary]` fp32; overwritten.
            sequences: whose `token_ids` hold all tokens that were chosen so far, or all but the last.
            lengths: number of tokens of each answer so far.
        """
        states = [self._state(sequence) for sequence in sequences]
        if all(length >= state.plain_from for state, length in zip(states, lengths, strict=True)):
            return [SampledToken(token_id) for token_id in _first_of_largest(logits)]

        for state, sequence, length in zip(states, sequences, lengths, strict=True):
            with state.guard():
                state.read(sequence, length)
        _await_masks(states)
        reported = [row for row, state in enumerate(states) if state.num_logprobs is not None]
        raw = torch.log_softmax(logits[reported], dim=1) if reported else None
        biases = {
            row: state.bias.next(state.token_ids, length)
            for row, (state, length) in enumerate(zip(states, lengths, strict=True))
            if state.bias is not None
        }
        add_to_rows(logits, biases)
        _penalize(logits, states)
        _mask(logits, states, lengths)
        token_ids = self._choose(logits, states, lengths)
        tokens = [SampledToken(token_id) for token_id in token_ids]
        if raw is not None:
            wanted = [states[row].num_logprobs or 0 for row in reported]
            chosen = [token_ids[row] for row in reported]
            for row, logprobs in zip(reported, _logprobs(raw, chosen, wanted), strict=True):
                tokens[row] = SampledToken(token_ids[row], logprobs)
        # samples of a prompt get their first tokens in one step: one whose mask is late holds back the others
        held = {
            sequence.first_sample
            for sequence, state, length in zip(sequences, states, lengths, strict=True)
            if state.is_pending and not length
        }
        for row, (sequence, state) in enumerate(zip(sequences, states, strict=True)):
            is_held = not lengths[row] and sequence.first_sample in held
            if state.is_void:
                tokens[row] = SampledToken(token_ids[row], is_pending=True)
            elif state.error is not None:
                tokens[row] = SampledToken(token_ids[row], error=state.error)
            elif state.is_pending or is_held:
                tokens[row] = SampledToken(token_ids[row], is_pending=True)
            else:
                with state.guard():
                    state.expect(token_ids[row], lengths[row])
        return tokens

    def _state(self, sequence: GeneratedSequence) -> "_SamplerState":
        state = sequence.sampler_state
        if state is None:
            state = _SamplerState(sequence, self._grammars, self._bad_words)
            # an end token that is no token of the model cannot come
            ends = self._eos_ids.union(sequence.generation.stop_token_ids)
            state.end_ids = [token_id for token_id in ends if token_id < self._vocab_size]
            # else it has ended while a step had its next token
            if sequence.status != "finished":
                sequence.sampler_state = state
        assert isinstance(state, _SamplerState)
        return state

    def _choose(
        self, logits: Tensor, states: Sequence["_SamplerState"], lengths: Sequence[int]
    ) -> list[int]:
        """Return a token for each row of the final logits."""
        if all(state.temperature == 0 for state in states):
            return _first_of_largest(logits)
        uniform = uniform_numbers([state.key for state in states], lengths)
        numbers = _on_device([state.limits for state in states], uniform, logits.device)
        drawn: list[int] = self._kernels.sample_tokens(logits, *numbers).tolist()
        return drawn


class _SamplerState:
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
        # the last token that was chosen, and the number of tokens of the answer before it
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


def _on_device(
    limits: Sequence[tuple[float, int, float, float]],
    uniform: npt.NDArray[np.float64],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return temperatures, top-k, top-p, min-p and random numbers, after one copy."""
    # a random number takes as much space as two limits; the language Triton compiles a kernel again where the
    # alignment of a pointer is another one
    rows = len(limits)
    packed = torch.empty(6, -(-rows // _ALIGNED) * _ALIGNED, pin_memory=device.type == "cuda")
    on_host = packed.numpy()
    on_host[:2].reshape(-1).view(np.float64)[:rows] = uniform
    temperatures, top_ks, top_ps, min_ps = zip(*limits, strict=True)
    on_host[2, :rows], on_host[4, :rows], on_host[5, :rows] = temperatures, top_ps, min_ps
    on_host[3].view(np.int32)[:rows] = top_ks
    # torch keeps pinned memory until the copy has run
    packed = packed.to(device, non_blocking=True)
    top_k, drawn = packed[3].view(torch.int32), packed[:2].view(-1).view(torch.float64)
    return packed[2, :rows], top_k[:rows], packed[4, :rows], packed[5, :rows], drawn[:rows]


def _first_of_largest(logits: Tensor) -> list[int]:
    """Return the first token with the largest logit, for each row."""
    best = logits.argmax(1) if logits.device.type == "cuda" else best_tokens(logits)
    return list(best.tolist())


def _await_masks(states: Sequence[_SamplerState]) -> None:
    """Wait for the masks of the rows, or until the time is over."""
    waiting = [state for state in states if state.matcher is not None and not state.is_void]
    began = time.monotonic()
    while waiting:
        for state in waiting:
            with state.guard():
                state.read_mask()
        waiting = [state for state in waiting if state.is_pending]
        # one slow grammar delays the other rows once per token, not in every step
        awaited = [state for state in waiting if not state.has_waited]
        seconds = _MASK_SECONDS
        if len(waiting) == len(states):
            awaited, seconds = waiting, _ALL_MASKS_SECONDS
        left = began + seconds - time.monotonic()
        if not awaited or left <= 0:
            break
        wait_for_masks([state.matcher for state in awaited if state.matcher is not None], left)
    for state in waiting:
        state.has_waited = True


def _penalize(logits: Tensor, states: Sequence[_SamplerState]) -> None:
    """Apply the penalties of all rows that have any, to the tokens that they concern."""
    rows: list[int] = []
    counts: list[TokenCounts] = []
    penalties: list[tuple[float, float, float]] = []
    for row, state in enumerate(states):
        if state.counts is not None:
            rows.append(row)
            counts.append(state.counts)
            penalties.append(state.penalties)
    if not rows:
        return
    sizes = [len(each.ids) for each in counts]
    # one column per distinct token of each row
    ids = np.stack(
        (np.repeat(np.array(rows), sizes), np.concatenate([each.ids for each in counts]))
    )
    values = np.concatenate(
        (
            np.repeat(np.array(penalties, dtype=np.float32).T, sizes, axis=1),
            np.concatenate([each.counts for each in counts])[None],
        )
    )
    place = torch.from_numpy(ids).to(logits.device).unbind()
    repetition, presence, frequency, count = torch.from_numpy(values).to(logits.device)
    penalized = logits[place]
    penalized = torch.where(penalized > 0, penalized / repetition, penalized * repetition)
    penalized -= frequency * count
    penalized -= presence * (count > 0)
    logits[place] = penalized


def _mask(logits: Tensor, states: Sequence[_SamplerState], lengths: Sequence[int]) -> None:
    """Exclude end tokens that come too early, and tokens that do not match a grammar."""
    rows: list[int] = []
    excluded: list[int] = []
    for row, (state, length) in enumerate(zip(states, lengths, strict=True)):
        ends = state.end_ids
        is_early = length < state.min_tokens
        allowed = state.allowed
        if allowed is not None:
            # where the grammar is at its end, nothing else can come
            if is_early and allowed.sum() > allowed[ends].sum():
                allowed = allowed.copy()
                allowed[ends] = False
            logits[row].masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)
        elif is_early:
            rows += [row] * len(ends)
            excluded += ends
    if rows:
        logits[rows, excluded] = -torch.inf


def _logprobs(raw: Tensor, chosen: list[int], wanted: list[int]) -> list[TokenLogprobs]:
    """Return the log probabilities of the chosen tokens and of the best ones.

    Args:
        raw: log probabilities, `[rows, vocabulary]`.
        chosen: one token per row.
        wanted: number of best tokens, per row.
    """
    index = torch.tensor(chosen, device=raw.device)[:, None]
    own = raw.gather(1, index).squeeze(1).tolist()
    best = raw.topk(min(max(wanted), raw.shape[1]), dim=1)
    rows = zip(chosen, own, best.indices.tolist(), best.values.tolist(), wanted, strict=True)
    return [
        TokenLogprobs(token_id, logprob, tuple(zip(ids, values, strict=True))[:number])
        for token_id, logprob, ids, values, number in rows
    ]
