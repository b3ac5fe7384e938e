"""Chooses the next token of each sequence from the logits of a step.

A sequence's tokens depend on its own logits, options and seed, never on what else is in the step. A `SamplerState`
keeps the earlier tokens that matter, and grows token by token.

A step may begin before the engine has read the tokens of the one before it, so the sampler knows by itself what it
chose last.
"""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.decoding.grammar.compiled_grammar import await_processes
from varlen.decoding.grammar.grammars import Grammars
from varlen.decoding.sampling.sampler_state import (
    EditedRow,
    EditList,
    SamplerState,
    edits_of,
    uniform_numbers,
)
from varlen.decoding.token_edits import BadWords
from varlen.memory.arena import moved
from varlen.request.request import TokenLogprobs
from varlen.scheduling.batch import GeneratedSequence
from varlen.scheduling.device_plan import Draws, EditLimits, Edits, SampledToken
from varlen_kernels.cpu.choices import best_tokens
from varlen_kernels.ops import kernels_for
from varlen_kernels.reference.logit_edits import NO_SLOT, EditLists, EditState

_log = logging.getLogger(__name__)

# Longest wait of a step for the masks of its rows, in seconds, and of a step in which all rows have to wait: a request
# that comes meanwhile waits for it too. A row without a mask runs again in the next step.
_MASK_SECONDS, _ALL_MASKS_SECONDS = 0.01, 0.02
# Numbers of 4 bytes that keep the next row of them at an address of 16 bytes.
_ALIGNED = 4


class EditedSequence(NamedTuple):
    """A sequence of a step whose logits are edited.

    Attributes:
        sequence, state: the sequence, and the sampler's state for it.
        length: number of tokens of its answer.
        drafted: see `Chunk`.
    """

    row: int
    sequence: GeneratedSequence
    state: SamplerState
    length: int
    drafted: Sequence[int] = ()


@dataclass(slots=True)
class _Slot:
    """The slot of a sequence's list.

    Attributes:
        length: tokens of the answer in the step before, if it was to use the list; else None.
    """

    number: int
    length: int | None = None


class EditSlots:
    """The slots of the edit lists on one device. Not for two threads at once.

    A list is sent when its sequence begins. After that, each step adds one token to it. Where that may have gone wrong,
    the list is sent again with all tokens that are known: a step has failed, the host has chosen a token, or the
    process of the model has ended. So no step needs to know how often another one has run.
    """

    def __init__(self, limits: EditLimits, vocab_size: int) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        # a sequence that ends drops its state, and with it the slot
        self._slots: WeakKeyDictionary[SamplerState, _Slot] = WeakKeyDictionary()

    def forget(self) -> None:
        """Forget all lists: the device has lost them."""
        self._slots.clear()

    def skip(self, states: Sequence[SamplerState]) -> None:
        """Note that the host chooses the next tokens of these sequences, without their lists."""
        for state in states:
            if state in self._slots:
                self._slots[state].length = None

    def next_edits(self, edited: Sequence[EditedSequence]) -> Edits | None:
        """Return the edits of the next step; None if a sequence finds no slot."""
        states = [each.state for each in edited if not each.drafted]
        if not self._claim(states):
            self.skip(states)
            return None
        rows = []
        for row, sequence, state, length, drafted in edited:
            bans = state.num_early_ends(length)
            if drafted:
                # the list in the slot has no tokens that are guessed
                own, _ = state.begin_edits(sequence, length, drafted)
                rows.append(EditedRow(row, NO_SLOT, False, bans, state.penalties, own))
                continue
            slot, begun, is_added = self._slots[state], None, state.has_penalties
            if slot.length != length - 1:
                begun, is_added = state.begin_edits(sequence, length)
            slot.length = length
            rows.append(EditedRow(row, slot.number, is_added, bans, state.penalties, begun))
        return edits_of(rows)

    def _claim(self, states: Sequence[SamplerState]) -> bool:
        new = [state for state in states if state not in self._slots]
        most = (min(state.most_edits, self._vocab_size) for state in new)
        if any(count > self._limits.entries for count in most):
            return False
        if new and len(new) > len(self._free()):
            # such as preempted ones. Steps run in order, so a step in flight has used their lists before
            others = set(self._slots) - set(states)
            for state in others:
                del self._slots[state]
        free = self._free() if new else []
        if len(new) > len(free):
            return False
        self._slots.update(zip(new, map(_Slot, free), strict=False))
        return True

    def _free(self) -> list[int]:
        taken = {slot.number for slot in self._slots.values()}
        return [number for number in range(self._limits.slots) if number not in taken]


