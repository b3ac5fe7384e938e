"""Replies of generated answers: order, merging, and exactly one final response on every path."""

import importlib
import os
import random
import sys
import time
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest

from tests.threads import run_in_threads
from varlen.errors import DeadlineError, QueueFullError, RequestCancelled, RequestError
from varlen.models.checkpoint.family import NO_LABELS
from varlen.request.request import GeneratedPart
from varlen.server import shared_memory
from varlen.telemetry.metrics import Stats
from varlen.wire.generate import GeneratedAnswer, ResponseSpec
from varlen.wire.outputs import AnswerOptions, ArrayAnswer, ModelOutputs

SECONDS = 20.0
MODULE = "varlen.server.replies"


@pytest.fixture
def replies(pb_utils, monkeypatch):
    """Return a fresh import of the module."""
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


@pytest.fixture
def stats():
    return Stats()


@pytest.fixture
def outbox(replies, stats):
    outbox = replies.Outbox(stats)
    yield outbox
    outbox.close()


@pytest.fixture
def start(pb_utils, outbox):
    """Return a function that returns a request, and its reply."""

    def start(*, stream=True, rows=1, returns=(), answer=None):
        request = pb_utils.InferenceRequest(decoupled=stream)
        request.answered = Event()
        request.done = request.answered.set
        reply = outbox.reply_to(request)
        spec = ResponseSpec(rows, stream, returns=frozenset({"finish_reason", *returns}))
        reply.expect(answer or GeneratedAnswer(spec, 3, str, bytes))
        return request, reply

    return start


def part(text, *token_ids, end=None):
    return GeneratedPart(text, token_ids or (7,), finish_reason=end)


def texts(response):
    assert response.error() is None, response.error().message()
    return [each.decode() for each in tensor(response, "text_output")]


def tensor(response, name):
    [found] = [each for each in response.output_tensors() if each.name() == name]
    return found.as_numpy().tolist()


def wait_for(request):
    assert request.answered.wait(SECONDS), "never answered"


def wait_until(condition):
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def failure(request):
    wait_for(request)
    error = request.response.error()
    return error.code(), error.message()


@pytest.fixture
def hold():
    """Return a function that makes sends of a request wait; it returns (begun, go on)."""
    events = []

    def hold(request):
        begun, go_on = Event(), Event()
        events.append(go_on)

        def wait():
            begun.set()
            assert go_on.wait(SECONDS)

        request.on_send = wait
        return begun, go_on

    yield hold
    for event in events:
        event.set()


def test_each_part_is_sent_as_it_comes_and_the_last_one_is_final(start):
    request, reply = start()

    for number in range(3):
        reply.send(0, part(f"{number} "))
        wait_until(lambda number=number: len(request.responses) == number + 1)
    reply.send(0, part("end", end="stop"))
    reply.finish()
    wait_for(request)

    assert [texts(response) for response in request.responses] == [["0 "], ["1 "], ["2 "], ["end"]]
    reasons = [tensor(response, "finish_reason") for response in request.responses]
    assert reasons == [[b"None"]] * 3 + [[b"stop"]]
    assert request.response is request.responses[-1]


def test_parts_that_come_during_a_send_share_the_next_response(start, hold):
    request, reply = start()
    begun, go_on = hold(request)
    reply.send(0, part("a"))
    assert begun.wait(SECONDS)

    for letter in "bcdef":
        reply.send(0, part(letter))
    assert request.sends == 1
    reply.send(0, part("g", end="length"))
    reply.finish()
    go_on.set()
    wait_for(request)

    assert [texts(response) for response in request.responses] == [["a"], ["bcdefg"]]


def test_a_slow_client_holds_up_no_other(start, hold):
    slow, slow_reply = start()
    begun, _ = hold(slow)
    slow_reply.send(0, part("a"))
    assert begun.wait(SECONDS)

    request, reply = start()
    reply.send(0, part("b", end="stop"))
    reply.finish()

    wait_for(request)
    assert not slow.answered.is_set()


def test_the_last_part_waits_for_the_end(start):
    request, reply = start()
    reply.send(0, part("a"))
    wait_until(lambda: request.asked > 0)
    reply.send(0, part("b", end="stop"))
    time.sleep(0.01)

    reply.finish()
    wait_for(request)

    assert [texts(response) for response in request.responses] == [["a"], ["b"]]


def test_an_answer_that_is_not_streamed_is_one_response(start):
    request, reply = start(stream=False, rows=2, returns=["num_output_tokens", "output_ids"])

    for number in range(4):
        reply.send(number % 2, part(f"{number} ", number, end="length" if number > 1 else None))
    reply.finish()
    wait_for(request)

    assert texts(request.response) == ["0 2 ", "1 3 "]
    assert tensor(request.response, "num_output_tokens") == [2, 2]
    assert tensor(request.response, "output_ids") == [0, 2, 1, 3]
    assert request.sends == 1


