"""The scheduler of models that generate: which tokens run in the next step.

Every running sequence runs in every step. One that generates runs its last token; prompts have what is left of the
step. The order is fair by tokens (`fair_share`): prompt and `max_tokens` are the size of a request, so a short one
passes long ones, for a while. Waiting sequences start in this order; the first that does not fit holds back those
behind it. It takes the place of running ones that are far behind it, which go on later, if that loses few tokens.

KV memory is reserved before a sequence starts. The policy `reserve` reserves what it may ever need, so that memory
never interrupts it. `optimistic` reserves what its prompt needs; when a sequence needs a block and there is none, the
last one gives back its own and is computed again later, its generated tokens included; a beam search starts again. So
are all sequences after the end of a worker process, whose KV memory is lost.

A source text is encoded in one piece, in the step in which its sequence starts. Its tokens count like tokens of a
prompt. The beams of a search run in the same steps; each has a block table, and they share blocks.

The engine's thread owns it, except for `admit` and `snapshot`, which any thread may call. One step runs at a time.

Source: Orca (Yu et al. 2022, OSDI), algorithm 1; chunks of prompts beside sequences that generate follow
Sarathi-Serve (Agrawal et al. 2024, OSDI); preemption follows vLLM (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import cast

from sortedcontainers import SortedKeyList

from varlen.config import KvPolicy
from varlen.costs.batch_shape import BatchShape
from varlen.errors import EngineError
from varlen.memory.blocks import BlockCounts, BlockPool
from varlen.request.generation import GenerationOptions
from varlen.request.request import Prompt, Request
from varlen.scheduling.admission import Admission, Work
from varlen.scheduling.answers import append_token, write_answers
from varlen.scheduling.fair_share import RANK_UNIT, FairShare
from varlen.scheduling.groups import Claim, Group, GroupMemory, groups_of_step
from varlen.scheduling.sequence import (
    Batch,
    BatchResult,
    BeamStep,
    Chunk,
    Event,
    Forecast,
    GeneratedSequence,
    RequestState,
    SampledToken,
    SequenceFailure,
    StepBatch,
)
from varlen.scheduling.step_cost import StepCost
from varlen.scheduling.step_limits import StepLimits, check_fits

_log = logging.getLogger(__name__)

_STEP_FAILED = "the model failed on the step that held this request; the server's log says why"
_WORKERS_ENDED = "worker processes ended while they ran this request; the server's log says why"
_OUT_OF_MEMORY = "the server had too little memory to run this request; it may pass later"
# After a step that ran out of memory, steps grow again by this part of the largest step each.
_STEP_GROWTH = 32
# See decision 0044.
_PATIENCE = 2
# A request that was in the steps of this many workers that ended has probably ended them. See decision 0046.
_MAX_CRASHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCounts:
    """What a scheduler does now, and has done so far.

    Attributes:
        running, waiting: sequences; of samples of one prompt, each counts.
        blocks: use of KV memory.
        prefill_tokens: tokens of prompts that have run, and of preempted sequences that ran again.
        decode_tokens: generated tokens that have run.
        memory_preemptions: number of times that sequences gave back their blocks because there were too few.
        order_preemptions: number of times that sequences gave back their blocks to a request before them.
    """

    running: int
    waiting: int
    blocks: BlockCounts
    prefill_tokens: int
    decode_tokens: int
    memory_preemptions: int
    order_preemptions: int

    @property
    def preemptions(self) -> int:
        """Number of times that sequences gave back their blocks."""
        return self.memory_preemptions + self.order_preemptions


class IterationScheduler:
    """Queues requests, and forms steps of generation."""

    def __init__(
        self,
        limits: StepLimits,
        blocks: BlockPool,
        kv_policy: KvPolicy,
        admission: Admission,
    ) -> None:
        """Start with an empty queue.

        Args:
            limits: limits of a step and of a sequence.
            blocks: KV memory, which nothing else uses.
            kv_policy: condition for the start of a sequence; see the settings.
            admission: counts waiting work.
        """
        self._limits = limits
        # each running sequence has a token in every step
        self._max_running = min(limits.max_running_sequences, limits.max_step_tokens)
        self._blocks = blocks
        self._memory = GroupMemory(blocks, reserves=kv_policy == "reserve")
        self._admission = admission
        self._cost = StepCost()
        self._share = FairShare(_PATIENCE)
        self._waiting = SortedKeyList(key=lambda group: group.order)
        self._running = SortedKeyList(key=lambda group: group.order)
        self._group_of: dict[GeneratedSequence, Group] = {}
        self._numbers = count()
        # groups of each request that have not run yet
        self._new: Counter[RequestState] = Counter()
        # groups of the step in flight, in order, and the chunks of each
        self._in_flight: dict[Group, list[Chunk]] = {}
        # below the limit after a step that ran out of memory
        self._step_tokens = limits.max_step_tokens
        self._num_running = self._num_waiting = 0
        self._prefill_tokens = self._decode_tokens = 0
        self._memory_preemptions = self._order_preemptions = 0

    def snapshot(self) -> GenerationCounts:
        """Return what runs and waits now, and totals. From any thread."""
        return GenerationCounts(
            running=self._num_running,
            waiting=self._num_waiting,
            blocks=self._blocks.counts(),
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            memory_preemptions=self._memory_preemptions,
            order_preemptions=self._order_preemptions,
        )

    def admit(self, request: Request, now: float) -> Forecast:
        """Count a request as waiting and return its expected run time. From any thread.

        Raises:
            RequestError: it can never run: it is too long, has too many samples or needs too many KV blocks.
            QueueFullError, DeadlineError: see `Admission.enter`.
        """
        options = request.options.generation
        assert options is not None
        for row, prompt in enumerate(request.prompts):
            check_fits(row, prompt, options, self._limits, self._memory)
        work = max(_work(prompt, options) for prompt in request.prompts)
        forecast = self._cost.forecast(
            request,
            max_step_tokens=self._limits.max_step_tokens,
            max_running_sequences=self._max_running,
            part_before=self._share.part_before(
                request.options.tenant, work, 1 + request.options.priority
            ),
        )
        self._admission.enter(request, forecast, now)
        return forecast

    def withdraw(self, request: Request, forecast: Forecast) -> None:
        """Subtract a request that was admitted and is not added. From any thread."""
        self._admission.leave(Work(1, request.num_tokens, forecast.seconds))

    def add(self, request: RequestState) -> None:
        """Queue an admitted request."""
        sequences = cast(tuple[GeneratedSequence, ...], request.sequences)
        options, number = request.request.options, next(self._numbers)
        generation = sequences[0].generation
        samples = generation.n
        for row in range(0, len(sequences), samples):
            tokens = _work(sequences[row].prompt, generation)
            rank = self._share.enter(options.tenant, tokens, 1 + options.priority)
            claim = Claim(options.tenant, tokens)
            group = Group((rank, number, row), sequences[row : row + samples], claim)
            self._group_of.update(dict.fromkeys(group.sequences, group))
            self._new[request] += 1
            self._enqueue(group)

    def wake_at(self, now: float) -> float | None:
        """Return `now` if a step can run; None if nothing waits, or a step runs."""
        has_work = self._running or self._waiting
        return now if has_work and not self._in_flight else None

    def schedule(self, now: float) -> StepBatch | None:
        """Return the next step and mark its sequences as running; None if there is none."""
        if self._in_flight:
            return None
        started = self._start_waiting() if self._extend_decoding() else []
        self._in_flight = self._memory.next_chunks(self._running, self._step_tokens)
        return self._start(now, started) if self._in_flight else None

    def trim(self, batch: Batch, now: float) -> StepBatch | None:
        """Return a scheduled step without its finished sequences; None if all are finished."""
        self._admission.end(batch)
        for group in [group for group in self._in_flight if group.is_finished]:
            self._end(group)
            del self._in_flight[group]
        return self._start(now) if self._in_flight else None

    def update(self, batch: Batch, result: BatchResult) -> list[Event]:
        """Return the new tokens of a step that has run, or its failures."""
        step = cast(StepBatch, batch)
        self._admission.end(step)
        in_flight, self._in_flight = self._in_flight, {}
        # removed while they ran
        removed = [group for group in in_flight if group.is_finished]
        for group in removed:
            self._end(group)
        if result.failure == "memory" and (
            len(in_flight) > 1 or next(iter(in_flight)).least_tokens < step.shape.tokens
        ):
            self._step_tokens = max(1, step.shape.tokens // 2)
            _log.warning("too little memory for a step of %d tokens", step.shape.tokens)
            return []
        if result.failure == "worker":
            return self._restart_all(group for group in in_flight if group not in removed)
        if result.failure is not None:
            error = EngineError(_OUT_OF_MEMORY if result.failure == "memory" else _STEP_FAILED)
            return [SequenceFailure(g.first, error) for g in in_flight if g not in removed]
        self._cost.learn(step.shape.tokens, result.seconds)
        growth = max(1, self._limits.max_step_tokens // _STEP_GROWTH)
        self._step_tokens = min(self._step_tokens + growth, self._limits.max_step_tokens)
        self._memory.end_copies()
        outputs = iter(result.outputs)
        events: list[Event] = []
        for group, chunks in in_flight.items():
            chosen: list[object] = list(
                islice(outputs, sum(len(chunk.samples) for chunk in chunks))
            )
            if group not in removed:
                is_pending = any(
                    isinstance(each, SampledToken) and each.is_pending for each in chosen
                )
                # the last token runs again for its logits; until then its block is not shared
                self._mark_computed(group, chunks, repeated=int(is_pending))
                if not is_pending:
                    events += self._continue(group, chosen)
        return events

    def remove(self, request: RequestState) -> None:
        """Finish all sequences of a request.

        Their blocks are free at once, or when the step in flight has ended.
        """
        groups = {self._group_of[s]: None for s in request.sequences if s in self._group_of}
        waiting = [group for group in groups if group.first.status == "waiting"]
        # a fault may have come between the start of a group and its first step
        new = [group for group in groups if not group.has_started]
        for group in waiting:
            self._waiting.remove(group)
            self._num_waiting -= group.max_branches
        self._admission.leave(self._leave(new))
        for sequence in request.sequences:
            sequence.finish()
        for group in groups:
            if group in waiting:
                self._forget(group)
            elif group not in self._in_flight:
                self._end(group)

    def drain(self) -> None:
        """Do nothing: no step waits for more requests."""

    def _extend_decoding(self) -> bool:
        """Allocate the blocks of tokens to generate; return whether no group was preempted.

        If no block is available, the last groups are preempted, perhaps the one that needs it.
        """
        before = self._memory_preemptions
        for group in groups_of_step(self._running, self._step_tokens):
            # one before it may have preempted it
            if group.remaining > 1 or not group.is_encoded:
                continue
            while group.first.status == "running" and not self._memory.extend(group):
                last = self._running[-1]
                self._memory_preemptions += last.max_branches
                self._preempt(last)
        return self._memory_preemptions == before

    def _start_waiting(self) -> list[Group]:
        """Start waiting groups, up to the first that does not fit; return new ones."""
        new = []
        while self._waiting:
            group = self._waiting[0]
            # what does not fit into the step starts in a later one: a source text runs in one piece
            fits = not self._running or group.least_tokens <= self._free_step_tokens()
            if not fits and self._step_tokens < self._limits.max_step_tokens:
                break
            has_slots = self._num_running + group.max_branches <= self._max_running
            # each running sequence may need a block soon; without them the new one would be preempted at once
            if not (fits and has_slots and self._memory.start(group, keep=self._num_running)):
                if not self._make_room(group):
                    break
                continue
            del self._waiting[0]
            self._num_waiting -= group.max_branches
            self._num_running += group.max_branches
            self._running.add(group)
            for sequence in group.sequences:
                sequence.status = "running"
            if not group.has_started:
                new.append(group)
        return new

    def _free_step_tokens(self) -> int:
        """Return how many tokens of a step no running group needs."""
        used: int = sum(group.least_tokens for group in self._running)
        return self._step_tokens - used

    def _make_room(self, group: Group) -> bool:
        """Preempt running groups behind a waiting one that needs their place.

        Returns whether the waiting one has a place now.

        A preempted group runs its tokens again. Counted as tokens of the waiting group, they may not move it behind
        the preempted one, so what is lost is at most as much as what is served.
        """
        memory, rank, running = self._memory, group.order[0], self._num_running
        blocks, tokens = self._blocks.available, self._free_step_tokens()
        if blocks + sum(map(memory.held, self._running)) < memory.least_available(group, keep=0):
            return False
        last_first, behind = reversed(self._running), list[Group]()
        while (
            running + group.max_branches > self._max_running
            or blocks < memory.least_available(group, keep=running)
            # what is larger than a step runs when nothing else does
            or (tokens < group.least_tokens and len(behind) < len(self._running))
        ):
            other = next(last_first, None)
            if other is None:
                return False
            rank += RANK_UNIT * other.lost_tokens
            if rank >= other.order[0]:
                return False
            behind.append(other)
            running -= other.max_branches
            blocks += memory.freed(other)
            tokens += other.least_tokens
        for other in behind:
            self._order_preemptions += other.max_branches
            self._preempt(other)
        return bool(behind)

    def _start(self, now: float, new: list[Group] | None = None) -> StepBatch:
        """Return the step of all groups in flight; `new` groups never ran before."""
        chunks = tuple(chain.from_iterable(self._in_flight.values()))
        lengths = [len(chunk.token_ids) for chunk in chunks]
        sources = [len(chunk.encodes) for chunk in chunks if chunk.encodes]
        shape = BatchShape.of(lengths + sources)
        reason = f"{lengths.count(1)} of one token, {self._num_waiting} sequences waiting"
        sequences = tuple(chunk.sequence for chunk in chunks)
        seconds = self._cost.seconds(1, shape.tokens)
        copies = tuple((source, copy) for copy, source in self._memory.copies.items())
        batch = StepBatch(sequences, shape, seconds, reason, chunks, copies)
        self._admission.start(batch, until=now + seconds, left=self._leave(new or []))
        return batch

    def _mark_computed(self, group: Group, chunks: list[Chunk], *, repeated: int) -> None:
        """Count the tokens of a group that have run, but for those that run again."""
        # all of a group have as many
        begin, tokens = chunks[0].start, len(chunks[0].token_ids)
        if group.first.num_generated and chunks[0].samples and tokens == 1:
            self._decode_tokens += len(chunks)
        else:
            self._prefill_tokens += sum(tokens + len(chunk.encodes) for chunk in chunks)
        self._count_served(group.claim, sum(tokens + len(chunk.encodes) for chunk in chunks))
        for chunk in chunks:
            chunk.sequence.num_computed = begin + tokens - repeated
        group.is_encoded = True
        self._memory.store(group, begin)

    def _continue(self, group: Group, outputs: list[object]) -> list[Event]:
        """Return the events of a group that has run, and split or release it."""
        events: list[Event] = []
        if group.has_beams:
            if outputs:
                # all rows of a search have the same output
                events = self._follow(group, cast(BeamStep, outputs[0]))
        else:
            sampled = zip(group.sequences, cast(list[SampledToken], outputs), strict=False)
            events = [append_token(*each) for each in sampled]
        if group.is_finished:
            self._end(group)
        elif outputs and len(group.sequences) > 1 and not group.has_beams:
            self._split(group)
        return events

    def _follow(self, group: Group, step: BeamStep) -> list[Event]:
        """Return the answers of a search, if it has ended; else continue its beams."""
        if step.error is not None:
            return [SequenceFailure(group.first, step.error)]
        if step.answers is None:
            self._memory.follow(group, step.parents, step.token_ids)
            return []
        return write_answers(group.sequences, step.answers)

    def _split(self, group: Group) -> None:
        """Replace a group by one for each sample that goes on."""
        self._running.remove(group)
        self._num_running -= group.max_branches
        groups = self._memory.split(group)
        group.claim.groups += len(groups)
        self._forget(group)
        for alone in groups:
            self._group_of[alone.first] = alone
            self._running.add(alone)
            self._num_running += 1

    def _preempt(self, group: Group) -> None:
        """Release the blocks of a group, and let it wait in its old place."""
        self._stop(group)
        group.restart()
        for sequence in group.sequences:
            sequence.status = "waiting"
        self._enqueue(group)

    def _restart_all(self, present: Iterable[Group]) -> list[Event]:
        """Let all running groups start again, after their worker ended; return the failures.

        Args:
            present: groups of the step that it ran.
        """
        requests = {group.first.request: group.first for group in present}
        for group in [*self._running]:
            self._preempt(group)
        self._memory.forget_contents()
        for request in requests:
            request.crashes += 1
        return [
            SequenceFailure(sequence, EngineError(_WORKERS_ENDED))
            for request, sequence in requests.items()
            if request.crashes >= _MAX_CRASHES
        ]

    def _enqueue(self, group: Group) -> None:
        self._waiting.add(group)
        self._num_waiting += group.max_branches

    def _end(self, group: Group) -> None:
        """Release all of a finished group that was running."""
        self._stop(group)
        self._forget(group)

    def _stop(self, group: Group) -> None:
        self._running.remove(group)
        self._num_running -= group.max_branches
        self._memory.release(group)

    def _forget(self, group: Group) -> None:
        for sequence in group.sequences:
            del self._group_of[sequence]
        claim = group.claim
        claim.groups -= 1
        if not claim.groups:
            self._share.serve(claim.tenant, claim.unserved)
            self._share.leave(claim.tenant)

    def _count_served(self, claim: Claim, tokens: int) -> None:
        served = min(tokens, claim.unserved)
        claim.unserved -= served
        self._share.serve(claim.tenant, served)
        self._share.repeat(tokens - served)

    def _leave(self, groups: list[Group]) -> Work:
        """Return the work of groups that no longer wait for their first step."""
        requests, tokens, seconds = 0, 0, 0.0
        for group in groups:
            group.has_started = True
            request, count = group.first.request, group.first.num_tokens + group.source_tokens
            tokens += count
            seconds += count * request.seconds_per_token
            self._new[request] -= 1
            if not self._new[request]:
                del self._new[request]
                requests += 1
        return Work(requests, tokens, seconds)


def _work(prompt: Prompt, options: GenerationOptions) -> int:
    """Return the most tokens that a prompt and its answers run."""
    return prompt.num_tokens + max(options.n, options.num_beams) * options.max_tokens
