"""A toy model that generates from what its KV memory really holds.

The next token is a hash of all tokens before it, as they are read through the block table. A wrong table, a copy that
is not made, or a block that is used again too early gives wrong tokens.
"""

from collections import Counter
from hashlib import blake2b

from varlen.engine import Engine
from varlen.generation_options import GenerationOptions
from varlen.memory.blocks import BlockPool
from varlen.metrics import Stats
from varlen.request import GeneratedPart
from varlen.scheduling.admission import Admission
from varlen.scheduling.iteration import IterationScheduler
from varlen.scheduling.step_limits import StepLimits
from varlen.sequence import BatchResult, SampledToken

from ..fakes.engine_parts import Clock, FakeReply, HeldExecutor
from ..requests import request_of

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


class Writer:
    """Ends a sequence after END or `max_tokens`."""

    def __init__(self, sequence):
        self.sequence = sequence

    def write(self, token):
        reason = None
        if token.token_id == END:
            reason = "stop"
        elif self.sequence.num_generated == self.sequence.generation.max_tokens:
            reason = "length"
        return GeneratedPart("", (token.token_id,), finish_reason=reason)


class KvExecutor(HeldExecutor):
    """Runs steps over blocks of (token, position); checks the shape of each step.

    Attributes:
        failures: of the next steps; None runs one.
        steps: all that have started.
    """

    def __init__(self, bench):
        super().__init__(slots=1)
        self.bench = bench
        self.memory = {}
        self.failures = []
        self.steps = []

    def result_of(self, batch):
        self.bench.check_step(batch)
        self.steps.append(batch)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            # it may have written anything into its blocks, and made no copy
            for chunk in batch.chunks:
                self._write(chunk, [None] * len(chunk.token_ids))
            return BatchResult([], 1.0, failure=failure)
        copied = {to: dict(self._block(source)) for source, to in batch.copies}
        self.memory.update(copied)
        outputs = []
        for chunk in batch.chunks:
            self._write(chunk, chunk.token_ids)
        for chunk in batch.chunks:
            context = [self._read(chunk, i) for i in range(chunk.start + len(chunk.token_ids))]
            outputs += [SampledToken(next_token(context, s.sample)) for s in chunk.samples]
        return BatchResult(outputs, 1.0)

    def _block(self, block):
        return self.memory.setdefault(block, {})

    def _write(self, chunk, token_ids):
        size = self.bench.pool.block_size
        for position, token in enumerate(token_ids, start=chunk.start):
            self._block(chunk.block_ids[position // size])[position % size] = (token, position)

    def _read(self, chunk, position):
        size = self.bench.pool.block_size
        token, stored = self._block(chunk.block_ids[position // size])[position % size]
        assert stored == position
        return token


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
        running=8,
        longest=200,
        max_requests=100,
    ):
        self.pool = BlockPool(num_blocks, block_size, prefix_cache=prefix_cache)
        self.admission = Admission(max_requests, 10_000)
        self.limits = StepLimits(
            max_step_tokens=step_tokens,
            max_running_sequences=running,
            max_sequence_tokens=longest,
        )
        self.scheduler = IterationScheduler(
            self.limits, self.pool, policy, self.admission, self._new_writer
        )
        self.executor = KvExecutor(self)
        self.clock = Clock()
        self.engine = Engine(self.scheduler, self.executor, Stats(), self.clock)
        # every sequence, in order of arrival
        self.sequences = []
        self.place = {}

    def _new_writer(self, sequence):
        self.place[sequence] = len(self.sequences)
        self.sequences.append(sequence)
        return Writer(sequence)

    def submit(self, *prompts, max_tokens=8, n=1, priority=0, deadline=None, reply=None):
        """Submit a request; return its reply. A prompt is a length or token ids."""
        reply = reply or FakeReply()
        rows = [[1] * row if isinstance(row, int) else row for row in prompts]
        options = GenerationOptions(max_tokens=max_tokens, n=n)
        request = request_of(
            *rows, generation=options, priority=priority, deadline_seconds=deadline
        )
        self.engine.submit(request, reply)
        return reply

    def step(self):
        """Run one step of the model; return it, or None if there is none."""
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
        lengths = [len(chunk.token_ids) for chunk in step.chunks]
        assert 0 < sum(lengths) == step.shape.tokens <= self.limits.max_step_tokens
        assert sorted(lengths, key=lambda length: length > 1) == lengths
        assert tuple(chunk.sequence for chunk in step.chunks) == step.sequences
        assert len(set(step.sequences)) == len(step.sequences)
        running = [sequence for sequence in self.sequences if sequence.status == "running"]
        assert len(running) <= self.limits.max_running_sequences
        for chunk in step.chunks:
            assert chunk.start == chunk.sequence.num_computed
            end = chunk.start + len(chunk.token_ids)
            assert len(chunk.block_ids) == self.pool.blocks_of(end)
            assert bool(chunk.samples) == (end == len(chunk.sequence.token_ids))
        self._check_first_come_first_served(step)

    def _check_first_come_first_served(self, step):
        runs = {(s.request, s.row - s.sample) for s in step.sequences}
        last = {}
        for sequence in step.sequences:
            priority = sequence.options.priority
            last[priority] = max(last.get(priority, 0), self.place[sequence])
        for place, sequence in enumerate(self.sequences):
            is_earlier = place < last.get(sequence.options.priority, 0)
            if is_earlier and sequence.status != "finished":
                # samples run as one until their prompt has
                alone = sequence.block_ids or not sequence.sample
                prompt = (sequence.request, sequence.row - sequence.sample)
                assert sequence in step.sequences if alone else prompt in runs

    def check_blocks(self):
        """Check that the used blocks are those of sequences, or of a step in flight."""
        holders = Counter(block for s in self.sequences for block in s.block_ids)
        assert self.pool.counts().used == len(holders)
        for block, number in holders.items():
            assert self.pool.is_shared(block) == (number > 1)
        for sequence in self.sequences:
            assert sequence.num_computed <= len(sequence.block_ids) * self.pool.block_size or (
                sequence.status == "finished"
            )
        for step, *_ in self.executor.in_flight:
            for chunk in step.chunks:
                assert set(chunk.block_ids) <= holders.keys()

    def check_idle(self):
        """Check that nothing waits or runs, and every block is free."""
        counts = self.scheduler.snapshot()
        assert (counts.running, counts.waiting) == (0, 0)
        assert (counts.blocks.used, counts.blocks.reserved) == (0, 0)
        assert self.pool.available == self.pool.num_blocks
        assert self.admission.depth == (0, 0)
        assert self.scheduler.wake_at(0.0) is None
        assert not any(sequence.block_ids for sequence in self.sequences)
        # nothing is remembered of what has ended
        assert not self.scheduler._group_of
        assert not self.scheduler._new


def tokens_of(reply):
    """Return the generated tokens of each row."""
    return {
        row: [token for part in parts for token in part.token_ids]
        for row, parts in reply.outputs.items()
    }