class Sampler:
    """Chooses tokens of sequences of one model."""

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Collection[int],
        grammars: Grammars,
        bad_words: BadWords,
        device: torch.device,
        edit_limits: EditLimits = EditLimits(0, 0),  # noqa: B008  # immutable
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._grammars = grammars
        self._bad_words = bad_words
        self._kernels = kernels_for(device)
        self._edit_slots = EditSlots(edit_limits, vocab_size)
        # lists of the host are complete, and stay there
        self._no_tokens = torch.zeros(2, 1, dtype=torch.int32, device=device).unbind()
        self._no_state = EditState.new(0, edit_limits.entries, device)

    def draws(
        self,
        sequences: Sequence[GeneratedSequence],
        lengths: Sequence[int],
        drafted: Sequence[Sequence[int]] | None = None,
    ) -> Draws | None:
        """Return what the device draws tokens with.

        It is known before the tokens before them are. None if the device cannot choose all of them: then only `sample`
        can. A step whose draws are returned has to start before the next one's are asked for, or never.
        """
        states = [cast(SamplerState, sequence.sampler_state) for sequence in sequences]
        if None in states:
            states = [self._state(sequence) for sequence in sequences]
        if False in [state.is_drawn for state in states]:
            self._edit_slots.skip(states)
            return None
        draws = _draws_of(states, lengths)
        if not max([state.edited_until for state in states], default=0):
            return draws
        edited = [
            EditedSequence(row, sequence, state, length, guesses)
            for row, (sequence, state, length, guesses) in enumerate(
                zip(sequences, states, lengths, drafted or [()] * len(states), strict=True)
            )
            # nothing reads the token of one that has ended
            if length < state.edited_until and sequence.status != "finished"
        ]
        if not edited:
            return draws
        edits = self._edit_slots.next_edits(edited)
        return None if edits is None else draws._replace(edits=edits)

    def note(
        self,
        sequences: Sequence[GeneratedSequence],
        lengths: Sequence[int],
        token_ids: Sequence[int],
    ) -> None:
        """Note tokens that the device has drawn.

        The host may choose the next ones before the engine's thread has appended these.
        """
        for sequence, length, token_id in zip(sequences, lengths, token_ids, strict=True):
            if isinstance(state := sequence.sampler_state, SamplerState):
                state.expect(token_id, length)

    def forget(self) -> None:
        self._edit_slots.forget()

    def sample(
        self,
        logits: Tensor,
        sequences: Sequence[GeneratedSequence],
        lengths: Sequence[int],
        drafted: Sequence[Sequence[int]] | None = None,
    ) -> list[SampledToken]:
        """Return the next token of each sequence.

        Biases, bad words, penalties, the smallest number of tokens and the grammar change the logits, then temperature,
        top-k, top-p and min-p apply. Log probabilities come from the unchanged logits.

        Args:
            logits: `[sequences, vocabulary]` fp32; overwritten.
            sequences: whose `token_ids` hold all tokens that were chosen so far, or all but the last.
            lengths: number of tokens of each answer so far.
            drafted: see `Chunk`; a row without guesses is the last one of its sequence.
        """
        states = [self._state(sequence) for sequence in sequences]
        if all(map(_is_greedy, states, lengths)):
            return [SampledToken(token_id) for token_id in _first_of_largest(logits)]

        drafted = drafted or [()] * len(states)
        for state, sequence, length, guesses in zip(
            states, sequences, lengths, drafted, strict=True
        ):
            with state.guard():
                if not guesses:
                    state.read(sequence, length)
        _await_masks(states)
        reported = [row for row, state in enumerate(states) if state.num_logprobs is not None]
        raw = torch.log_softmax(logits[reported], dim=1) if reported else None
        edits = [state.edits for state in states]
        for row, guesses in enumerate(drafted):
            if guesses and edits[row]:
                edits[row], _ = states[row].begin_edits(sequences[row], lengths[row], guesses)
        self._edit(logits, states, lengths, edits)
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

    def _state(self, sequence: GeneratedSequence) -> SamplerState:
        state = sequence.sampler_state
        if state is None:
            # an end token that is no token of the model cannot come
            ends = self._eos_ids.union(sequence.generation.stop_token_ids)
            end_ids = [token_id for token_id in ends if token_id < self._vocab_size]
            state = SamplerState(sequence, end_ids, self._grammars, self._bad_words)
            # else it has ended while a step had its next token
            if sequence.status != "finished":
                sequence.sampler_state = state
        assert isinstance(state, SamplerState)
        return state

    def _edit(
        self,
        logits: Tensor,
        states: Sequence[SamplerState],
        lengths: Sequence[int],
        edits: Sequence[EditList | None],
    ) -> None:
        """Apply biases, penalties and early bans of end tokens, with the host's edit lists."""
        rows = [
            # the mask of a grammar says when an end token may come
            EditedRow(
                row,
                NO_SLOT,
                is_added=False,
                num_banned=0 if state.matcher is not None else state.num_early_ends(length),
                penalties=state.penalties,
                begun=begun,
            )
            for row, (state, length, begun) in enumerate(zip(states, lengths, edits, strict=True))
            if begun is not None and length < state.edited_until
        ]
        if not rows:
            return
        (found,) = moved([edits_of(rows)._asdict()], logits.device)
        begun = EditLists(found["tokens"], found["counts"], found["biases"])
        self._kernels.edit_logits(
            logits, *self._no_tokens, found["rows"], found["penalties"], begun, self._no_state
        )

    def _choose(
        self, logits: Tensor, states: Sequence[SamplerState], lengths: Sequence[int]
    ) -> list[int]:
        draws = _draws_of(states, lengths)
        if draws.uniform is None:
            return _first_of_largest(logits)
        numbers = _on_device(draws.limits, draws.uniform, logits.device)
        drawn: list[int] = self._kernels.sample_tokens(logits, *numbers).tolist()
        return drawn


