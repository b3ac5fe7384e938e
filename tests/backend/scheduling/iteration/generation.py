"""A toy model that generates from what its KV memory really holds.

The next token is a hash of all tokens before it, and of the source text, as they are read through the block tables. So
is each step of a beam search, of the tokens of all its beams. A wrong table, a copy that is not made, or a block that
is used again too early gives wrong tokens.
"""

import random
from collections import Counter, defaultdict
from hashlib import blake2b
from itertools import permutations

import numpy as np

from tests.backend.fakes.engine_parts import Clock, FakeReply, HeldExecutor
from varlen.memory.blocks import BlockPool
from varlen.request.generation import GenerationOptions
from varlen.request.request import GeneratedPart, Prompt, Request, RequestOptions, Source
from varlen.scheduling.admission import Admission
from varlen.scheduling.batch import BatchResult
from varlen.scheduling.device_plan import BeamAnswer, BeamStep, SampledToken
from varlen.scheduling.engine import Engine
from varlen.scheduling.iteration.group_queues import RunningSlots
from varlen.scheduling.iteration.iteration import IterationScheduler
from varlen.scheduling.iteration.speculation import UNKNOWN_GUESS
from varlen.scheduling.iteration.step_size import StepLimits
from varlen.telemetry.metrics import Stats

# a sequence ends with this token, or after `max_tokens`
END = 0
VOCABULARY = 12


def next_token(token_ids, sample):
    """Return the token after these, of one of the samples of a prompt."""
    text = ",".join(map(str, [sample, *token_ids]))
    return blake2b(text.encode(), digest_size=1).digest()[0] % VOCABULARY


