"""The scheduler of models that generate: which tokens run in the next step.

Every running sequence runs in every step. One that generates runs its last token; prompts share what is left of the
step. Waiting sequences start by priority, then in order of arrival; the first that does not fit holds back those
behind it, so no sequence runs in a step in which an earlier one of its priority, which has started, does not.

KV memory is promised before a sequence starts. The policy `reserve` promises what it may ever need, so that it is
never interrupted. `optimistic` promises what its prompt needs; when a sequence needs a block and there is none, the
youngest one gives back its own and is computed again later, its generated tokens included.

The engine's thread owns it, except for `admit` and `snapshot`, which any thread may call. One step runs at a time.

Source: Orca (Yu et al. 2022, OSDI), algorithm 1; chunks of prompts beside sequences that generate are those of
Sarathi-Serve (Agrawal et al. 2024, OSDI); preemption is that of vLLM (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

from sortedcontainers import SortedKeyList

from varlen.config import KvPolicy
from varlen.costs.batch_shape import BatchShape
from varlen.errors import EngineError, RequestError
from varlen.memory.blocks import BlockCounts, BlockPool
from varlen.request import Prompt, Request
from varlen.scheduling.admission import Admission
from varlen.scheduling.step_cost import StepCost
from varlen.sequence import (
    Batch,
    BatchResult,
    Chunk,
    Event,
    Forecast,
    GeneratedSequence,
    OutputWriter,
    RequestState,
    SampledToken,
    SequenceFailure,
    SequenceOutput,
    StepBatch,
)

_log = logging.getLogger(__name__)

_TEXT_FAILED = "the text of the answer could not be made; the server's log says why"
_STEP_FAILED = "the model failed on the step that held this request; the server's log says why"
_OUT_OF_MEMORY = "the server had too little memory to run this request; it may pass later"
# After a step that ran out of memory, steps grow again by this part of the largest step each.
_STEP_GROWTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of a step and of a sequence.

    Attributes:
        max_step_tokens: largest step, in tokens.
        max_running_sequences: largest number of sequences that run at the same time.
        max_sequence_tokens: longest sequence, prompt and generated tokens together.
    """

    max_step_tokens: int
    max_running_sequences: int
    max_sequence_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCounts:
    """What a scheduler does now, and has done so far.

    Attributes:
        running, waiting: sequences; of samples of one prompt, each counts.
        blocks: use of KV memory.
        prefill_tokens: tokens of prompts that have run, and of preempted sequences that ran again.
        decode_tokens: generated tokens that have run.
        preemptions: how often sequences gave back their blocks.
    """

    running: int
    waiting: int
    blocks: BlockCounts
    prefill_tokens: int
    decode_tokens: int
    preemptions: int


@dataclass(slots=True, eq=False)
class _Group:
    """Sequences that are computed as one.

    The samples of a prompt are one group until it has run, then each is its own.

    Attributes:
        order: place among running and waiting sequences: by priority, then by arrival, then by row.
        sequences: the first is computed, the others are forked from it; at least one.
        promised: blocks that are promised to them and not used yet.
        has_started: whether they have run before.
    """

    order: tuple[int, int, int]
    sequences: tuple[GeneratedSequence, ...]
    promised: int = 0
    has_started: bool = False

    @property
    def first(self) -> GeneratedSequence:
        """The sequence that is computed."""
        return self.sequences[0]

    @property
    def remaining(self) -> int:
        """Number of tokens to run before one is sampled."""
        return len(self.first.token_ids) - self.first.num_computed

    @property
    def is_finished(self) -> bool:
        """Whether it was removed, or has generated its last token."""
        return self.first.status == "finished" and all(
            sequence.status == "finished" for sequence in self.sequences
        )


