"""The watch over calls that wait, on a virtual clock."""

import asyncio
import sys

import pytest

from tests.client.gateway.asgi import run_virtual
from varlen_client import ModelProcessEnded, RequestTimeout, ServerError, ServerUnavailable
from varlen_client.transport.replicas import ModelWatch

SECONDS = 5.0
GONE = ModelProcessEnded("the process of a_0 has ended")


class Model:
    """A model that ends at a time, and its answers to probes.

    Args:
        ends_at: time at which the process ends; it refuses probes from then on, after a second as the server does.
        back_at: time from which it takes requests again.
        answers: errors that probes raise instead, in order.
    """

    def __init__(self, ends_at=float("inf"), back_at=float("inf"), answers=()):
        self.ends_at, self.back_at = ends_at, back_at
        self.answers = list(answers)
        self.probes = []

    async def probe(self):
        now = asyncio.get_running_loop().time()
        self.probes.append(now)
        if self.answers:
            answer = self.answers.pop(0)
            if answer is None:
                await asyncio.sleep(1e6)
            raise answer
        if self.ends_at <= now < self.back_at:
            await asyncio.sleep(1)
            raise GONE


async def wait_for_answer(watch, seconds):
    with watch.waiting():
        await asyncio.sleep(seconds)
    return "answer"


def run(watch, call):
    """Return a call's result or error, and its seconds; close the watch."""

    async def ended():
        try:
            return await call()
        except Exception as error:
            return error
        finally:
            await watch.close()

    return run_virtual(ended())


def test_a_call_fails_within_seconds_of_the_end_of_the_process():
    model = Model(ends_at=1.0)
    watch = ModelWatch(model.probe, SECONDS)

    error, seconds = run(watch, lambda: wait_for_answer(watch, 600))

    assert type(error) is ModelProcessEnded
    assert str(error) == "no answer will come, since the process of a_0 has ended"
    assert seconds <= SECONDS + 5
    assert len(model.probes) == 3


@pytest.mark.parametrize("ends_at", [7.0, 63.2, 301.0])
def test_the_model_is_asked_again_as_long_as_a_call_waits(ends_at):
    watch = ModelWatch(Model(ends_at=ends_at).probe, SECONDS)

    error, seconds = run(watch, lambda: wait_for_answer(watch, 600))

    assert type(error) is ModelProcessEnded
    assert seconds <= ends_at + SECONDS + 5


def test_a_slow_answer_of_a_process_that_runs_is_waited_for():
    model = Model()
    watch = ModelWatch(model.probe, SECONDS)

    assert run(watch, lambda: wait_for_answer(watch, 603)) == ("answer", 603)
    assert len(model.probes) == 120


@pytest.mark.parametrize(
    "answers",
    [
        [None] * 9,
        [ServerUnavailable("no connection")] * 99,
        [ServerError("the model failed")] * 99,
        [RequestTimeout("late")] * 99,
        [GONE, GONE, None] * 33,
        [GONE, GONE, ServerError("no tokenizer")] * 33,
    ],
    ids=["none", "no_connection", "failure", "late", "two_then_none", "two_then_refused"],
)
def test_only_refusals_in_a_row_because_of_the_process_fail_a_call(answers):
    model = Model(answers=answers)
    watch = ModelWatch(model.probe, SECONDS)

    assert run(watch, lambda: wait_for_answer(watch, 90)) == ("answer", 90)
    assert model.probes


def test_a_process_that_was_paused_for_seconds_fails_no_call():
    watch = ModelWatch(Model(ends_at=1.0, back_at=7.3).probe, SECONDS)

    assert run(watch, lambda: wait_for_answer(watch, 90)) == ("answer", 90)


def test_a_call_that_began_after_the_questions_is_not_failed_by_them():
    model = Model(ends_at=1.0)
    watch = ModelWatch(model.probe, SECONDS)

    async def calls():
        first = asyncio.create_task(wait_for_answer(watch, 600))
        await asyncio.sleep(6.2)
        # loaded again meanwhile
        model.back_at = 9.5
        second = asyncio.create_task(wait_for_answer(watch, 60))
        return await asyncio.gather(first, second, return_exceptions=True)

    (first, second), _ = run(watch, calls)

    assert type(first) is ModelProcessEnded
    assert second == "answer"


