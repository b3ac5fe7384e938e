"""The scheduler of models that generate: which tokens run in the next step.

Every running sequence runs in every step. One that generates runs its last token; prompts have the rest of the
step, which is smaller while answers are streamed (`step_size`). The order is fair by tokens (`admission`). Waiting
sequences start in this order, and may preempt running ones (`group_queues`).

KV memory is reserved before a sequence starts: with the policy `reserve` all that it may ever need, with `optimistic`
what its prompt needs. Then the last sequence gives back its blocks when there is none, and is computed again later; so
are all sequences after the end of a worker process, whose KV memory is lost.

While a step runs, the next one can be scheduled and started, before its tokens are known. The steps are the ones that
would run without this: where that is not certain, the next one waits (docs/decisions/0059-steps-ahead.md). In a
pipeline as many steps are in flight as there are stages, each with its share of the running groups
(docs/decisions/0071-pipelines.md); `admit` then expects too short a run time.

The engine's thread owns it, except for `admit` and `snapshot`, which any thread may call.

Source: Orca (Yu et al. 2022, OSDI), algorithm 1; chunks of prompts beside sequences that generate follow
Sarathi-Serve (Agrawal et al. 2024, OSDI); preemption follows vLLM (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count, islice
from typing import cast

from varlen.config import KvPolicy
from varlen.costs.model import BatchShape
from varlen.errors import EngineError, RequestError
from varlen.memory.blocks import BlockCounts, BlockPool
from varlen.request.generation import GenerationOptions
from varlen.request.request import Prompt, Request
from varlen.scheduling import device_plan
from varlen.scheduling.admission import Admission, Claim, Claims, Work
from varlen.scheduling.batch import (
    MAX_STEPS,
    OUT_OF_MEMORY,
    Batch,
    BatchResult,
    Chunk,
    Event,
    Failure,
    Forecast,
    GeneratedSequence,
    RequestState,
    SequenceFailure,
    append_token,
    write_answers,
)
from varlen.scheduling.device_plan import BeamStep, SampledToken
from varlen.scheduling.iteration.group_memory import GroupMemory
from varlen.scheduling.iteration.group_queues import GroupQueues, HeldByStepError, RunningSlots
from varlen.scheduling.iteration.groups import Group, Part
from varlen.scheduling.iteration.speculation import UNKNOWN_GUESS
from varlen.scheduling.iteration.step_size import (
    DraftCost,
    StepCost,
    StepLimits,
    StepSize,
    tokens_of_step,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCounts:
    """Running and waiting sequences of a scheduler, and its totals so far.

    Attributes:
        running, waiting: sequences; of samples of one prompt, each counts.
        blocks: use of KV memory.
        prefill_tokens: tokens of prompts that have run, and of preempted sequences that ran again.
        decode_tokens: generated tokens that have run.
        drafted_tokens, accepted_tokens: drafted tokens that ran, and those that were chosen.
        saved_seconds: see `DraftCost`.
        memory_preemptions: number of times that sequences gave back their blocks because there were too few.
        order_preemptions: number of times that sequences gave back their blocks to a request before them.
    """

    running: int
    waiting: int
    blocks: BlockCounts
    prefill_tokens: int
    decode_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    saved_seconds: float
    memory_preemptions: int
    order_preemptions: int

    @property
    def preemptions(self) -> int:
        """Number of times that sequences gave back their blocks."""
        return self.memory_preemptions + self.order_preemptions


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step in flight.

    Attributes:
        number, after: see `Batch`.
        chunks: its groups in order, and the chunk of each.
        copies: source by destination of the blocks that it copies.
        drafts: rows of drafted tokens, which come before the chunks.
        steps: most steps of its launch; how many run is known at its end.
        ignored: groups that run again, and whose outputs are ignored.
        is_void: whether this is so of all of them, because a step before it has failed.
    """

    number: int
    after: int | None
    chunks: dict[Group, Chunk]
    copies: dict[int, int]
    drafts: dict[Group, tuple[Chunk, ...]] = field(default_factory=dict)
    steps: int = 1
    ignored: set[Group] = field(default_factory=set)
    is_void: bool = False

    @property
    def groups(self) -> list[Group]:
        """The groups whose outputs count."""
        if self.is_void:
            return []
        ignored = self.ignored
        return [
            group
            for group in self.chunks
            if not (group.first.status == "finished" and group.is_finished)
            and not (ignored and group in ignored)
        ]

    def logit_rows(self) -> dict[GeneratedSequence, int]:
        """Return the first row of the logits that each sequence has."""
        rows: dict[GeneratedSequence, int] = {}
        row = 0
        for chunk in self.chunks.values():
            for sample in chunk.samples:
                rows[sample] = row
                row += chunk.beams or 1
        return rows