def test_an_array_answer_is_one_response(start):
    outputs = ModelOutputs("embed", 2, NO_LABELS, normalize=False)
    options = AnswerOptions(frozenset({"sentence_embedding"}))
    request, reply = start(stream=False, answer=ArrayAnswer(outputs, options, [3, 4], [3, 4]))

    reply.send(1, np.ones(2, dtype=np.float32))
    reply.send(0, np.zeros(2, dtype=np.float32))
    reply.finish()
    wait_for(request)

    assert tensor(request.response, "sentence_embedding") == [[0, 0], [1, 1]]


def test_an_error_in_the_middle_is_the_final_response(start, hold, pb_utils, stats):
    request, reply = start()
    begun, go_on = hold(request)
    reply.send(0, part("a"))
    assert begun.wait(SECONDS)
    reply.send(0, part("b"))
    reply.fail(DeadlineError("too late"))
    go_on.set()

    assert failure(request) == (pb_utils.TritonError.UNAVAILABLE, "deadline missed: too late")
    assert request.sends == 2
    wait_until(lambda: ("varlen_requests_total", "refused") in stats.drain().counts)


def test_a_part_that_cannot_be_sent_ends_the_answer_with_an_error(start, pb_utils, stats):
    request, reply = start()
    request.part_fails = True
    reply.send(0, part("a"))

    code, message = failure(request)

    assert code == pb_utils.TritonError.INTERNAL
    assert "shm" not in message
    wait_until(reply.is_cancelled)
    reply.send(0, part("b"))
    reply.fail(RequestCancelled("cancelled"))
    time.sleep(0.01)
    assert request.sends == 2
    assert stats.drain().counts == {("varlen_requests_total", "failed"): 1}


def test_a_final_response_that_cannot_be_sent_is_not_tried_again(start, stats):
    request, reply = start(stream=False)
    request.send_fails = True
    reply.send(0, part("a", end="stop"))

    reply.finish()
    wait_for(request)
    reply.fail(RequestCancelled("cancelled"))
    time.sleep(0.01)

    assert request.sends == 1
    assert stats.drain().counts == {("varlen_requests_total", "failed"): 1}


class Panic(BaseException):
    """Stands in for a panic of the tokenizers library."""


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
@pytest.mark.parametrize("stream", [True, False])
def test_a_response_that_cannot_be_built_is_an_error_without_details(
    start, pb_utils, stream, error
):
    def fail(outputs):
        raise error("secret")

    request, reply = start(answer=SimpleNamespace(streams=stream, num_bytes=0, tensors=fail))

    reply.send(0, part("a"))
    reply.send(0, part("b", end="stop"))
    reply.finish()

    code, message = failure(request)
    assert code == pb_utils.TritonError.INTERNAL
    assert "secret" not in message
    assert request.sends == 1


def test_an_error_that_repeats_half_a_surrogate_pair_is_sent(start, pb_utils):
    request, reply = start()

    reply.fail(RequestError('unknown parameter "\ud800"'))

    assert failure(request) == (pb_utils.TritonError.INVALID_ARG, 'unknown parameter "?"')


def test_an_error_names_its_code_in_a_stream(replies, stats, pb_utils):
    outbox = replies.Outbox(stats, names_codes=True)
    request = pb_utils.InferenceRequest(decoupled=True)
    request.answered = Event()
    request.done = request.answered.set

    outbox.reply_to(request).fail(DeadlineError("too late"))

    expected = "UNAVAILABLE: deadline missed: too late"
    assert failure(request) == (pb_utils.TritonError.UNAVAILABLE, expected)
    outbox.close()


def test_a_part_without_shared_memory_is_an_error(start, replies, pb_utils, monkeypatch):
    monkeypatch.setattr(shared_memory, "_LARGE_BYTES", 100)
    monkeypatch.setattr(shared_memory, "_DEFAULT_STEP", 0)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096))
    request, reply = start()

    reply.send(0, part("é" * 100))

    # 200 bytes of text, 4 bytes of "None", and the length of each
    message = "the server has too little shared memory for an answer of 212 bytes"
    assert failure(request) == (pb_utils.TritonError.INTERNAL, message)


def test_every_string_of_a_matrix_counts(replies):
    labels = np.array([[b"a" * 10, b"b" * 20], [b"c" * 30, b""]], dtype=np.object_)

    assert replies._num_bytes(labels) == 60 + 4 * 4