def test_all_calls_that_wait_share_the_questions():
    model = Model(ends_at=1.0)
    watch = ModelWatch(model.probe, SECONDS)

    async def calls():
        waits = [wait_for_answer(watch, 600) for _ in range(50)]
        return await asyncio.gather(*waits, return_exceptions=True)

    errors, _ = run(watch, calls)

    assert {type(error) for error in errors} == {ModelProcessEnded}
    assert len(model.probes) == 3


def test_refusals_of_new_calls_fail_those_that_wait():
    model = Model(ends_at=1.0, answers=[None])
    watch = ModelWatch(model.probe, SECONDS)

    async def refused():
        with watch.waiting():
            await model.probe()

    async def calls():
        first = asyncio.create_task(wait_for_answer(watch, 600))
        await asyncio.sleep(6)
        # the small request waits behind requests of other clients
        errors = [(await asyncio.gather(refused(), return_exceptions=True))[0] for _ in range(3)]
        return [*errors, *await asyncio.gather(first, return_exceptions=True)]

    (*refusals, error), seconds = run(watch, calls)

    assert [str(each) for each in refusals] == [str(GONE)] * 3
    assert str(error).startswith("no answer will come")
    assert seconds == 9


def test_one_refusal_of_a_new_call_starts_the_questions():
    model = Model(ends_at=1.0)
    watch = ModelWatch(model.probe, 60.0)

    async def refused():
        with watch.waiting():
            await model.probe()

    async def calls():
        first = asyncio.create_task(wait_for_answer(watch, 600))
        await asyncio.sleep(2)
        return await asyncio.gather(first, refused(), return_exceptions=True)

    errors, seconds = run(watch, calls)

    assert {type(error) for error in errors} == {ModelProcessEnded}
    assert seconds <= 2 + 5


def test_a_model_that_answers_other_calls_is_not_asked():
    model = Model()
    watch = ModelWatch(model.probe, SECONDS)

    async def calls():
        slow = asyncio.create_task(wait_for_answer(watch, 288))
        for _ in range(100):
            await wait_for_answer(watch, 2.9)
        return await slow

    assert run(watch, calls)[0] == "answer"
    assert model.probes == []


def test_quick_calls_send_no_questions():
    model = Model(ends_at=0.0)
    watch = ModelWatch(model.probe, SECONDS)

    async def calls():
        for _ in range(1000):
            await wait_for_answer(watch, 0.01)
            await asyncio.sleep(1)

    run(watch, calls)
    assert model.probes == []


def test_without_seconds_nothing_is_asked():
    model = Model(ends_at=0.0)
    watch = ModelWatch(model.probe, 0)

    assert run(watch, lambda: wait_for_answer(watch, 600)) == ("answer", 600)
    assert model.probes == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task does not count its cancellations")
def test_a_call_that_is_cancelled_as_the_process_is_found_ended_stays_cancelled():
    watch = ModelWatch(Model(ends_at=1.0).probe, SECONDS)

    async def calls():
        task = asyncio.create_task(wait_for_answer(watch, 600))
        while not task.cancelling():
            # the watch cancels the task between two steps of this one
            await asyncio.sleep(0)
            asyncio.get_running_loop().now += 0.001
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert run(watch, calls)[0] is True


def test_a_failed_call_leaves_no_cancellation_behind():
    watch = ModelWatch(Model(ends_at=1.0).probe, SECONDS)

    async def call():
        with pytest.raises(ModelProcessEnded):
            await wait_for_answer(watch, 600)
        await asyncio.sleep(1)
        return getattr(asyncio.current_task(), "cancelling", int)()

    assert run(watch, call)[0] == 0


def test_a_closed_watch_asks_no_more():
    model = Model(answers=[None])
    watch = ModelWatch(model.probe, SECONDS)

    async def call():
        task = asyncio.create_task(wait_for_answer(watch, 60))
        await asyncio.sleep(6)
        await watch.close()
        return await task

    assert run(watch, call) == ("answer", 60)
    assert len(model.probes) == 1