def answer(prompt, max_tokens, sample=0):
    """Return the tokens that follow a prompt."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + max_tokens:
        token_ids.append(next_token(token_ids, sample))
        if token_ids[-1] == END:
            break
    return token_ids[len(prompt) :]


def search_step(contexts, num_generated, options):
    """Return the step of a search.

    Args:
        contexts: source and tokens of each beam.
        num_generated: number of generated tokens of each.
        options: options of its request.
    """
    rng = random.Random(repr(contexts))
    tokens = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, options.num_beams))]
    parents = [rng.randrange(len(contexts)) for _ in tokens]
    answers = None
    if num_generated + 1 == options.max_tokens or rng.random() < 0.1:
        ends = [(*contexts[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        generated = [tuple(end[-num_generated - 1 :]) for end in ends]
        answers = tuple(BeamAnswer(each, rng.random(), "stop") for each in generated[: options.n])
    return BeamStep(tuple(parents), tuple(tokens), answers)


def search_answers(prompt, source, options):
    """Return the tokens of each answer of a search; those not found are empty."""
    beams, step = [list(prompt)], None
    while step is None or step.answers is None:
        contexts = [[~token for token in source] + beam for beam in beams]
        step = search_step(contexts, len(beams[0]) - len(prompt), options)
        beams = [
            [*beams[parent], token]
            for parent, token in zip(step.parents, step.token_ids, strict=True)
        ]
    found = [list(each.token_ids) for each in step.answers]
    return found + [[]] * (options.n - len(found))


class Writer:
    """Ends a sequence after END or `max_tokens`, or with the answer of its search."""

    def __init__(self, sequence):
        self.sequence = sequence

    def write(self, token):
        if isinstance(token, BeamAnswer):
            return GeneratedPart(
                "", token.token_ids, finish_reason=token.finish_reason, score=token.score
            )
        reason = None
        if token.token_id == END:
            reason = "stop"
        elif self.sequence.num_generated == self.sequence.generation.max_tokens:
            reason = "length"
        return GeneratedPart("", (token.token_id,), finish_reason=reason)


def _begins(chunk):
    """Return whether a search begins with a row for each beam."""
    return chunk.beams > 0 and chunk.start < chunk.sequence.num_tokens


class KvExecutor(HeldExecutor):
    """Runs steps over blocks of (token, position); checks the shape of each step.

    Attributes:
        failures: failures of the next steps, perhaps with the name of an adapter; None runs one.
        steps: all that have run or failed.
        skipped: steps that did not run, because the one before failed.
        has_failed: whether one has failed; steps are smaller for some time.
        ended_in: the step in which a worker has ended, until the scheduler knows it; in a pipeline, others start.
        is_pending: returns whether a sequence gets no token in this step.
        seconds: returns the run time of a step.
        idle: seconds between the end of a step and the start of one that does not follow it.
        is_wrong: returns whether the guess of a draft model is wrong.
    """

    def __init__(self, bench, slots):
        super().__init__(slots)
        self.bench = bench
        self.memory = {}
        self.failures = []
        self.has_lost_worker = False
        self.steps = []
        self.skipped = []
        # number of the last step that failed or was skipped, and the outputs of the last step
        self.last_failed = None
        self.outputs = []
        # what beams continue, by their places, and the block tables of the beams that ran, by places and position
        self.chosen = {}
        self.tables = {}
        self.has_failed = False
        self.ended_in = None
        self.is_pending = lambda _: False
        self.seconds = lambda _: 1.0
        self.idle = 0.0
        self.is_wrong = lambda: False

    def result_of(self, batch):
        if batch.after is not None and batch.after == self.last_failed:
            self.skipped.append(batch)
            self.last_failed = batch.number
            return BatchResult([], 0.0, failure="skipped")
        self.bench.check_step(batch)
        self.steps.append(batch)
        failure = self._next_failure()
        if failure is None or failure.endswith("late"):
            copied = {to: dict(self._block(source)) for source, to in batch.copies}
            self.memory.update(copied)
        if failure is not None:
            self.has_failed = True
            self.last_failed = batch.number
            # it may have written anything into its blocks
            for chunk in batch.chunks:
                if failure.endswith("late") or not chunk.beams:
                    for table, tokens in self._rows(chunk):
                        self._write(table, chunk.start, [None] * len(tokens))
                self._write(chunk.source_block_ids, 0, [None] * len(chunk.encodes))
            if failure == "worker":
                self.memory.clear()
                self.chosen.clear()
                self.tables.clear()
                self.has_lost_worker = True
                # what runs ahead waits for the result of this one
                self.ended_in = self.ended_in or (batch if self.bench.limits.stages > 1 else None)
            kind, _, adapter = failure.partition(" ")
            return BatchResult([], self.seconds(batch), failure=kind, adapter=adapter)
        chunks = self._drafted(batch.chunks)
        for chunk in chunks:
            self._write(chunk.source_block_ids, 0, [~token for token in chunk.encodes])
            for table, tokens in self._rows(chunk):
                self._write(table, chunk.start, tokens)
        # one for each row of logits
        of_rows, outputs = [], []
        for chunk in [] if batch.steps > 1 else chunks:
            if chunk.sequence.is_searched and chunk.samples:
                outputs.append(self._search(chunk))
                of_rows += [None] * chunk.num_logit_rows
            else:
                outputs += [self._sample(chunk, sample) for sample in chunk.samples]
                of_rows += outputs[len(outputs) - len(chunk.samples) :]
        self.outputs = of_rows
        outputs = self._launched(batch) if batch.steps > 1 else outputs
        idle = self.idle if batch.after is None else 0.0
        return BatchResult(outputs, self.seconds(batch), idle=idle)

    def _next_failure(self):
        """Return the failure of a step that starts, or None."""
        if self.ended_in is not None:
            return "worker"
        return self.failures.pop(0) if self.failures else None

    def complete(self, index=0):
        if self.in_flight[index][0] is self.ended_in:
            self.ended_in = None
        super().complete(index)

    def _rows(self, chunk):
        """Return the block table and the tokens of each row of a chunk."""
        if not chunk.beams:
            return [(chunk.block_ids, self._tokens(chunk))]
        _, tokens = self.chosen.get(chunk.beam_slots, (None, [0] * chunk.beams))
        if _begins(chunk):
            tokens = chunk.token_ids
        return list(zip(self._tables(chunk), [[token] for token in tokens], strict=True))

    def _tables(self, chunk):
        """Return the block table of each beam, once blocks are copied for beams that part."""
        size = self.bench.pool.block_size
        column, place = divmod(chunk.start, size)
        given = [chunk.block_ids[i :: column + 1] for i in range(column + 1)]
        given = [list(row) for row in zip(*given, strict=True)]
        assert len(given) == chunk.beams == chunk.sequence.generation.num_beams
        key = chunk.beam_slots, chunk.start
        if _begins(chunk):
            # the tables of a search before it
            self._forget_tables(chunk.beam_slots)
            self.tables[key] = given
        if key in self.tables:
            # it runs again
            return self.tables[key]
        if chunk.start == chunk.sequence.num_tokens:
            tables = given
            for table in tables[1:] if place else []:
                # the end of the prompt
                self.memory[table[-1]] = dict(self._block(tables[0][-1]))
        else:
            before = self.tables[chunk.beam_slots, chunk.start - 1]
            parents, _ = self.chosen[chunk.beam_slots]
            tables = [[*before[parent]] for parent in parents]
            unused = [before[row][-1] for row in range(chunk.beams) if row not in parents]
            for row, parent in enumerate(parents):
                if not place:
                    tables[row].append(given[row][-1])
                elif parent in parents[:row]:
                    tables[row][-1] = unused.pop(0)
                    self.memory[tables[row][-1]] = dict(self._block(before[parent][-1]))
        self._forget_tables(chunk.beam_slots)
        self.tables[key] = tables
        return tables

    def _forget_tables(self, places):
        self.tables = {key: each for key, each in self.tables.items() if not {*key[0]} & {*places}}

    def _drafted(self, chunks):
        """Return the chunks of a step with the tokens that a draft model guesses."""
        known = {
            chunk.sequence: [*chunk.sequence.token_ids[: chunk.start], *self._tokens(chunk)]
            for chunk in chunks
            if not (chunk.drafted or chunk.beams)
        }
        filled = []
        for chunk in chunks:
            if chunk.token_ids != (UNKNOWN_GUESS,):
                filled.append(chunk)
                continue
            tokens = known[chunk.sequence]
            guess = 1 if None in tokens else next_token(tokens, chunk.sequence.sample)
            tokens.append((guess + self.is_wrong()) % VOCABULARY)
            filled.append(chunk._replace(token_ids=(tokens[-1],), drafted=(UNKNOWN_GUESS,)))
        return filled

    def _tokens(self, chunk):
        """Return the tokens of a chunk; None is one that could not be chosen."""
        if chunk.follows is None:
            return chunk.token_ids
        assert chunk.token_ids == (0,)
        before = self.outputs[chunk.follows]
        return [None if before.is_pending else before.token_id]

    def _search(self, chunk):
        """Return the step of a search; beams that it no longer has run in vain."""
        first = chunk.sequence
        assert chunk.samples == (first,)
        alive = 1 if _begins(chunk) else first.sampler_state
        tables = self._tables(chunk)[:alive] if chunk.beams else [chunk.block_ids]
        contexts = [self._context(chunk, table) for table in tables]
        step = search_step(contexts, chunk.num_generated, first.generation)
        first.sampler_state = len(step.parents)
        dead = first.generation.num_beams - len(step.parents)
        if not chunk.beams:
            # the tables of a search before it
            self._forget_tables(chunk.beam_slots)
        self.chosen[chunk.beam_slots] = (
            [*step.parents, *[0] * dead],
            [*step.token_ids, *[0] * dead],
        )
        return step

    def _launched(self, batch):
        """Return what a launch chooses; some searches take fewer steps, perhaps none."""
        rng = random.Random(batch.number)
        counts = [rng.randint(0, batch.steps) for _ in batch.chunks]
        counts[rng.randrange(len(counts))] = batch.steps
        outputs = []
        for chunk, count in zip(batch.chunks, counts, strict=True):
            parents, answers, taken = [], None, 0
            if not count:
                # a part of the launch lacked memory
                self._write(chunk.source_block_ids, 0, [None] * len(chunk.encodes))
            while taken < count and answers is None:
                now = chunk._replace(start=chunk.start + taken)
                for table, tokens in self._rows(now):
                    self._write(table, now.start, tokens)
                step = self._search(now)
                parents += step.parents
                parents += [0] * (chunk.beams - len(step.parents))
                answers, taken = step.answers, taken + 1
            outputs.append(BeamStep(() if answers else tuple(parents), (), answers, count=taken))
        return outputs

    def _sample(self, chunk, sample):
        if self._tokens(chunk) == [None]:
            return SampledToken(0, is_pending=True)
        token = next_token(self._context(chunk, chunk.block_ids), sample.sample)
        guess = chunk.token_ids[0] if UNKNOWN_GUESS in chunk.drafted else None
        return SampledToken(token, is_pending=self.is_pending(sample), guess=guess)

    def _context(self, chunk, table):
        """Return the source and the tokens of a chunk or a beam, from memory."""
        sequence = chunk.sequence
        source = self._read(chunk.source_block_ids, sequence.prompt.num_source_tokens)
        assert source == [~token for token in source_of(sequence)]
        tokens = self._read(table, chunk.end)
        known = tokens if chunk.beams else sequence.token_ids
        if chunk.follows is not None:
            known = [*known, *self._tokens(chunk)]
        # drafted tokens are in memory only
        assert tokens[: len(known)] == known[: len(tokens)]
        return source + tokens

    def _block(self, block):
        return self.memory.setdefault(block, {})

    def _write(self, block_ids, start, token_ids):
        size = self.bench.pool.block_size
        for position, token in enumerate(token_ids, start=start):
            self._block(block_ids[position // size])[position % size] = (token, position)

    def _read(self, block_ids, count):
        size = self.bench.pool.block_size
        found = [self._block(block_ids[i // size])[i % size] for i in range(count)]
        assert [position for _, position in found] == list(range(count))
        return [token for token, _ in found]


def lengths_of(chunk):
    """Return the number of tokens of each row of a chunk."""
    return [1] * chunk.beams or [len(chunk.token_ids)]


def written_blocks(chunk, block_size):
    """Return the blocks that a chunk writes to, and the host knows."""
    begin = chunk.start // block_size
    if not chunk.beams:
        return list(chunk.block_ids[begin:])
    # of each table the last one, unless only the device knows it
    written = chunk.block_ids[begin :: begin + 1]
    return [block for block in written if any(written)]


def blocks_of_chunk(chunk):
    """Return the blocks that a chunk reads or writes, and the host knows."""
    return {*chunk.block_ids, *chunk.source_block_ids} - ({0} if chunk.beams else set())


def drafted_rows(step):
    """Return the rows of drafted tokens: they follow a row of their sequence."""
    first = {}
    for chunk in step.chunks:
        first[chunk.sequence] = min(chunk.start, first.get(chunk.sequence, chunk.start))
    return [chunk for chunk in step.chunks if chunk.start > first[chunk.sequence]]


def prompt_of_chunk(chunk):
    """Return what tells a prompt from the others of a step."""
    return prompt_of_sequence(chunk.sequence)


def prompt_of_sequence(sequence):
    return sequence.request, sequence.row - sequence.sample


def source_of(sequence):
    """Return the tokens of the source text of a sequence."""
    source = sequence.prompt.payload_tokens(Source)
    return [] if source is None else source.tolist()


class Bench:
    """An engine that generates with the toy model, its clock and its KV memory."""

    def __init__(
        self,
        num_blocks=64,
        block_size=4,
        policy="reserve",
        *,
        prefix_cache=False,
        step_tokens=16,
        latency=0.0,
        running=8,
        longest=200,
        max_requests=100,
        short_slots=0,
        short_tokens=0,
        slots=1,
        stages=1,
        launch_steps=1,
        speculation=None,
    ):
        self.policy = policy
        self.pool = BlockPool(num_blocks, block_size, prefix_cache=prefix_cache)
        self.admission = Admission(max_requests, 10_000)
        self.limits = StepLimits(
            max_step_tokens=step_tokens,
            inter_token_latency_seconds=latency,
            max_running_sequences=running,
            max_sequence_tokens=longest,
            short_slots=short_slots,
            short_tokens=short_tokens,
            stages=stages,
            launch_steps=launch_steps,
            speculation=speculation,
        )
        self.scheduler = IterationScheduler(self.limits, self.pool, policy, self.admission)
        # one more than a pipeline needs: the scheduler keeps to its stages
        self.executor = KvExecutor(self, slots if stages == 1 else stages + 1)
        self.clock = Clock()
        self.scheduler.add = self._add
        self.scheduler.schedule = self._schedule
        self.engine = Engine(self.scheduler, self.executor, Stats(), self.clock, Writer)
        # every sequence, in order of arrival
        self.sequences = []
        # groups that go before others in the step that was scheduled last
        self.overdue = set()

    def _add(self, request):
        self.sequences += request.sequences
        IterationScheduler.add(self.scheduler, request)

    def _schedule(self, now):
        stages = self.limits.stages
        groups = self.scheduler._queues.running
        self.overdue = {group for group in groups if stages > 1 and group.skipped >= stages}
        before = set(groups)
        step = IterationScheduler.schedule(self.scheduler, now)
        self._check_started(set(groups) - before)
        return step

    def submit(
        self,
        *prompts,
        max_tokens=8,
        n=1,
        num_beams=1,
        source=None,
        priority=0,
        tenant="",
        cache_salt="",
        streams=False,
        deadline=None,
        adapter="",
        reply=None,
    ):
        """Submit a request; return its reply.

        A prompt is a length or token ids. All prompts have the same source text.
        """
        reply = reply or FakeReply()
        rows = [[1] * row if isinstance(row, int) else row for row in prompts]
        source = Source(None if source is None else np.array(source, np.int32))
        options = RequestOptions(
            generation=GenerationOptions(max_tokens=max_tokens, n=n, num_beams=num_beams),
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            streams=streams,
            deadline_seconds=deadline,
            adapter=adapter,
        )
        prompts = (Prompt(np.array(row, np.int32), payload=source) for row in rows)
        self.engine.submit(Request(tuple(prompts), options), reply)
        return reply

    def step(self):
        """Run one step of the model; return it, or None if there is none.

        With two slots, the next one has started before.
        """
        self.engine.step()
        self.check_blocks()
        if not self.executor.in_flight:
            return None
        step = self.executor.in_flight[0][0]
        self.executor.complete()
        self.clock.now += 1.0
        return step

    def run_all(self):
        """Run steps until none is left; return them."""
        steps = []
        while (step := self.step()) is not None:
            steps.append(step)
            assert len(steps) < 5000, "it never ends"
        return steps

    def check_step(self, step):
        """Check the limits and the order of a step that starts."""
        lengths = [each for chunk in step.chunks for each in lengths_of(chunk)]
        sources = [len(chunk.encodes) for chunk in step.chunks]
        assert 0 < sum(lengths) + sum(sources) == step.shape.tokens
        # a source that fills the step has its first token beside it
        prompts = set(map(prompt_of_chunk, step.chunks))
        is_alone = len(prompts) == 1
        assert is_alone or step.shape.tokens <= self.limits.max_step_tokens
        assert sum(lengths) <= self.limits.max_step_tokens
        assert sorted(lengths, key=lambda length: length > 1) == lengths
        assert tuple(chunk.sequence for chunk in step.chunks) == step.sequences
        drafted = drafted_rows(step)
        assert len(set(step.sequences)) == len(step.sequences) - len(drafted)
        running = [s for s in self.sequences if s.status == "running"]
        others = [sequence for sequence in running if not self.is_short(sequence)]
        assert len(others) <= self.limits.max_running_sequences
        most = self.limits.max_running_sequences + self.limits.short_slots
        assert max(len(running), sum(map(len, map(lengths_of, step.chunks)))) <= most
        # a step with a source that fills it has no place for others
        groups = self.scheduler._queues.running
        going_on = {prompt_of_sequence(group.first) for group in groups if not group.is_ending}
        if self.limits.stages == 1 and not is_alone and not self.executor.has_failed:
            assert going_on <= prompts <= set(map(prompt_of_sequence, running))
        for chunk in step.chunks:
            if chunk in drafted:
                self._check_drafted(chunk)
            else:
                self._check_chunk(chunk, step.steps)
        self._check_copies(step)
        self._check_order(step)

    def _check_chunk(self, chunk, steps):
        sequence, source = chunk.sequence, source_of(chunk.sequence)
        assert not chunk.samples or any(sample.status == "running" for sample in chunk.samples)
        end = chunk.end
        assert end + steps - 1 == sequence.num_computed
        assert len(chunk.block_ids) == self.pool.blocks_of(end) * (chunk.beams or 1)
        # the token that it chooses is one of the unknown ones
        is_last = end + steps - 1 == sequence.length - bool(chunk.samples)
        assert bool(chunk.samples) == is_last
        # a source is encoded in one piece, when its target starts
        assert list(chunk.encodes) == (source if chunk.start == 0 else [])
        assert len(chunk.source_block_ids) == self.pool.blocks_of(len(source))
        written = written_blocks(chunk, self.pool.block_size)
        if chunk.beams:
            assert len(set(written)) in {0, chunk.beams}
        assert not any(map(self.pool.is_shared, written))

    def _check_drafted(self, chunk):
        sequence, size = chunk.sequence, self.pool.block_size
        assert chunk.samples == (sequence,)
        assert chunk.follows is None
        # its last tokens are guesses of the tokens behind the known ones
        assert chunk.token_ids == chunk.drafted[-1:]
        assert chunk.end - len(chunk.drafted) == len(sequence.token_ids)
        # the last token of an answer never runs
        assert chunk.end < sequence.num_tokens + sequence.generation.max_tokens
        assert chunk.end > sequence.num_computed
        assert len(chunk.block_ids) == self.pool.blocks_of(chunk.end)
        assert not any(map(self.pool.is_shared, written_blocks(chunk, size)))

    def _check_copies(self, step):
        sources, copies = {source for source, _ in step.copies}, [to for _, to in step.copies]
        assert len(set(copies)) == len(copies)
        assert not sources & set(copies)
        assert not any(map(self.pool.is_shared, copies))

    def _check_order(self, step):
        groups = sorted(set(self.scheduler._group_of.values()), key=lambda group: group.order)
        running = [group for group in groups if group.first.status == "running"]
        if self.limits.stages > 1:
            *others, _ = self.scheduler._in_flight
            busy = {group for other in others for group in other.groups}
            running = [group for group in running if group not in busy]
            running.sort(key=lambda group: group not in self.overdue)
        running = [g for g in running if g.first in step.sequences or not g.is_ending]
        runs = [group.first in step.sequences for group in running]
        # the first ones of those that have started
        assert sorted(runs, reverse=True) == runs

    def _check_started(self, started):
        """Check that groups have started in order; short ones pass all but each other."""
        waiting = self.scheduler._queues._waiting
        for group in started:
            passed = (
                filter(self._is_short_group, waiting) if self._is_short_group(group) else waiting
            )
            assert all(group.order < other.order for other in passed)

    def is_short(self, sequence):
        """Return whether a sequence may run in a place for short ones."""
        options = sequence.generation
        tokens = sequence.prompt.num_tokens + options.max_tokens
        return max(options.n, options.num_beams) == 1 and tokens <= self.limits.short_tokens

    def _is_short_group(self, group):
        return self.is_short(group.first)

    def check_blocks(self):
        """Check that running groups, also in flight, own the used blocks."""
        queues = self.scheduler._queues
        groups = list(queues.running)
        assert queues.num_running == sum(group.max_branches for group in groups)
        assert queues.num_waiting == sum(group.max_branches for group in queues._waiting)
        branches = [group.first for group in groups]
        tables = [branch.block_ids for branch in branches]
        tables += [group.source_block_ids for group in groups]
        tables += [group.beams.held() for group in groups if group.beams]
        taken = [slot for group in groups if group.beams for slot in group.beams.slots]
        assert len(set(taken)) == len(taken)
        slots = RunningSlots.of(self.limits)
        assert all(0 <= slot < slots.count + slots.short_count for slot in taken)
        # a step that failed copies them again
        copies, kept = self.scheduler._memory.copies, self.scheduler._memory.copies.kept
        assert set(kept) <= copies.sources()
        tables.append(kept)
        holders = Counter(block for table in tables for block in table)
        assert self.pool.counts().used == len(holders)
        for block, number in holders.items():
            assert self.pool.is_shared(block) == (number > 1)
        for group, branch in zip(groups, branches, strict=True):
            # beams know where theirs are
            columns = len(branch.block_ids) + (len(group.beams.blocks) if group.beams else 0)
            assert branch.num_computed <= columns * self.pool.block_size
        assert not any(each.block_ids for each in self.sequences if each not in branches)
        for each in (copies.next, *copies.in_flight):
            assert each.keys() <= holders.keys()
        for step in self.scheduler._in_flight:
            for group in step.groups:
                for chunk in (step.chunks[group], *step.drafts.get(group, ())):
                    assert blocks_of_chunk(chunk) <= holders.keys()
        if self.limits.stages > 1:
            self._check_pipeline()
        self._check_reservations(groups)

    def _check_pipeline(self):
        """Check that steps in flight are independent, and that no group waits for long."""
        steps, size = self.scheduler._in_flight, self.pool.block_size
        assert len(steps) <= self.limits.stages
        assert all(batch.after is None for batch, *_ in self.executor.in_flight)
        chunks = [[step.chunks[group] for group in step.groups] for step in steps]
        sequences = [chunk.sequence for step in chunks for chunk in step]
        assert len(set(sequences)) == len(sequences)
        for step, other in permutations(chunks, 2):
            written = {block for chunk in step for block in written_blocks(chunk, size)}
            assert all(written.isdisjoint(blocks_of_chunk(chunk)) for chunk in other)
        # see `take_share`
        if not self.executor.has_failed:
            assert all(
                group.skipped < 2 * self.limits.stages for group in self.scheduler._queues.running
            )

    def _check_reservations(self, groups):
        assert self.pool.counts().reserved == sum(group.reserved for group in groups)
        if self.policy == "optimistic":
            # blocks of present tokens only
            for group in groups:
                table, tokens = group.first.block_ids, group.first.length
                # the table has one block more after a step that was ignored
                assert group.reserved <= max(0, self.pool.blocks_of(tokens) - len(table))
            return
        # memory never interrupts a sequence, though the order may
        assert self.scheduler.snapshot().memory_preemptions == 0
        held, reserved = defaultdict(set), Counter()
        for group in groups:
            prompt = prompt_of_sequence(group.first)
            reserved[prompt] += group.reserved
            own = group.beams.held() if group.beams else []
            held[prompt].update(group.source_block_ids, group.first.block_ids, own)
        for request, row in held:
            options = request.request.options.generation
            prompt = request.request.prompts[row // options.n]
            branches = max(options.n, options.num_beams)
            most = self.scheduler._memory.need(prompt, options.max_tokens, branches)
            if self.scheduler.snapshot().preemptions or self.executor.has_lost_worker:
                # a sample that starts again reserves all that it needs by itself
                most = branches * self.scheduler._memory.need(prompt, options.max_tokens, 1)
            assert len(held[request, row]) + reserved[request, row] <= most

    def check_idle(self):
        """Check that nothing waits or runs, and every block is free."""
        counts = self.scheduler.snapshot()
        assert (counts.running, counts.waiting) == (0, 0)
        assert (counts.blocks.used, counts.blocks.reserved) == (0, 0)
        assert self.pool.available == self.pool.num_blocks
        assert self.admission.depth == (0, 0)
        assert self.scheduler.wake_at(0.0) is None
        assert not any(sequence.block_ids for sequence in self.sequences)
        assert not self.scheduler._memory.copies.next
        assert not self.scheduler._memory.copies.in_flight
        # nothing is remembered of what has ended
        assert not self.scheduler._group_of
        assert not self.scheduler._new
        assert not self.scheduler._claims._share._backlogs


def tokens_of(reply):
    """Return the generated tokens of each row."""
    return {
        row: [token for part in parts for token in part.token_ids]
        for row, parts in reply.outputs.items()
    }