def test_a_request_that_waits_asks_the_server_itself(start, replies, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(replies.time, "monotonic", lambda: now[0])
    request, reply = start()
    request.cancelled = True
    # it has just come
    assert not reply.is_cancelled()

    now[0] += 0.03

    assert reply.is_cancelled()
    reply.fail(RequestCancelled("cancelled"))
    wait_for(request)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_is_seen_between_parts(start, pb_utils, stream):
    request, reply = start(stream=stream)
    reply.send(0, part("a"))
    assert not reply.is_cancelled()
    request.cancelled = True

    def generate():
        reply.send(0, part("b"))
        return reply.is_cancelled()

    wait_until(generate)
    sends = request.sends
    for _ in range(100):
        reply.send(0, part("c"))
    reply.fail(RequestCancelled("cancelled"))

    assert failure(request)[0] == pb_utils.TritonError.CANCELLED
    assert request.sends == sends + 1


def test_the_engine_does_not_wait_for_a_send_to_learn_of_a_cancellation(start, hold):
    request, reply = start()
    begun, _ = hold(request)
    reply.send(0, part("a"))
    assert begun.wait(SECONDS)

    assert not reply.is_cancelled()


def test_a_check_that_fails_ends_the_answer_with_an_error(start, pb_utils):
    request, reply = start()
    request.cancel_check_fails = True
    reply.send(0, part("a"))

    assert failure(request)[0] == pb_utils.TritonError.INTERNAL
    wait_until(reply.is_cancelled)


def test_tokens_are_timed_by_sequence(start, stats, replies, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(replies.time, "monotonic", lambda: now[0])
    request, reply = start(stream=False, rows=2)

    for seconds, row, ids, end in [
        (0.5, 0, (1,), None),
        (0.25, 1, (1,), "stop"),
        (1.0, 0, (2, 3), None),
        (0.75, 0, (4,), "length"),
    ]:
        now[0] += seconds
        reply.send(row, part("a", *ids, end=end))
    reply.finish()
    wait_for(request)

    observed = stats.drain().observed
    assert list(observed["varlen_time_to_first_token_seconds"]) == [0.5, 0.75]
    assert list(observed["varlen_time_per_output_token_seconds"]) == [2.0 / 3]


def test_closing_sends_what_ends_during_a_send(replies, stats, pb_utils, hold):
    outbox = replies.Outbox(stats)
    held = []
    for _ in range(4):
        request = pb_utils.InferenceRequest(decoupled=True)
        reply = outbox.reply_to(request)
        reply.expect(GeneratedAnswer(ResponseSpec(1, True), 3, str, bytes))
        held.append((request, *hold(request)))
        reply.send(0, part("a"))
        reply.send(0, part("b", end="stop"))
        reply.finish()
    closer = Thread(target=outbox.close)
    closer.start()

    for _, _, go_on in held:
        go_on.set()
    closer.join(SECONDS)

    assert not closer.is_alive()
    assert all(request.response is not None for request, _, _ in held)


def test_many_replies_are_each_answered_once_and_in_order(start, stats):
    """Engines that send parts to clients that are slow, go away or cannot be reached."""
    outcomes = [[] for _ in range(4)]

    def engine(index):
        rng = random.Random(index)
        for _ in range(60):
            rows = rng.randint(1, 3)
            request, reply = start(stream=rng.random() < 0.7, rows=rows)
            request.on_send = lambda rng=rng: time.sleep(rng.choice([0, 0, 0.001]))
            request.part_fails = rng.random() < 0.1
            request.send_fails = rng.random() < 0.1
            lengths = [rng.randint(1, 12) for _ in range(rows)]
            gone = rng.randint(0, 30)
            expected = [""] * rows
            end = "ok"
            for step in range(max(lengths)):
                request.cancelled = step > gone
                if reply.is_cancelled():
                    reply.fail(RequestCancelled("cancelled"))
                    end = "cancelled"
                    break
                for row in range(rows):
                    if step < lengths[row]:
                        text = f"{row}:{step} "
                        expected[row] += text
                        is_last = step == lengths[row] - 1
                        reply.send(row, part(text, end="stop" if is_last else None))
            else:
                if rng.random() < 0.1:
                    reply.fail(DeadlineError("late"))
                    end = "refused"
                else:
                    reply.finish()
            outcomes[index].append((request, expected, end))

    run_in_threads(4, engine)

    for request, expected, end in [each for part in outcomes for each in part]:
        wait_for(request)
        assert not request.send_fails or request.response is None
        if end == "ok" and request.response is not None and request.response.error() is None:
            rows = zip(*(texts(response) for response in request.responses), strict=True)
            assert ["".join(row) for row in rows] == expected
            assert len(request.responses) == 1 or request.decoupled
    total = 0

    def count():
        nonlocal total
        total += sum(stats.drain().counts.values())
        return total >= 240

    wait_until(count)
    assert total == 240


def test_an_answer_for_which_memory_is_taken_now_is_refused_and_counted(
    start, stats, pb_utils, monkeypatch
):
    monkeypatch.setattr(shared_memory, "_LARGE_BYTES", 100)
    monkeypatch.setattr(shared_memory, "_DEFAULT_STEP", 0)
    memory = SimpleNamespace(f_blocks=1000, f_bavail=100, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: memory)
    request, reply = start()
    large = SimpleNamespace(streams=False, num_bytes=200)

    with pytest.raises(
        QueueFullError, match="answer of 200 bytes: send fewer rows at once, or try again later"
    ) as caught:
        reply.expect(large)

    reply.fail(caught.value)
    assert failure(request)[0] == pb_utils.TritonError.UNAVAILABLE
    counts = stats.drain().counts.items()
    refusals = {key: count for key, count in counts if "varlen_refused_requests_total" in key}
    assert refusals == {("varlen_refused_requests_total", "shared_memory"): 1}