_log = logging.getLogger(__name__)


@lru_cache(maxsize=16)
def _shape_of(*lengths: int) -> BatchShape:
    """Return the shape of a step; most steps have the lengths of one before."""
    return BatchShape.of(lengths)


# Least probability of a drafted token, least part of the tokens of a step that drafts have to add, and what they are
# expected to save relative to their cost: sequences end at different times.
_LEAST_PROBABILITY, _LEAST_GAIN, _MARGIN = 0.1, 1 / 8, 1.5
_STEP_FAILED = "the model failed on the step that held this request; the server's log says why"
_WORKERS_ENDED = "worker processes ended while they ran this request; the server's log says why"
# A request that was in the steps of this many workers that ended has probably ended them. See decision 0046.
_MAX_CRASHES = 2


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
            blocks: KV memory, which nothing else uses.
            kv_policy: condition for the start of a sequence; see the settings.
        """
        self._limits = limits
        slots = RunningSlots.of(limits)
        # steps of a pipeline divide the running sequences
        self._sequences_per_step = max(1, slots.count // limits.stages)
        self._blocks = blocks
        self._memory = GroupMemory(blocks, reserves=kv_policy == "reserve")
        self._admission = admission
        self._queues = GroupQueues(self._memory, slots, limits.stages)
        self._claims = Claims()
        self._cost, self._draft_cost = StepCost(), DraftCost()
        # of the last step, if all its chunks were of one token: rows, drafted rows, passes, seconds, and the accepted
        # tokens before it
        self._last_rows: tuple[int, int, int, float, int] | None = None
        self._step_size = StepSize(limits.max_step_tokens)
        self._group_of: dict[GeneratedSequence, Group] = {}
        self._numbers = count()
        # groups of each request that have not run yet
        self._new: Counter[RequestState] = Counter()
        # steps in flight, which end in this order
        self._in_flight: deque[StepInFlight] = deque()
        self._step_numbers = count()
        self._is_pipeline = limits.stages > 1
        self._max_in_flight = limits.stages if self._is_pipeline else MAX_STEPS
        # whether the last try found that the next step needs the end of one in flight
        self._is_blocked = False
        self._prefill_tokens = self._decode_tokens = 0
        self._drafted_tokens = self._accepted_tokens = 0

    def snapshot(self) -> GenerationCounts:
        """Return what runs and waits now, and totals. From any thread."""
        return GenerationCounts(
            running=self._queues.num_running,
            waiting=self._queues.num_waiting,
            blocks=self._blocks.counts(),
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            saved_seconds=self._draft_cost.saved_seconds,
            memory_preemptions=self._queues.memory_preemptions,
            order_preemptions=self._queues.order_preemptions,
        )

    def admit(self, request: Request, now: float) -> Forecast:
        """Count a request as waiting and return its expected run time. From any thread.

        Raises:
            RequestError: it can never run: it is too long, has too many samples or needs too many KV blocks.
        """
        options = request.options.generation
        assert options is not None
        for row, prompt in enumerate(request.prompts):
            self._check_fits(row, prompt, options)
        forecast = self._cost.forecast(
            request,
            max_step_tokens=self._limits.max_step_tokens,
            max_running_sequences=self._sequences_per_step,
            part_before=self._claims.part_before(request),
        )
        self._admission.enter(request, forecast, now)
        return forecast

    def withdraw(self, request: Request, forecast: Forecast) -> None:
        self._admission.leave(Work(1, request.num_tokens, forecast.seconds))

    def add(self, request: RequestState) -> None:
        sequences = cast(tuple[GeneratedSequence, ...], request.sequences)
        self._is_blocked = False
        if self._queues.is_empty:
            # the time until the next step is not a part of the last one
            self._last_rows = None
        number, samples = next(self._numbers), sequences[0].generation.n
        for row in range(0, len(sequences), samples):
            rank, claim = self._claims.enter(sequences[row])
            group = Group((rank, number, row), sequences[row : row + samples], claim)
            self._group_of.update(dict.fromkeys(group.sequences, group))
            self._new[request] += 1
            self._queues.add(group)

    def wake_at(self, now: float) -> float | None:
        """Return `now` if a step can be scheduled.

        None if nothing waits, or the next step has to wait for one in flight.
        """
        return None if self._queues.is_empty or self._has_to_wait else now

    @property
    def _has_to_wait(self) -> bool:
        """Whether the next step has to wait for the end of one in flight."""
        return self._is_blocked or len(self._in_flight) == self._max_in_flight

    def schedule(self, now: float) -> Batch | None:
        if self._has_to_wait:
            return None
        step = self._next_step()
        if step is not None:
            self._in_flight.append(step)
            return self._batch_of(step, now)
        self._is_blocked = bool(self._in_flight)
        return None

    def trim(self, batch: Batch, now: float) -> Batch | None:
        self._admission.mark_ended(batch)
        step = self._in_flight[-1]
        for group in [group for group in step.chunks if group.is_finished]:
            del step.chunks[group]
            step.drafts.pop(group, None)
        if step.chunks:
            return self._batch_of(step, now)
        self._in_flight.pop()
        self._memory.copies.take_back(step.copies)
        self._is_blocked = False
        return None

    def update(self, batch: Batch, result: BatchResult) -> list[Event]:
        self._admission.mark_ended(batch)
        self._is_blocked = False
        if not self._in_flight or self._in_flight[0].number > batch.number:
            # a fault kept a later step from starting, which ended first; all requests have failed
            return []
        step = self._in_flight.popleft()
        if step.number != batch.number:
            # a fault kept it from starting, and its requests have failed
            self._undo(step, "batch")
            return self.update(batch, result)
        if result.failure is not None:
            return self._fail_step(step, batch.shape.tokens, result)
        steps = result.steps if step.steps > 1 else 1
        outputs, end = result.outputs, sum(map(len, step.drafts.values()))
        passes = max(map(len, step.drafts.values()), default=0)
        self._learn(batch, end, passes, result, steps)
        if self._memory.copies.in_flight:
            self._memory.copies.end(step.copies)
        drafted = iter(cast(Sequence[SampledToken], outputs[:end]))
        rows: tuple[Chunk, ...] = ()
        more: tuple[SampledToken, ...] = ()
        events: list[Event] = []
        # the end of one sample ends others, which then have no events
        present = {group: step.chunks[group] for group in step.groups}
        self._count_served(present, steps)
        for group, chunk in step.chunks.items():
            begin, end = end, end + len(chunk.samples)
            if step.drafts:
                rows = step.drafts.get(group, ())
                more = tuple(islice(drafted, len(rows)))
            if group not in present:
                continue
            if step.steps > 1:
                self._memory.run_on(group, chunk, cast(BeamStep, outputs[begin]).count)
            if group.is_plain and chunk.samples:
                token = cast(SampledToken, outputs[begin])
                if rows:
                    events += self._update_drafted(group, (chunk, *rows), (token, *more))
                else:
                    events += self._update_plain(group, chunk, token)
            else:
                events += self._update_group(group, chunk, outputs[begin:end])
        return events

    def remove(self, request: RequestState) -> None:
        self._is_blocked = False
        groups = {self._group_of[s]: None for s in request.sequences if s in self._group_of}
        waiting = [group for group in groups if group.first.status == "waiting"]
        # a fault may have come between the start of a group and its first step
        new = [group for group in groups if not group.has_started]
        for group in waiting:
            self._queues.remove_waiting(group)
        self._admission.leave(self._leave(new))
        for sequence in request.sequences:
            sequence.finish()
        for group in groups:
            if group in waiting:
                self._forget(group)
            else:
                self._end(group)

    def drain(self) -> None:
        """Do nothing: no step waits for more requests."""

    def _check_fits(self, row: int, prompt: Prompt, options: GenerationOptions) -> None:
        """Check that a prompt can run when nothing else does.

        Raises:
            RequestError: it is too long, has too many samples or beams, or needs too many KV blocks.
        """
        length = len(prompt.token_ids)
        if length + options.max_tokens > self._limits.max_sequence_tokens:
            raise RequestError(
                f"row {row}: the prompt has {length} tokens and max_tokens is {options.max_tokens};"
                f" this model takes at most {self._limits.max_sequence_tokens} in all"
            )
        name, branches = (
            ("num_beams", options.num_beams) if options.num_beams > 1 else ("n", options.n)
        )
        most = min(self._limits.max_running_sequences, self._limits.max_step_tokens)
        if branches > most:
            raise RequestError(
                f"{name} is {branches}; this model generates at most {most} sequences at a time"
            )
        # without reservations, samples that do not fit together run one after another; beams cannot
        shares = not self._memory.reserves and options.num_beams == 1
        needed = self._memory.need(prompt, options.max_tokens, 1 if shares else branches)
        blocks = self._blocks
        if needed > blocks.num_blocks:
            raise RequestError(
                f"row {row}: {prompt.num_tokens} tokens and {branches} times max_tokens of {options.max_tokens} need"
                f" {needed} KV blocks of {blocks.block_size} tokens; this model has {blocks.num_blocks} (kv_bytes)"
            )

    def _next_step(self) -> StepInFlight | None:
        """Return what the next step runs of each group; None if nothing can run now."""
        steps = self._in_flight
        in_flight = [step.groups for step in steps]
        held = set(chain.from_iterable(in_flight))
        busy: Set[Group] = held
        before: StepInFlight | None = None
        logit_rows: dict[GeneratedSequence, int] = {}
        if steps and not self._is_pipeline and not steps[-1].is_void:
            if steps[-1].steps > 1 or steps[-1].drafts:
                # it chooses an unknown number of tokens
                return None
            # it runs the tokens that the step before it chooses
            before, busy = steps[-1], frozenset()
            several = [group for group in in_flight[-1] if len(group.sequences) > 1]
            if not all(group.can_follow or group.is_ending for group in several):
                return None
            logit_rows = before.logit_rows()
        size = self._step_size
        try:
            parts = self._queues.next_parts(size, held, busy)
        except HeldByStepError:
            return None
        if not parts:
            return None
        latency = self._limits.step_latency_seconds
        tokens = size.tokens
        if max([part.remaining for part in parts]) > 1 or self._limits.speculation:
            tokens = tokens_of_step(parts, tokens, self._cost, latency, beside=busy)
        count = self._launch_steps(parts, tokens) if parts[0].group.has_beams else 1
        chunks = self._memory.next_chunks(parts, tokens, logit_rows, begins_beams=count > 1)
        copies = self._memory.copies
        if count > 1:
            for group, chunk in chunks.items():
                self._memory.run_on(group, chunk, count)
        return StepInFlight(
            next(self._step_numbers),
            None if before is None else before.number,
            chunks,
            copies.assign(chunks.values()) if copies.next else {},
            self._drafts(chunks, tokens) if self._limits.speculation else {},
            count,
        )

    def _launch_steps(self, parts: Sequence[Part], tokens: int) -> int:
        """Return how many steps of these parts may run in one launch.

        Its steps differ in the positions alone: no search begins a block or comes to its last token, and nothing waits.
        Prompts of one token may begin it, with tokens and blocks for all beams. It has several steps if four are
        expected to end in time; its own clock ends it.
        """
        most = self._limits.launch_steps
        if most == 1 or self._queues.num_waiting:
            return 1
        size, rows, sources, blocks = self._blocks.block_size, 0, 0, 0
        for group, remaining, least_tokens in parts:
            start, prompt = group.first.num_computed, group.first.num_tokens
            if not group.has_beams or remaining > 1 or start < prompt > 1:
                return 1
            if start < prompt:
                blocks += group.max_branches - group.reserved
            rows += group.max_branches
            sources += least_tokens - group.num_branches
            most = min(most, size - start % size, group.max_length - 2 - start)
        if rows + sources > tokens or blocks > self._blocks.available:
            return 1
        four = self._cost.seconds(4, 4 * rows + sources)
        return max(1, most) if four < device_plan.LAUNCH_SECONDS else 1

    def _drafts(self, chunks: Mapping[Group, Chunk], tokens: int) -> dict[Group, tuple[Chunk, ...]]:
        """Return rows of drafted tokens, where `tokens` of a step are left.

        They add at most half of its expected seconds. A row runs if it probably saves more than it costs.
        """
        speculation, memory = self._limits.speculation, self._memory
        assert speculation is not None
        used = sum([len(chunk.token_ids) + len(chunk.encodes) for chunk in chunks.values()])
        rows = sum([chunk.beams or 1 for chunk in chunks.values()])
        seconds = self._draft_cost.step_seconds(rows)
        # end tokens are banned before `min_tokens`; penalties count guesses, which a model makes in the step
        has_model = not speculation.shortest
        drafting = [
            group
            for group, chunk in chunks.items()
            if group.may_draft
            and chunk.samples
            and len(chunk.token_ids) == 1
            and chunk.num_generated >= (options := group.first.generation).min_tokens
            and not (has_model and options.has_penalties)
        ]
        sequences = len(drafting) if has_model else 0
        row = self._draft_cost.row_seconds(self._cost.per_token, sequences)
        free, least = min(self._queues.num_free, tokens - used), _LEAST_PROBABILITY
        if not seconds:
            return {}
        if row:
            free = min(free, int(seconds / 2 / row))
            # a token that is chosen saves its part of a later step
            least = max(least, _MARGIN * row * rows / seconds)
        drafts: dict[Group, list[int]] = {}
        gain = 0.0
        for group in drafting:
            first = group.first
            most = min(free, group.max_length - first.length)
            if most < 1:
                continue
            group.drafter = group.drafter or speculation.new_drafter()
            num_unknown = int(chunks[group].follows is not None)
            draft, expected = group.drafter.draft(first.token_ids, num_unknown, most, least)
            if draft:
                drafts[group] = draft
                free -= len(draft) - num_unknown
                gain += expected
        # the next step cannot start ahead of it
        if gain < _LEAST_GAIN * used:
            return {}
        keep = self._queues.num_running
        found = {g: memory.draft_rows(g, chunks[g], drafts[g], keep=keep) for g in drafts}
        return {group: each for group, each in found.items() if each}

    def _learn(
        self, batch: Batch, drafted: int, passes: int, result: BatchResult, steps: int
    ) -> None:
        tokens = batch.tokens_of(steps) // steps if steps > 1 else batch.shape.tokens
        seconds = result.seconds / steps
        self._cost.learn(tokens, seconds)
        self._step_size.grow()
        if not self._limits.speculation:
            return
        if self._last_rows is not None:
            # until this step could begin
            rows, of_drafts, passed, before, accepted = self._last_rows
            accepted = self._accepted_tokens - accepted
            self._draft_cost.learn(rows, of_drafts, before + result.idle, passed, accepted)
        is_of_rows = tokens == sum([chunk.beams or 1 for chunk in batch.chunks])
        last = tokens - drafted, drafted, passes, seconds, self._accepted_tokens
        self._last_rows = last if is_of_rows else None

    def _batch_of(self, step: StepInFlight, now: float) -> Batch:
        chunks = tuple(step.chunks.values())
        if step.drafts:
            chunks = (*chain.from_iterable(step.drafts.values()), *chunks)
        beams = sum([chunk.beams for chunk in chunks])
        lengths = [1] * beams
        lengths += [len(chunk.token_ids) for chunk in chunks if not chunk.beams]
        sources = [len(chunk.encodes) for chunk in chunks if chunk.encodes]
        shape = _shape_of(*lengths, *sources)
        reason = f"{lengths.count(1)} of one token, {self._queues.num_waiting} sequences waiting"
        sequences = tuple([chunk.sequence for chunk in chunks])
        seconds = self._cost.seconds(1, shape.tokens)
        seconds = min(step.steps * seconds, max(seconds, device_plan.LAUNCH_SECONDS))
        copies = tuple((source, copy) for copy, source in step.copies.items())
        of_launch = step.number, step.after, step.steps
        batch = Batch(sequences, shape, seconds, reason, chunks, copies, *of_launch)
        new = [group for group in step.chunks if not group.has_started]
        left = [self._leave(new)] if new else []
        self._admission.mark_running(batch, now + seconds, *left)
        return batch

    def _fail_step(self, step: StepInFlight, tokens: int, result: BatchResult) -> list[Event]:
        """Return the failures of a step that has failed; groups without one run again."""
        failure, self._last_rows = result.failure, None
        if step.is_void or failure is None:
            return []
        present = step.groups
        if failure == "worker":
            # steps that do not follow it ran at the same time, in other stages
            others = [each for each in self._in_flight if each.after is None]
            present += [group for each in others for group in each.groups]
        self._undo(step, failure)
        if failure == "memory" and (
            len(step.chunks) > 1 or next(iter(step.chunks)).least_tokens < tokens
        ):
            self._step_size.reduce(tokens)
            _log.warning("too little memory for a step of %d tokens", tokens)
            return []
        if failure == "worker":
            return self._restart_all(present)
        if failure == "adapter":
            # its client may have left
            named = result.named(group.first for group in present)
            return [SequenceFailure(each, EngineError(result.reason)) for each in named]
        error = EngineError(OUT_OF_MEMORY if failure == "memory" else _STEP_FAILED)
        return [SequenceFailure(group.first, error) for group in present]

    def _undo(self, step: StepInFlight, failure: Failure) -> None:
        # the last one first: it was scheduled last
        lost = [each for each in self._in_flight if failure == "worker" or each.after is not None]
        for each in (*reversed(lost), step):
            for group in each.groups:
                self._memory.run_on(group, each.chunks[group], 0)
            each.is_void = True
            self._memory.copies.take_back(each.copies)

    def _restart_all(self, present: list[Group]) -> list[Event]:
        """Let all running groups start again, after their worker ended; return the failures."""
        requests = {group.first.request: group.first for group in present}
        self._queues.preempt_all()
        self._memory.forget_contents()
        for request in requests:
            request.crashes += 1
        return [
            SequenceFailure(sequence, EngineError(_WORKERS_ENDED))
            for request, sequence in requests.items()
            if request.crashes >= _MAX_CRASHES
        ]

    def _update_plain(self, group: Group, chunk: Chunk, token: SampledToken) -> tuple[Event, ...]:
        if token.is_pending:
            self._run_again(group, chunk)
            return ()
        first, length = group.first, len(chunk.token_ids)
        first.num_unknown -= 1
        end = chunk.start + length
        if end % self._blocks.block_size < length:
            self._memory.store(group, chunk, end)
        event = append_token(first, token)
        if first.status == "finished":
            self._end(group)
        return (event,)

    def _update_drafted(
        self, group: Group, rows: Sequence[Chunk], tokens: Sequence[SampledToken]
    ) -> list[Event]:
        """Return the events of a group's rows, up to a token that was not drafted."""
        first = group.first
        # penalties of the rows count the guess of a token that was not known
        (*guessed, _) = rows[1].drafted
        known = first.token_ids[rows[0].start]
        is_right = not guessed or guessed[0] in {UNKNOWN_GUESS, known}
        events = [*self._update_plain(group, rows[0], tokens[0])]
        accepted = 0
        for row, before, token in zip(rows[1:], tokens, tokens[1:], strict=False):
            guess = row.token_ids[0] if token.guess is None else token.guess
            is_next = guess == before.token_id and not before.is_pending
            if not (is_next and is_right) or first.status == "finished":
                break
            accepted += 1
            first.num_computed += 1
            first.num_unknown += 1
            self._claims.serve([(group.claim, 1)])
            events += self._update_plain(group, row, token)
        self._decode_tokens += accepted
        self._drafted_tokens += len(rows) - 1
        self._accepted_tokens += accepted
        if group.drafter is not None and first.status != "finished":
            group.drafter.learn(len(rows) - 1, accepted)
        if first.status != "finished":
            self._memory.give_back(group)
        return events

    def _update_group(self, group: Group, chunk: Chunk, outputs: Sequence[object]) -> list[Event]:
        """Return the events of a group that has run, and split or release it."""
        if group.has_beams:
            self._memory.store(group, chunk, chunk.end)
            events = [
                event
                for step in cast(Sequence[BeamStep], outputs)
                for event in self._answers(group, step)
            ]
        else:
            tokens = cast(Sequence[SampledToken], outputs)
            for token in tokens:
                if token.is_pending:
                    self._run_again(group, chunk)
                    return []
            for sample in chunk.samples:
                sample.num_unknown -= 1
            self._memory.store(group, chunk, chunk.end)
            events = list(map(append_token, group.sequences, tokens))
            if len(events) > 1 and not group.is_finished:
                self._split(group)
                return events
        if group.first.status == "finished" and group.is_finished:
            self._end(group)
        return events

    def _run_again(self, group: Group, chunk: Chunk) -> None:
        """Let the last token of a group run again for its logits."""
        self._memory.run_on(group, chunk, 0)
        group.first.num_computed = chunk.end - 1
        for step in self._in_flight:
            step.ignored.add(group)
        # until then its block is not shared
        self._memory.store(group, chunk, chunk.end - 1)

    def _count_served(self, chunks: Mapping[Group, Chunk], steps: int) -> None:
        """Count the tokens of groups that have run in a launch of some steps."""
        total = generated = 0
        served: list[tuple[Claim, int]] = []
        for group, chunk in chunks.items():
            count = steps * len(chunk.token_ids)
            if chunk.start < chunk.sequence.num_tokens:
                if chunk.beams:
                    # a token in all these rows
                    count -= chunk.beams - 1
                    generated += count - 1
            elif chunk.samples and (count == 1 or chunk.beams):
                generated += count
            of_group = count + len(chunk.encodes)
            total += of_group
            served.append((group.claim, of_group))
        self._decode_tokens += generated
        self._prefill_tokens += total - generated
        self._claims.serve(served)

    def _answers(self, group: Group, step: BeamStep) -> list[Event]:
        if step.error is not None:
            return [SequenceFailure(group.first, step.error)]
        if step.answers is None:
            self._memory.follow(group, step.parents, step.count)
            return []
        return write_answers(group.sequences, step.answers)

    def _split(self, group: Group) -> None:
        groups = self._queues.split(group)
        group.claim.groups += len(groups)
        self._forget(group)
        self._group_of.update((each.first, each) for each in groups)

    def _end(self, group: Group) -> None:
        self._queues.remove_running(group)
        self._forget(group)

    def _forget(self, group: Group) -> None:
        for sequence in group.sequences:
            del self._group_of[sequence]
        self._claims.leave(group.claim)

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
