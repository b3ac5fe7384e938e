"""The same engine serves a model that answers step by step.

The toy model counts: a prompt `[n]` needs n steps, and step k outputs k. Its scheduler is iteration-level first come,
first served: running sequences go before waiting ones, and one that finishes frees its place at the next step.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.fakes.engine_parts import Clock, FakeReply, HeldExecutor
from tests.backend.requests import request_of
from varlen.costs.model import BatchShape
from varlen.errors import DeadlineError, EngineError, QueueFullError, RequestCancelled
from varlen.scheduling.batch import Batch, BatchResult, Forecast, SequenceFailure, SequenceOutput
from varlen.scheduling.engine import Engine
from varlen.telemetry.metrics import Stats

POISON = 13


class StepScheduler:
    """Schedules up to `width` sequences per step, each for the steps in its prompt."""

    def __init__(self, width, max_requests=1000):
        self.width = width
        self.max_requests = max_requests
        self.admitted = 0
        self.waiting = []
        self.steps = {}
        self.batches = []

    def admit(self, request, now):
        if self.admitted == self.max_requests:
            raise QueueFullError("the queue is full")
        self.admitted += 1
        return Forecast()

    def add(self, request):
        self.waiting += request.sequences

    def wake_at(self, now):
        return now if self.waiting else None

    def schedule(self, now):
        # running sequences first, each group in order of arrival
        self.waiting.sort(key=lambda sequence: sequence not in self.steps)
        chosen, self.waiting = self.waiting[: self.width], self.waiting[self.width :]
        for sequence in chosen:
            sequence.status = "running"
        self.batches.append(chosen)
        return self._batch(chosen)

    def trim(self, batch, now):
        return self._batch([s for s in batch.sequences if s.status == "running"])

    def update(self, batch, result):
        running = [s for s in batch.sequences if s.status == "running"]
        if result.failure is not None:
            return [SequenceFailure(s, EngineError("the step failed")) for s in running]
        events = []
        for sequence, output in zip(batch.sequences, result.outputs, strict=True):
            if sequence.status != "running":
                continue
            events.append(SequenceOutput(sequence, output))
            self.steps[sequence] = self.steps.get(sequence, 0) + 1
            if self.steps[sequence] == sequence.prompt.token_ids[0]:
                self._finish(sequence)
            else:
                sequence.status = "waiting"
                self.waiting.append(sequence)
        return events

    def remove(self, request):
        self.waiting = [s for s in self.waiting if s.request is not request]
        for sequence in request.sequences:
            if sequence.status != "finished":
                self._finish(sequence)

    def drain(self):
        pass

    def _finish(self, sequence):
        sequence.finish()
        self.steps.pop(sequence, None)
        if not sequence.request.unfinished:
            self.admitted -= 1

    def _batch(self, sequences):
        if not sequences:
            return None
        shape = BatchShape.of([sequence.num_tokens for sequence in sequences])
        return Batch(tuple(sequences), shape, 1.0, "a step")


class StepExecutor(HeldExecutor):
    """Outputs each sequence's step number, when a test completes the batch."""

    def __init__(self, scheduler, slots):
        super().__init__(slots)
        self.scheduler = scheduler

    def result_of(self, batch):
        running = [each for other, *_ in self.in_flight for each in other.sequences]
        assert not set(running) & set(batch.sequences), "a sequence in two batches at once"
        if any(s.prompt.token_ids[0] == POISON for s in batch.sequences):
            return BatchResult([], 1.0, failure="batch")
        return BatchResult(
            [np.array(self.scheduler.steps.get(s, 0) + 1) for s in batch.sequences], 1.0
        )