class IterationScheduler:
    """Queues requests, and forms steps of generation."""

    def __init__(
        self,
        limits: StepLimits,
        blocks: BlockPool,
        kv_policy: KvPolicy,
        admission: Admission,
        new_writer: Callable[[GeneratedSequence], OutputWriter],
    ) -> None:
        """Start with an empty queue.

        Args:
            limits: of a step and of a sequence.
            blocks: KV memory, which nothing else uses.
            kv_policy: when a sequence starts; see the settings.
            admission: counts waiting work.
            new_writer: returns the writer of a sequence's answer.
        """
        self._limits = limits
        # each running sequence has a token in every step
        self._max_running = min(limits.max_running_sequences, limits.max_step_tokens)
        self._blocks = blocks
        self._reserves = kv_policy == "reserve"
        self._admission = admission
        self._new_writer = new_writer
        self._cost = StepCost()
        self._waiting = SortedKeyList(key=lambda group: group.order)
        self._running = SortedKeyList(key=lambda group: group.order)
        self._group_of: dict[GeneratedSequence, _Group] = {}
        self._numbers = count()
        # groups of each request that have not run yet
        self._new: Counter[RequestState] = Counter()
        # those of the step in flight, chunk by chunk
        self._in_flight: tuple[_Group, ...] = ()
        # below the limit after a step that ran out of memory
        self._step_tokens = limits.max_step_tokens
        self._num_running = self._num_waiting = 0
        self._prefill_tokens = self._decode_tokens = self._preemptions = 0

    def snapshot(self) -> GenerationCounts:
        """Return what runs and waits now, and totals. From any thread."""
        return GenerationCounts(
            running=self._num_running,
            waiting=self._num_waiting,
            blocks=self._blocks.counts(),
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            preemptions=self._preemptions,
        )

    def admit(self, request: Request, now: float) -> Forecast:
        """Count a request as waiting and return its expected run time. From any thread.

        Raises:
            RequestError: it can never run: it is too long, has too many samples or needs too many KV blocks.
            QueueFullError, DeadlineError: see `Admission.enter`.
        """
        for row, prompt in enumerate(request.prompts):
            self._check_fits(row, prompt, request)
        forecast = self._forecast(request)
        self._admission.enter(request, forecast, now)
        return forecast

    def add(self, request: RequestState, now: float) -> None:  # noqa: ARG002  # as others do
        """Queue an admitted request."""
        sequences = cast(tuple[GeneratedSequence, ...], request.sequences)
        priority, number = request.request.options.priority, next(self._numbers)
        samples = sequences[0].generation.n
        for row in range(0, len(sequences), samples):
            group = _Group((-priority, number, row), sequences[row : row + samples])
            self._group_of.update(dict.fromkeys(group.sequences, group))
            self._new[request] += 1
            self._wait(group)
        # last: a request that is queued can be removed if this fails
        for sequence in sequences:
            sequence.writer = self._new_writer(sequence)

    def wake_at(self, now: float) -> float | None:
        """Return `now` if a step can run; None if nothing waits, or a step runs."""
        has_work = self._running or self._waiting
        return now if has_work and not self._in_flight else None

    def schedule(self, now: float) -> StepBatch | None:
        """Return the next step and mark its sequences as running; None if there is none."""
        if self._in_flight:
            return None
        copies: list[tuple[int, int]] = []
        if self._extend_decoding(copies):
            self._start_waiting()
        groups = tuple(self._running[: self._step_tokens])
        if not groups:
            return None
        chunks = []
        for group, tokens in zip(groups, self._divide_step(groups), strict=True):
            blocks = self._blocks.blocks_of(group.first.num_computed + tokens)
            # of what was promised; a sequence that generates has its block
            for _ in range(blocks - len(group.first.block_ids)):
                self._allocate(group)
            chunks.append(_chunk(group, tokens, blocks))
        # one token first: the others attend in a way of their own
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i].token_ids) > 1)
        step = self._start([chunks[i] for i in order], copies, now)
        self._in_flight = tuple(groups[i] for i in order)
        return step

    def trim(self, batch: Batch, now: float) -> StepBatch | None:
        """Return a scheduled step without its finished sequences; None if all are finished."""
        step = cast(StepBatch, batch)
        self._admission.end(step)
        left = [not group.is_finished for group in self._in_flight]
        for group in self._in_flight:
            if group.is_finished:
                self._leave(group)
        chunks = [chunk for chunk, stays in zip(step.chunks, left, strict=True) if stays]
        self._in_flight = tuple(g for g, s in zip(self._in_flight, left, strict=True) if s)
        written = {chunk.block_ids[-1] for chunk in chunks}
        copies = [copy for copy in step.copies if copy[1] in written]
        return self._start(chunks, copies, now) if chunks else None

    def update(self, batch: Batch, result: BatchResult) -> list[Event]:
        """Return the new tokens of a step that has run, or its failures."""
        step = cast(StepBatch, batch)
        self._admission.end(step)
        groups, self._in_flight = self._in_flight, ()
        # removed while they ran
        removed = [group for group in groups if group.is_finished]
        for group in removed:
            self._leave(group)
        if result.failure == "memory" and step.shape.tokens > 1:
            self._shrink_steps(step, groups)
            return []
        if result.failure is not None:
            error = EngineError(_OUT_OF_MEMORY if result.failure == "memory" else _STEP_FAILED)
            return [SequenceFailure(g.first, error) for g in groups if not g.is_finished]
        self._cost.learn(step.shape.tokens, result.seconds)
        growth = max(1, self._limits.max_step_tokens // _STEP_GROWTH)
        self._step_tokens = min(self._step_tokens + growth, self._limits.max_step_tokens)
        tokens = iter(cast(list[SampledToken], result.outputs))
        events: list[Event] = []
        for group, chunk in zip(groups, step.chunks, strict=True):
            sampled = [(sequence, next(tokens)) for sequence in chunk.samples]
            if not group.is_finished:
                self._mark_computed(chunk)
                events += [_append(*each) for each in sampled]
                self._continue(group, chunk)
        return events

    def remove(self, request: RequestState) -> None:
        """Finish all sequences of a request.

        Their blocks are free at once, or when the step in flight has ended.
        """
        groups = {self._group_of[s]: None for s in request.sequences if s in self._group_of}
        waiting = [group for group in groups if group.first.status == "waiting"]
        new = [group for group in waiting if not group.has_started]
        for group in waiting:
            self._waiting.remove(group)
            self._num_waiting -= len(group.sequences)
        if new:
            del self._new[request]
            self._subtract_waiting(new, requests=1)
        for sequence in request.sequences:
            sequence.finish()
        for group in groups:
            if group in waiting:
                self._forget(group)
            elif group not in self._in_flight:
                self._leave(group)

    def drain(self) -> None:
        """Do nothing: no step waits for more requests."""

    def _check_fits(self, row: int, prompt: Prompt, request: Request) -> None:
        options = request.options.generation
        assert options is not None
        tokens = prompt.num_tokens + options.max_tokens
        if tokens > self._limits.max_sequence_tokens:
            raise RequestError(
                f"row {row}: the prompt has {prompt.num_tokens} tokens and max_tokens is {options.max_tokens};"
                f" this model takes at most {self._limits.max_sequence_tokens} in all"
            )
        if options.n > self._max_running:
            raise RequestError(
                f"n is {options.n}; this model generates at most {self._max_running} sequences at a time"
            )
        alone, sample = self._largest_need(prompt.num_tokens, options.max_tokens)
        # without promises, samples that do not fit together run one after another
        needed = alone + sample * (options.n - 1) if self._reserves else alone
        if needed > self._blocks.num_blocks:
            raise RequestError(
                f"row {row}: {prompt.num_tokens} tokens and {options.n} times max_tokens of {options.max_tokens} need"
                f" {needed} KV blocks of {self._blocks.block_size} tokens; this model has {self._blocks.num_blocks}"
                " (kv_bytes)"
            )

    def _largest_need(self, prompt: int, generated: int) -> tuple[int, int]:
        """Return the most blocks of a sequence, and those that each further sample adds.

        Args:
            prompt, generated: numbers of tokens; the last generated one is never stored.
        """
        alone = self._blocks.blocks_of(prompt + generated - 1)
        return alone, alone - prompt // self._blocks.block_size if generated > 1 else 0

    def _forecast(self, request: Request) -> Forecast:
        """Return the run time of a request whose answers all have `max_tokens`.

        A sequence that runs alone is as fast as it can be, so a request whose deadline is before that, and before
        the end of what waits now, misses it. A client that expects a shorter answer sends a smaller `max_tokens`.
        """
        options = request.options.generation
        assert options is not None
        share, alone = 0.0, 0.0
        for prompt in request.prompts:
            chunks = -(-prompt.num_tokens // self._limits.max_step_tokens)
            steps, tokens = chunks + options.max_tokens - 1, options.max_tokens - 1
            alone = max(alone, self._cost.seconds(steps, prompt.num_tokens + options.n * tokens))
            # in full steps, sequences divide the constant part among them
            share += self._cost.seconds(0, prompt.num_tokens + options.n * tokens)
            share += self._cost.seconds(steps, 0) * options.n / self._max_running
        return Forecast(share, least_seconds=alone)

    def _extend_decoding(self, copies: list[tuple[int, int]]) -> bool:
        """Allocate the blocks of tokens to generate; return whether no group was preempted."""
        before = self._preemptions
        for group in list(self._running[: self._step_tokens]):
            # one before it may have preempted it
            if group.first.status == "running" and group.remaining == 1:
                self._extend(group, copies)
        return self._preemptions == before

    def _extend(self, group: _Group, copies: list[tuple[int, int]]) -> None:
        """Allocate the block of a group's next token, unless it may write its last one.

        If no block is available, the youngest groups are preempted, perhaps itself.
        """
        first, blocks = group.first, self._blocks
        while True:
            is_full = first.num_computed == len(first.block_ids) * blocks.block_size
            # only the block of the last token is ever shared and not full
            if not is_full and not blocks.is_shared(first.block_ids[-1]):
                return
            if group.promised or blocks.available > 0:
                break
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is group:
                return
        if is_full:
            self._allocate(group)
        else:
            copies.append(blocks.copy_on_write(first.block_ids, promised=self._use_promise(group)))

    def _allocate(self, group: _Group) -> None:
        """Append a block to the block table of a group."""
        block = self._blocks.allocate(promised=self._use_promise(group))
        group.first.block_ids.append(block)

    def _use_promise(self, group: _Group) -> bool:
        """Return whether a block is promised to a group, and subtract it from its promise."""
        is_promised = group.promised > 0
        group.promised -= is_promised
        return is_promised

    def _start_waiting(self) -> None:
        """Start waiting groups in order, up to the first that does not fit."""
        while self._waiting:
            group = self._waiting[0]
            if self._num_running + len(group.sequences) > self._max_running:
                return
            if not self._promise(group):
                return
            del self._waiting[0]
            self._num_waiting -= len(group.sequences)
            self._num_running += len(group.sequences)
            self._running.add(group)
            for sequence in group.sequences:
                sequence.status = "running"
            if not group.has_started:
                group.has_started = True
                request = group.first.request
                self._new[request] -= 1
                is_last = not self._new[request]
                if is_last:
                    del self._new[request]
                self._subtract_waiting([group], requests=int(is_last))

    def _promise(self, group: _Group) -> bool:
        """Promise a group its blocks; return False if too few are available."""
        first, blocks = group.first, self._blocks
        shared = blocks.find_prefix(first.token_ids)
        if self._reserves:
            alone, sample = self._largest_need(first.num_tokens, first.generation.max_tokens)
            needed, keep = alone + sample * (len(group.sequences) - 1), 0
        else:
            # each running sequence may need a block soon; without them the new one would be preempted at once
            needed, keep = blocks.blocks_of(len(first.token_ids)), self._num_running
        if not blocks.promise(needed - len(shared), shared=shared, keep=keep):
            return False
        group.promised = needed - len(shared)
        first.block_ids = shared
        first.num_computed = len(shared) * blocks.block_size
        return True

    def _divide_step(self, groups: tuple[_Group, ...]) -> list[int]:
        """Return the number of tokens of each group.

        Each has one, and prompts divide the rest in order. A prompt takes at most half of what is left while another
        one is behind it, so that a short prompt does not wait for a long one; what the others do not need, it takes
        as well.
        """
        spare = self._step_tokens - len(groups)
        wanted = [group.remaining - 1 for group in groups]
        behind = sum(tokens > 0 for tokens in wanted)
        lengths = []
        for tokens in wanted:
            behind -= tokens > 0
            more = min(tokens, spare // 2 if behind else spare)
            lengths.append(1 + more)
            spare -= more
        for place, tokens in enumerate(wanted):
            more = min(tokens + 1 - lengths[place], spare)
            lengths[place] += more
            spare -= more
        return lengths

    def _start(self, chunks: list[Chunk], copies: list[tuple[int, int]], now: float) -> StepBatch:
        lengths = [len(chunk.token_ids) for chunk in chunks]
        shape = BatchShape.of(lengths)
        reason = f"{lengths.count(1)} of one token, {self._num_waiting} sequences waiting"
        sequences = tuple(chunk.sequence for chunk in chunks)
        seconds = self._cost.seconds(1, shape.tokens)
        batch = StepBatch(sequences, shape, seconds, reason, tuple(chunks), tuple(copies))
        self._admission.start(batch, until=now + seconds)
        return batch

    def _mark_computed(self, chunk: Chunk) -> None:
        sequence, tokens = chunk.sequence, len(chunk.token_ids)
        sequence.num_computed = chunk.start + tokens
        if sequence.num_generated and chunk.samples and tokens == 1:
            self._decode_tokens += tokens
        else:
            self._prefill_tokens += tokens
        self._blocks.store(
            sequence.token_ids, sequence.block_ids, begin=chunk.start, end=sequence.num_computed
        )

    def _continue(self, group: _Group, chunk: Chunk) -> None:
        """Fork the samples of a prompt that has run, and release what has finished."""
        if group.is_finished:
            self._leave(group)
        elif chunk.samples and len(group.sequences) > 1:
            self._fork(group)

    def _fork(self, group: _Group) -> None:
        """Replace a group by one for each sample that goes on; they share its blocks."""
        first = group.first
        left = [sequence for sequence in group.sequences if sequence.status == "running"]
        for sequence in left:
            if sequence is not first:
                sequence.num_computed, sequence.block_ids = first.num_computed, [*first.block_ids]
                self._blocks.fork(first.block_ids)
        sample = 0
        if self._reserves:
            _, sample = self._largest_need(first.num_tokens, first.generation.max_tokens)
        # the first to write a shared block copies it; the last one writes in place, so it needs one block less
        promised = [sample] * (len(left) - 1)
        promised.append(group.promised - sample * (len(group.sequences) - 1))
        self._blocks.withdraw(group.promised - sum(promised))
        self._running.remove(group)
        self._num_running -= len(group.sequences) - len(left)
        priority, number, _ = group.order
        for sequence, blocks in zip(left, promised, strict=True):
            alone = replace(
                group,
                order=(priority, number, sequence.row),
                sequences=(sequence,),
                promised=blocks,
            )
            self._group_of[sequence] = alone
            self._running.add(alone)
        for sequence in group.sequences:
            if sequence.status == "finished":
                self._release(sequence)
                del self._group_of[sequence]

    def _shrink_steps(self, step: StepBatch, groups: tuple[_Group, ...]) -> None:
        """Let the next step be half as large as one that ran out of memory."""
        self._step_tokens = max(1, step.shape.tokens // 2)
        _log.warning("too little memory for a step of %d tokens", step.shape.tokens)
        copied = {destination for _, destination in step.copies}
        # their copies may not have been made
        broken = [group.order for group in groups if copied & set(group.first.block_ids)]
        if broken:
            # those after the first of them wait too, so that none overtakes it
            for group in [each for each in self._running if each.order >= min(broken)]:
                self._preempt(group)

    def _preempt(self, group: _Group) -> None:
        """Release the blocks of a group, and let it wait in its old place."""
        self._preemptions += len(group.sequences)
        self._stop(group)
        group.first.num_computed = 0
        for sequence in group.sequences:
            sequence.status = "waiting"
        self._wait(group)

    def _wait(self, group: _Group) -> None:
        self._waiting.add(group)
        self._num_waiting += len(group.sequences)

    def _leave(self, group: _Group) -> None:
        """Release all of a finished group that was running."""
        self._stop(group)
        self._forget(group)

    def _stop(self, group: _Group) -> None:
        self._running.remove(group)
        self._num_running -= len(group.sequences)
        self._release(group.first)
        self._blocks.withdraw(group.promised)
        group.promised = 0

    def _forget(self, group: _Group) -> None:
        for sequence in group.sequences:
            del self._group_of[sequence]

    def _release(self, sequence: GeneratedSequence) -> None:
        self._blocks.release(sequence.block_ids)
        sequence.block_ids = []

    def _subtract_waiting(self, groups: list[_Group], *, requests: int) -> None:
        """Subtract groups that no longer wait for their first step from the counts."""
        request = groups[0].first.request
        tokens = sum(group.first.num_tokens for group in groups)
        seconds = tokens * request.seconds_per_token
        self._admission.leave(requests=requests, tokens=tokens, seconds=seconds)


def _chunk(group: _Group, tokens: int, num_blocks: int) -> Chunk:
    sequence, begin = group.first, group.first.num_computed
    end = begin + tokens
    return Chunk(
        sequence,
        begin,
        tuple(sequence.token_ids[begin:end]),
        # it has more of them after a larger step that ran out of memory
        tuple(sequence.block_ids[:num_blocks]),
        group.sequences if end == len(sequence.token_ids) else (),
    )


def _append(sequence: GeneratedSequence, token: SampledToken) -> Event:
    """Append a token to a sequence; return what it adds to the answer."""
    sequence.token_ids.append(token.token_id)
    if token.error is not None:
        return SequenceFailure(sequence, token.error)
    try:
        part = sequence.writer.write(token)
    except BaseException:
        # a panic of the tokenizers library is no Exception
        _log.exception("the text of an answer could not be made; its request fails")
        return SequenceFailure(sequence, EngineError(_TEXT_FAILED))
    if part.finish_reason is not None:
        sequence.finish()
    return SequenceOutput(sequence, part)