def _draws_of(states: Sequence[SamplerState], lengths: Sequence[int]) -> Draws:
    limits = [state.limits for state in states]
    if not max([state.temperature for state in states], default=0):
        return Draws(limits, None)
    return Draws(limits, uniform_numbers([state.key for state in states], lengths))


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
    best = logits.argmax(1) if logits.device.type == "cuda" else best_tokens(logits)
    return list(best.tolist())


def _await_masks(states: Sequence[SamplerState]) -> None:
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
        await_processes([state.matcher for state in awaited if state.matcher is not None], left)
    for state in waiting:
        state.has_waited = True


def _is_greedy(state: SamplerState, length: int) -> bool:
    return state.is_drawn and state.temperature == 0 and length >= state.edited_until


def _mask(logits: Tensor, states: Sequence[SamplerState], lengths: Sequence[int]) -> None:
    """Exclude last tokens of forbidden words, and tokens that do not match a grammar."""
    rows: list[int] = []
    excluded: list[int] = []
    for row, (state, length) in enumerate(zip(states, lengths, strict=True)):
        allowed = state.allowed
        if allowed is not None:
            # where the grammar is at its end, nothing else can come
            ends = state.end_ids
            if length < state.min_tokens and allowed.sum() > allowed[ends].sum():
                allowed = allowed.copy()
                allowed[ends] = False
            logits[row].masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)
        banned = state.banned(length)
        rows += [row] * len(banned)
        excluded += banned
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