class Bench:
    def __init__(self, slots=1, width=4, **settings):
        self.scheduler = StepScheduler(width, **settings)
        self.executor = StepExecutor(self.scheduler, slots)
        self.clock = Clock()
        self.engine = Engine(self.scheduler, self.executor, Stats(), self.clock)

    def submit(self, *steps, reply=None, deadline=None):
        reply = reply or FakeReply()
        self.engine.submit(request_of(*steps, deadline_seconds=deadline), reply)
        return reply

    def step(self, index=0):
        """Run one step of the model."""
        self.engine.step()
        if self.executor.in_flight:
            self.executor.complete(index % len(self.executor.in_flight))
            self.clock.now += 1.0

    def run_all(self):
        self.engine.step()
        while self.executor.in_flight:
            self.step()
            self.engine.step()


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_each_sequence_runs_as_often_as_it_needs_to(slots):
    bench = Bench(slots, width=2)
    replies = [bench.submit(*steps) for steps in ([1], [3, 1], [2], [5, 2, 4])]

    bench.run_all()

    assert [reply.end for reply in replies] == ["finished"] * 4
    assert replies[0].parts == {0: [1]}
    assert replies[1].parts == {0: [1, 2, 3], 1: [1]}
    assert replies[3].parts == {0: [1, 2, 3, 4, 5], 1: [1, 2], 2: [1, 2, 3, 4]}
    assert bench.scheduler.admitted == 0


def test_parts_come_at_every_step_and_the_end_with_the_last():
    bench = Bench()
    reply = bench.submit(3)

    bench.step()
    bench.engine.step()
    assert (reply.parts, reply.end) == ({0: [1]}, None)

    bench.run_all()
    assert (reply.parts, reply.end) == ({0: [1, 2, 3]}, "finished")


def test_a_sequence_that_finishes_makes_room_at_the_next_step():
    """As in Orca, a short request does not wait until long ones end."""
    bench = Bench(width=2)
    long, short, later = bench.submit(9), bench.submit(1), bench.submit(1)

    bench.step()
    bench.step()
    bench.engine.step()

    assert (short.end, later.end, long.end) == ("finished", "finished", None)
    assert [len(batch) for batch in bench.scheduler.batches[:3]] == [2, 2, 1]


def test_a_cancelled_sequence_leaves_at_the_next_step():
    bench = Bench(width=2)
    gone, stays = bench.submit(100, reply=FakeReply(cancelled_after=2)), bench.submit(4)

    bench.run_all()

    assert isinstance(gone.end, RequestCancelled)
    assert gone.parts == {0: [1, 2]}
    assert stays.end == "finished"


def test_a_deadline_ends_a_sequence_that_runs():
    bench = Bench()
    late, in_time = bench.submit(100, deadline=2.5), bench.submit(3)

    bench.run_all()

    assert isinstance(late.end, DeadlineError)
    assert late.parts == {0: [1, 2, 3]}
    assert in_time.end == "finished"


@settings(max_examples=200)
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(
                st.just("submit"),
                st.lists(st.integers(1, POISON), min_size=1, max_size=3),
                st.sampled_from([math.inf, math.inf, 0, 1, 4]),
                st.sampled_from([None, None, 1.5, 6.0]),
            ),
            st.tuples(st.just("step"), st.integers(0, 3)),
        ),
        max_size=40,
    ),
    slots=st.sampled_from([1, 2, 4]),
    width=st.integers(1, 5),
)
def test_whatever_happens_each_request_ends_once_and_parts_are_in_order(actions, slots, width):
    bench = Bench(slots, width, max_requests=6)
    asked = []
    for action, first, *others in actions:
        if action == "step":
            bench.step(first)
            continue
        cancelled_after, deadline = others
        try:
            reply = FakeReply(cancelled_after=cancelled_after)
            bench.submit(*first, reply=reply, deadline=deadline)
            asked.append((first, reply))
        except QueueFullError:
            assert reply.end is None
    bench.run_all()

    for steps, reply in asked:
        assert reply.end is not None
        for parts in reply.parts.values():
            assert parts == list(range(1, len(parts) + 1))
        if reply.end == "finished":
            assert [len(reply.parts[row]) for row in range(len(steps))] == steps
        else:
            assert isinstance(reply.end, (RequestCancelled, DeadlineError, EngineError))
    assert bench.scheduler.admitted == 0
    assert not bench.scheduler.waiting
    assert not bench.scheduler.steps
