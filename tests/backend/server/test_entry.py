"""The server's entry point, against a strict stand-in for the server."""

import copy
import gc
import json
import os
import re
import signal
import sys
import time
import weakref
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.backend.model_configs import initialize_args, model_config
from tests.backend.requests import text
from tests.checkpoints import set_fields
from tests.closeness import assert_close, encoder_roundings
from tests.threads import run_in_threads
from varlen.errors import DeadlineError, EngineError, ModelFaultError
from varlen.processes import freeze_objects
from varlen.request.request import DEFAULT_OPTIONS, Draft, TokenizationTask
from varlen.server import shared_memory
from varlen.telemetry.metrics import SnapshotMetric
from varlen.telemetry.tracing import RequestTracer

FAKES = Path(__file__).parents[1] / "fakes"
SECONDS = 20.0


def test_a_loaded_model_is_left_out_of_garbage_collections(load, server_model, monkeypatch):
    monkeypatch.setattr(server_model, "freeze_objects", freeze_objects)
    gc.unfreeze()

    load()

    assert gc.get_freeze_count() > 10 * len(gc.get_objects())


def ids(*rows):
    return np.array(rows, dtype=np.int64)


def wait_for(*requests):
    for index, request in enumerate(requests):
        assert request.answered.wait(SECONDS), f"request {index} was never answered"


def result(request):
    wait_for(request)
    assert request.response.error() is None, request.response.error().message()
    [tensor] = request.response.output_tensors()
    return tensor


def results(request):
    wait_for(request)
    assert request.response.error() is None, request.response.error().message()
    return {each.name(): each.as_numpy() for each in request.response.output_tensors()}


def failure(request):
    wait_for(request)
    assert request.response.output_tensors() == []
    error = request.response.error()
    return error.code(), error.message()


def only_runner(model):
    (runner,) = model._service.model.workers.runners
    return runner


def start_and_hold(model, request):
    """Execute a request; return the event that lets its running batch continue."""
    runner = only_runner(model)
    begun, go_on, launch = Event(), Event(), runner.launch_batch

    def wait_and_launch(batch):
        begun.set()
        assert go_on.wait(SECONDS)
        return launch(batch)

    runner.launch_batch = wait_and_launch
    assert model.execute([request]) is None
    assert begun.wait(SECONDS)
    return go_on


def fail_once(model):
    """Make the model fail in its next batch."""
    runner = only_runner(model)
    launch = runner.launch_batch

    def fail(batch):
        runner.launch_batch = launch
        raise ZeroDivisionError("poison")

    runner.launch_batch = fail


def test_execute_answers_later_and_returns_none(load, ask):
    request = ask(text=text("the cat"))

    go_on = start_and_hold(load(), request)
    assert request.sends == 0
    go_on.set()

    assert result(request).name() == "sentence_embedding"
    assert result(request).as_numpy().shape == (1, 24)
    assert request.sends == 1


# one token, too long to be tokenized in `execute`
LONG_WORD = "a" * 300


def hold_tokenizer(model, monkeypatch):
    """Hold the tokenizer; return events: it has begun, it may go on."""
    tokenizer = model._service.intake.tokenizer
    begun, go_on, encode = Event(), Event(), tokenizer.encode

    def wait_and_encode(*texts, **options):
        begun.set()
        assert go_on.wait(SECONDS)
        return encode(*texts, **options)

    monkeypatch.setattr(tokenizer, "encode", wait_and_encode)
    return begun, go_on


def test_execute_does_not_wait_for_the_tokenizer(load, ask, monkeypatch):
    model = load()
    begun, go_on = hold_tokenizer(model, monkeypatch)
    with_text, with_ids, bad = (
        ask(text=text(LONG_WORD)),
        ask(input_ids=ids([2, 5, 3])),
        ask(text=text(b"\xff")),
    )

    model.execute([with_text, with_ids, bad])

    assert begun.wait(SECONDS)
    result(with_ids)
    assert failure(bad)[1] == "row 0: text is not UTF-8 at byte 0; send UTF-8"
    assert with_text.sends == 0
    assert series_of_pool(model) == (1, 300)
    go_on.set()
    result(with_text)


def series_of_pool(model):
    """Return the gauges of waiting requests and their texts."""
    values = model._snapshot()
    names = ("varlen_queued_requests", "varlen_queued_text_bytes")
    return tuple(values[SnapshotMetric(name)] for name in names)


def test_deadlines_and_latency_count_from_execute(load, ask, pb_utils, monkeypatch):
    model = load()
    begun, go_on = hold_tokenizer(model, monkeypatch)
    seen = []
    engine = model._service.engine
    monkeypatch.setattr(engine, "submit", lambda *given: (seen.append(given), refuse(given[1])))
    before = time.monotonic()
    request = ask({"deadline_ms": 5e6}, text=text(LONG_WORD))
    model.execute([request])
    after = time.monotonic()
    assert begun.wait(SECONDS)

    go_on.set()

    wait_for(request)
    [(checked, reply)] = seen
    assert before <= checked.arrival == reply.arrival <= after
    assert checked.deadline(time.monotonic()) == checked.arrival + 5000.0


def refuse(reply):
    reply.fail(DeadlineError("too late"))


def test_finalize_answers_texts_that_are_not_tokenized_yet(server_model, pb_utils, small_bert, ask):
    pb_utils.model_dir = str(small_bert)
    model = server_model.TritonPythonModel()
    model.initialize(
        initialize_args(model_config(parameters={"dtype": "fp32", "warmup_seconds": "0"}))
    )
    requests = [ask(text=text(*["the cat"] * 64)) for _ in range(5)]
    model.execute(requests)

    model.finalize()

    for request in requests:
        assert result(request).as_numpy().shape == (64, 24)


def test_answers_are_those_of_the_encoder(load, ask, small_bert):
    from varlen import Encoder

    model = load()
    requests = [
        ask(text=text("the cat", "a river")),
        ask(
            input_ids=ids([2, 5, 6, 3, 0], [2, 8, 7, 3, 0]),
            attention_mask=ids([1] * 4 + [0], [1] * 4 + [0]),
        ),
        ask({"normalize": True}, text=text("the cat", "a river")),
    ]

    model.execute(requests)

    with Encoder.from_pretrained(small_bert, dtype="fp32") as encoder:
        plain = encoder.embed(["the cat", "a river"])
        normalized = encoder.embed(["the cat", "a river"], normalize=True)
    for request, expected in zip(requests, [plain, plain, normalized], strict=True):
        assert_close(result(request).as_numpy(), expected, roundings=encoder_roundings(small_bert))


def test_the_tokenizer_answers_while_the_model_is_busy(load, ask, pb_utils, small_bert):
    model = load()
    go_on = start_and_hold(model, busy := ask(text=text("a")))
    tokens = ask({"operation": "tokenize"}, text=text("the cat", "a"))
    back = ask({"operation": "detokenize"}, text=text("[5, 6]"))
    wrong = ask({"operation": "detokenize"}, text=text("[5, 999]"))

    model.execute([tokens, back, wrong])

    library = Tokenizer.from_file(str(small_bert / "tokenizer.json"))
    found = result(tokens)
    assert (found.name(), found.as_numpy().shape) == ("sentence_embedding", (2, 1))
    assert [json.loads(each)["token_ids"] for each in found.as_numpy()[:, 0]] == [
        library.encode(each).ids for each in ("the cat", "a")
    ]
    assert json.loads(result(back).as_numpy()[0, 0]) == {"text": library.decode([5, 6])}
    code, message = failure(wrong)
    assert code == pb_utils.TritonError.INVALID_ARG
    assert message.startswith("row 0: text is [5, 999]; allowed: a JSON list of token ids from 0")
    assert not busy.answered.is_set()
    go_on.set()
    wait_for(busy)


@pytest.mark.parametrize(
    "kind, task, name, shape",
    [
        ("BertModel", "hidden", "last_hidden_state", (2, 4, 24)),
        ("BertForSequenceClassification", "classify", "logits", (2, 3)),
        ("BertForSequenceClassification", "rerank", "logits", (2, 3)),
        ("BertForTokenClassification", "token_classify", "logits", (2, 4, 3)),
    ],
)
def test_every_task_answers_in_its_own_shape(load, ask, make_checkpoint, kind, task, name, shape):
    given = model_config(task, labels=3, parameters={"task": task})
    model = load(make_checkpoint(kind, num_labels=3), given)
    request = ask(text=text("the", "the cat"))

    model.execute([request])

    assert result(request).name() == name
    assert result(request).as_numpy().shape == shape


def test_tokens_have_the_texts_of_the_tokenizer_beside_their_scores(load, ask, make_checkpoint):
    given = model_config("token_classify", labels=3, parameters={"task": "token_classify"})
    folder = make_checkpoint("BertForTokenClassification", num_labels=3)
    model = load(folder, given)
    texts = ["the", "the cat"]
    request = ask(text=text(*texts), outputs=["tokens", "scores"])

    model.execute([request])

    encodings = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(texts)
    tokens = [[token.encode() for token in each.tokens] for each in encodings]
    assert results(request)["tokens"].tolist() == [[*tokens[0], b""], tokens[1]]
    assert results(request)["scores"].shape == (2, 4, 3)


def test_a_response_has_the_outputs_that_the_client_requests(load, ask, make_checkpoint):
    given = model_config("classify", labels=3, parameters={"task": "classify"})
    folder = make_checkpoint("BertForSequenceClassification", num_labels=3)
    model = load(folder, given)
    names = ("num_tokens", "labels", "scores")
    requests = [ask(text=text("the", "the cat"), outputs=names)]
    requests.append(ask({"activation": "none"}, text=text("the", "the cat"), outputs=["scores"]))
    requests.append(ask(text=text("the", "the cat")))

    model.execute(requests)

    assert list(results(requests[0])) == ["scores", "labels", "num_tokens"]
    assert results(requests[0])["num_tokens"].tolist() == [[3], [4]]
    assert results(requests[0])["labels"].tolist() == [[b"LABEL_0", b"LABEL_1", b"LABEL_2"]] * 2
    np.testing.assert_allclose(results(requests[0])["scores"].sum(axis=1), 1, rtol=1e-6)
    # they may run in different batches
    scores, logits = results(requests[1])["scores"], results(requests[2])["logits"]
    assert_close(scores, logits, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("cache_bytes", ["0", "1000000"])
def test_requests_of_every_form_share_what_the_engine_computes(load, ask, cache_bytes):
    model = load(response_cache_bytes=cache_bytes)
    forms = [
        {"dimensions": 8},
        {"output_dtype": "int8"},
        {"dimensions": 16, "output_dtype": "ubinary"},
        {"dimensions": 8, "normalize": True},
    ]
    whole = ask(text=text("the cat"))
    model.execute([whole])
    vector = result(whole).as_numpy()
    requests = [ask(form, text=text("the cat")) for form in forms]

    model.execute(requests)

    shorter, codes, bits, unit = (result(request).as_numpy() for request in requests)
    np.testing.assert_array_equal(shorter, vector[:, :8])
    assert (codes.dtype, codes.shape) == (np.int8, (1, 24))
    np.testing.assert_array_equal(bits, np.packbits(vector[:, :16] > 0, axis=1))
    length = np.linalg.norm(vector[:, :8])
    np.testing.assert_allclose(unit, vector[:, :8] / length, rtol=1e-4)
    if cache_bytes != "0":
        assert model._service.model.cache.use().hits == 3


def test_a_bad_request_fails_alone(load, ask, pb_utils):
    model = load()
    good = [ask(text=text("the cat")), ask(input_ids=ids([2, 5, 3]))]
    bad = [
        ask(text=text(b"a\xff")),
        ask(text=text(b"\xff")),
        ask(input_ids=ids([99])),
        ask(),
        ask({"truncate": 1}, text=text("a")),
    ]

    model.execute([good[0], *bad, good[1]])

    assert [failure(request)[0] for request in bad] == [pb_utils.TritonError.INVALID_ARG] * 5
    assert failure(bad[0])[1] == "row 0: text is not UTF-8 at byte 1; send UTF-8"
    assert [result(request).as_numpy().shape for request in good] == [(1, 24)] * 2
    assert all(request.sends == 1 for request in bad)


def test_a_full_queue_is_unavailable_at_once(load, ask, pb_utils):
    model = load(max_queued_requests="2")
    running = ask(text=text("a"))
    go_on = start_and_hold(model, running)
    waiting = [ask(text=text("a")), ask(text=text("a"))]
    model.execute(waiting)
    refused = ask(text=text("a"))

    model.execute([refused])

    assert failure(refused)[0] == pb_utils.TritonError.UNAVAILABLE
    assert not any(request.sends for request in waiting)
    go_on.set()
    wait_for(running, *waiting)


def test_deadlines_and_priority_reach_the_engine(load, ask, monkeypatch):
    model = load()
    seen = []
    submit = model._service.engine.submit
    monkeypatch.setattr(
        model._service.engine,
        "submit",
        lambda request, reply: (seen.append(request), submit(request, reply)),
    )
    requests = [
        ask(text=text("a")),
        ask({"deadline_ms": 5e6, "request_priority": 7}, text=text("a")),
        ask({"deadline_ms": 5e6}, timeout=4_000_000_000, text=text("a")),
    ]

    model.execute(requests)

    wait_for(*requests)
    # the threads of the tokenizer may pass each other
    seen.sort(key=lambda request: request.arrival)
    assert [request.options.deadline_seconds for request in seen] == [None, 5000.0, 4000.0]
    assert [request.options.priority for request in seen] == [0, 7, 0]


def test_a_missed_deadline_is_unavailable_and_counted_as_refused(load, ask, pb_utils, monkeypatch):
    model = load()

    def refuse(request, reply):
        raise DeadlineError("too late")

    monkeypatch.setattr(model._service.engine, "submit", refuse)
    request = ask({"deadline_ms": 5e6}, text=text(LONG_WORD))

    model.execute([request])

    message = "deadline missed: too late"
    assert failure(request) == (pb_utils.TritonError.UNAVAILABLE, message)
    assert outcomes(model, pb_utils)["refused"] == 1


def test_a_cache_answers_again_without_the_model(load, ask, pb_utils):
    model = load(response_cache_bytes="100000")
    first = ask(text=text("the cat", "a river"))
    model.execute([first])
    expected = result(first).as_numpy()
    fail_once(model)
    again = [ask(text=text("a river")), ask({"normalize": True}, text=text("a river"))]

    model.execute(again)

    np.testing.assert_array_equal(result(again[0]).as_numpy(), expected[1:])
    assert failure(again[1])[0] == pb_utils.TritonError.INTERNAL


def test_a_cancelled_request_is_answered_without_running(load, ask, pb_utils, monkeypatch):
    model = load()
    # as if it had waited
    monkeypatch.setattr(sys.modules["varlen.server.replies"], "_CANCEL_CHECK_SECONDS", -1.0)
    running, gone = ask(text=text("a")), ask(text=text("b"))
    go_on = start_and_hold(model, running)
    model.execute([gone])
    gone.cancelled = True
    go_on.set()

    assert failure(gone)[0] == pb_utils.TritonError.CANCELLED
    result(running)


def test_a_cancel_check_that_fails_does_not_lose_the_request(load, ask):
    model = load()
    broken, company = ask(text=text("a")), ask(text=text("b"))
    broken.cancel_check_fails = True

    model.execute([broken, company])

    wait_for(broken, company)
    assert result(company).as_numpy().shape == (1, 24)
    assert model.is_ready()


def test_a_failure_of_the_model_is_answered_without_details(load, ask, pb_utils):
    model = load()
    fail_once(model)
    broken = ask(text=text("a"))

    model.execute([broken])

    code, message = failure(broken)
    assert code == pb_utils.TritonError.INTERNAL
    assert "poison" not in message
    assert any(level == "error" and "ZeroDivisionError" in line for level, line in pb_utils.logged)
    after = ask(text=text("a"))
    model.execute([after])
    result(after)
    assert model.is_ready()


def test_a_model_whose_device_is_lost_is_not_ready_and_refuses_at_once(load, ask, pb_utils):
    model = load()

    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner = only_runner(model)
    runner.launch_batch = runner.run = lost
    first, later = ask(text=text("a")), ask(text=text("b"))
    model.execute([first])
    wait_for(first)
    assert not model.is_ready()

    model.execute([later])

    for request in (first, later):
        code, message = failure(request)
        assert code == pb_utils.TritonError.INTERNAL
        assert "reload it" in message


def test_a_request_that_cannot_be_read_is_answered(load, ask, pb_utils):
    model = load()
    broken, good = ask(text=text("a")), ask(text=text("b"))
    broken.inputs_fail = True

    model.execute([broken, good])

    message = "the request could not be read; the server's log says why"
    assert failure(broken) == (pb_utils.TritonError.INTERNAL, message)
    result(good)


def test_a_request_that_makes_a_library_panic_is_answered(load, ask, pb_utils, monkeypatch):
    class Panic(BaseException):
        """As tokenizers has: it is no Exception."""

    model = load()
    broken, good = ask(text=text("a")), ask(text=text("b"))
    read = model._kind.read

    def panic(*arguments):
        monkeypatch.setattr(model._kind, "read", read)
        raise Panic

    monkeypatch.setattr(model._kind, "read", panic)

    model.execute([broken, good])

    assert failure(broken)[0] == pb_utils.TritonError.INTERNAL
    result(good)


def test_parameters_that_are_no_object_are_the_caller_s_fault(load, ask, pb_utils):
    model = load()
    request = ask(text=text("a"))
    request._parameters = "{"

    model.execute([request])

    assert failure(request)[0] == pb_utils.TritonError.INVALID_ARG
    assert not errors(pb_utils)


def test_parameters_that_are_not_utf_8_are_the_caller_s_fault(load, ask, pb_utils):
    model = load()
    broken, good = ask(text=text("a")), ask(text=text("b"))
    broken._parameters = b'{"trunc\xff": true}'

    model.execute([broken, good])

    message = "the name or value of a request parameter is not UTF-8; send UTF-8"
    assert failure(broken) == (pb_utils.TritonError.INVALID_ARG, message)
    assert not errors(pb_utils), "a caller's fault fills the server's log"
    result(good)


def test_a_timeout_of_other_units_is_refused_unless_the_model_ignores_timeouts(load, ask, pb_utils):
    thirty = ask(timeout=30, text=text("a"))
    load().execute([thirty])

    assert failure(thirty)[0] == pb_utils.TritonError.INVALID_ARG
    pb_utils.MetricFamily.made.clear()
    ignored = ask(timeout=30, text=text("a"))
    load(ignore_request_timeout="true").execute([ignored])
    result(ignored)


def errors(pb_utils):
    return [line for level, line in pb_utils.logged if level == "error"]


def test_a_request_without_a_sender_does_not_stop_the_others(load, ask):
    model = load()
    broken, good = ask(text=text("a")), ask(text=text("b"))
    broken.sender_fails = True

    assert model.execute([broken, good]) is None

    result(good)


def test_a_failed_send_is_not_tried_again(load, ask, pb_utils):
    model = load()
    broken, good = ask(text=text("a")), ask(text=text("b"))
    broken.send_fails = True

    model.execute([broken])
    wait_for(broken)
    model.execute([good])

    result(good)
    assert broken.sends == 1
    # a failure is counted by the thread that sends, once it knows of it
    while not outcomes(model, pb_utils)["failed"]:
        time.sleep(0.001)
    by_outcome = outcomes(model, pb_utils)
    assert (by_outcome["failed"], by_outcome["ok"]) == (1, 1)


def family(pb_utils, name):
    [found] = [family for family in pb_utils.MetricFamily.made if family.name == name]
    return found.series


def outcomes(model, pb_utils):
    """Return the number of requests by outcome."""
    model._exporter.flush()
    totals = family(pb_utils, "varlen_requests_total")
    return {metric.labels["outcome"]: metric.value for metric in totals}


class Memory:
    """Shared memory of 100 bytes, all of it free."""

    f_frsize, f_blocks, f_bavail = 1, 100, 100


def test_an_answer_without_shared_memory_is_refused_before_it_runs(
    load, ask, pb_utils, monkeypatch
):
    model = load()
    monkeypatch.setattr(os, "statvfs", lambda path: Memory())
    monkeypatch.setattr(shared_memory, "_LARGE_BYTES", 200)
    monkeypatch.setattr(shared_memory, "_DEFAULT_STEP", 0)
    large, small = ask(text=text("a", "b", "c")), ask(text=text("a"))
    by_ids = ask(input_ids=np.ones((3, 4)))

    model.execute([large, by_ids, small])

    message = (
        "the answer has 288 bytes; the shared memory of this server is enough for 33:"
        " send fewer rows at once"
    )
    assert failure(large) == failure(by_ids) == (pb_utils.TritonError.INVALID_ARG, message)
    assert large.sends == by_ids.sends == 1
    result(small)
    assert model._service.admission.depth == (0, 0)
    assert outcomes(model, pb_utils)["invalid"] == 2


@pytest.mark.parametrize("cache_bytes", ["0", "6000"])
def test_many_requests_from_many_threads_are_each_answered_once(load, ask, cache_bytes):
    model = load(max_batch_tokens="64", max_queued_requests="50", response_cache_bytes=cache_bytes)
    requests = [[] for _ in range(4)]

    def send(index):
        rng = np.random.default_rng(index)
        for _ in range(100):
            kind = rng.integers(0, 5)
            if kind == 0:
                request = ask(text=text(b"\xff"))
            elif kind == 1:
                request = ask(text=text("the cat"))
                request.cancelled = True
            else:
                shape = (rng.integers(1, 6), rng.integers(1, 20))
                # some requests are equal
                ids = rng.integers(0, 60, shape) if kind < 4 else np.full(shape, shape[1])
                given = [{}, {"deadline_ms": 5}, {"request_priority": 9}][rng.integers(0, 3)]
                request = ask(given, input_ids=ids)
            if kind == 2:
                request.send_fails = True
            requests[index].append(request)
            model.execute([request])

    run_in_threads(4, send)

    everything = [request for part in requests for request in part]
    wait_for(*everything)
    assert all(request.sends == 1 for request in everything)
    assert model._service.admission.depth == (0, 0)


def test_is_ready_follows_the_engine(load):
    model = load()
    assert model.is_ready()

    model._service.close()

    assert not model.is_ready()


def test_after_a_hang_of_the_gpu_the_process_ends_whatever_happens(
    load, server_model, monkeypatch, our_threads
):
    model, ended = load(), []
    close = model._service.close
    monkeypatch.setattr(type(model._service), "close", lambda _: close() and False)
    monkeypatch.setattr(server_model, "end_process_soon", lambda: ended.append(True))

    model.finalize()

    assert ended
    assert our_threads() == []


def test_after_a_hang_of_the_gpu_during_a_load_the_process_ends_too(
    load, server_model, pb_utils, monkeypatch
):
    ended = []

    def load_service(*args, **options):
        raise ModelFaultError("the GPU has hung")

    monkeypatch.setattr(server_model, "_load_service", load_service)
    monkeypatch.setattr(server_model, "end_process_soon", lambda: ended.append(True))

    with pytest.raises(pb_utils.TritonModelException, match="the GPU has hung"):
        load()
    assert ended


def test_a_load_has_a_watchdog_from_its_beginning_until_it_fails(
    load, server_model, pb_utils, monkeypatch
):
    watchdogs, ended = [], []
    start = server_model.start_watchdog

    def fail(*args, **options):
        ended.append(watchdogs[0].poll())
        raise EngineError("no checkpoint can be read")

    monkeypatch.setattr(sys.modules["varlen.server.process"], "_WATCHDOG", "exec sleep 300")
    monkeypatch.setattr(
        server_model, "start_watchdog", lambda n: watchdogs.append(start(n)) or watchdogs[0]
    )
    monkeypatch.setattr(server_model, "read_model", fail)

    with pytest.raises(pb_utils.TritonModelException, match="no checkpoint can be read"):
        load()

    assert ended == [None]
    assert watchdogs[0].returncode == -signal.SIGKILL


def test_finalize_answers_the_queue_and_ends_every_thread(load, ask, our_threads):
    model = load(max_batch_tokens="64")
    first = ask(text=text("a"))
    go_on = start_and_hold(model, first)
    queued = [ask(text=text(*["the cat"] * 5)) for _ in range(30)]
    model.execute(queued)
    finalizer = Thread(target=model.finalize, daemon=True)
    finalizer.start()
    go_on.set()
    finalizer.join(SECONDS)

    assert not finalizer.is_alive(), "finalize() hangs"
    assert our_threads() == []
    for request in [first, *queued]:
        assert request.sends == 1
        result(request)


def test_a_request_after_the_engine_closed_is_answered(load, ask, pb_utils):
    model = load()
    model._service.close()
    request = ask(text=text("a"))

    model.execute([request])

    assert failure(request)[0] == pb_utils.TritonError.INTERNAL


def test_requests_are_counted_by_outcome(load, ask, pb_utils, monkeypatch):
    # as if all had waited
    monkeypatch.setattr(sys.modules["varlen.server.replies"], "_CANCEL_CHECK_SECONDS", -1.0)
    model = load()
    requests = [ask(text=text("a", "b")), ask(text=text(b"\xff")), ask(text=text("c"))]
    requests[2].cancelled = True
    model.execute(requests)
    wait_for(*requests)
    model.finalize()

    assert outcomes(model, pb_utils) == {
        "ok": 1,
        "invalid": 1,
        "refused": 0,
        "cancelled": 1,
        "failed": 0,
    }
    labels = {"model": "m", "version": "3", "instance": "m_0"}
    totals = family(pb_utils, "varlen_requests_total")
    assert all(metric.labels.items() >= labels.items() for metric in totals)
    assert family(pb_utils, "varlen_sequences_total")[0].value == 2
    assert family(pb_utils, "varlen_tokens_total")[0].value == 6
    assert len(family(pb_utils, "varlen_request_latency_seconds")[0].observed) == 3


def test_a_server_without_metrics_serves(load, ask, pb_utils):
    pb_utils.metrics_enabled = False
    model = load()
    request = ask(text=text("a"))

    model.execute([request])

    result(request)
    assert pb_utils.MetricFamily.made == []


def test_lifecycle_lines_reach_the_server_s_log(load, pb_utils):
    load()

    lines = [line for level, line in pb_utils.logged if level == "info"]
    line = r"varlen: m v3: serving embed in float32 on .+; workers: 1; sequences up to"
    assert any(re.match(line, entry) for entry in lines)
    assert all(entry.startswith("varlen: m v3: ") for entry in lines)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"parameters": {"batch_tokens": "3"}}, "batch_tokens"),
        ({"sequence_batching": {}}, "sequence_batching"),
        ({"parameters": {"task": "classify"}}, "BertForSequenceClassification"),
        ({"input": [{"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]}]}, "TEXT"),
        ({"parameters": {"max_sequence_tokens": "65"}}, "max_sequence_tokens"),
    ],
    ids=["settings", "server settings", "checkpoint", "tensors", "engine"],
)
def test_refuses_to_load_what_it_could_not_serve(load, pb_utils, our_threads, changes, word):
    with pytest.raises(pb_utils.TritonModelException, match=word):
        load(given=model_config(**changes))
    assert our_threads() == []


def test_a_kept_config_loads_with_a_warning_for_each_field_that_acts_otherwise(load, pb_utils):
    given = model_config(
        dynamic_batching={"max_queue_delay_microseconds": "100"},
        response_cache={"enable": True},
        parameters={"threads": "1", "warmup_seconds": "0"},
    )

    assert load(given=given).is_ready()

    warnings = [line for level, line in pb_utils.logged if level == "warn"]
    starts = ("dynamic_batching has no use", "response_cache: varlen's own cache keeps answers")
    assert len(warnings) == len(starts)
    assert all(map(str.startswith, warnings, [f"varlen: m v3: {start}" for start in starts]))


def test_warmup_rows_that_are_refused_are_skipped_and_others_run(load, ask, pb_utils):
    sample = {"name": "first", "batch_size": 1, "count": 3}
    model = load(given=model_config(model_warmup=[sample], parameters={"threads": "1"}))
    no_tokens = {"input_ids": ids([5, 5]), "attention_mask": ids([0, 0])}
    refused, also, right = ask(**no_tokens), ask(**no_tokens), ask(text=text("the cat"))

    for request in (refused, also, right):
        model.execute([request])
        wait_for(request)

    # an error would end the load
    for request in (refused, also):
        assert request.response.error() is None
        assert request.response.output_tensors() == []
    assert result(right).as_numpy().shape == (1, 24)
    skipped = [line for level, line in pb_utils.logged if "are skipped: row 0" in line]
    assert len(skipped) == 1
    # the rows of clients follow
    later = ask(**no_tokens)
    model.execute([later])
    assert failure(later) == (pb_utils.TritonError.INVALID_ARG, failure(later)[1])


@pytest.mark.parametrize("way", ["id", "pause"])
def test_a_request_of_a_client_before_counted_warmup_rows_gets_its_error(
    way, load, ask, pb_utils, server_model, monkeypatch
):
    sample = {"name": "first", "batch_size": 1, "count": 9}
    model = load(given=model_config(model_warmup=[sample], parameters={"threads": "1"}))
    no_tokens = {"input_ids": ids([5, 5]), "attention_mask": ids([0, 0])}
    row, of_client, later = (ask(**no_tokens) for _ in range(3))
    model.execute([row])
    wait_for(row)
    if way == "id":
        of_client.id = "1"
    else:
        monkeypatch.setattr(server_model, "_WARMUP_PAUSE_SECONDS", 0.0)

    model.execute([of_client, later])

    assert row.response.error() is None
    for request in (of_client, later):
        assert failure(request)[0] == pb_utils.TritonError.INVALID_ARG


def test_a_load_error_names_no_path(load, pb_utils, tmp_path):
    linked = tmp_path / "linked"
    (tmp_path / "elsewhere").mkdir()
    linked.symlink_to(tmp_path / "elsewhere")

    for folder in (tmp_path / "elsewhere", linked, tmp_path / "missing"):
        with pytest.raises(pb_utils.TritonModelException) as caught:
            load(folder)

        assert "the checkpoint folder" in str(caught.value)
        assert "/" not in str(caught.value)


def test_an_unexpected_load_error_goes_to_the_log_alone(
    load, complete, server_model, pb_utils, small_bert, monkeypatch
):
    def fail(folder, **settings):
        raise OSError(5, "Input/output error", str(folder))

    monkeypatch.setattr(server_model.Checkpoint, "open", fail)
    message = "the model could not be loaded; the server's log says why"

    for call in (load, lambda: complete(small_bert, EMPTY)):
        pb_utils.logged.clear()
        with pytest.raises(pb_utils.TritonModelException, match=message):
            call()
        assert any(str(small_bert) in line and "Traceback" in line for line in errors(pb_utils))


def test_a_load_without_its_watchdog_fails_without_a_path(
    load, server_model, pb_utils, monkeypatch
):
    def fail(name):
        raise FileNotFoundError(2, "No such file or directory", "/bin/sh")

    monkeypatch.setattr(server_model, "start_watchdog", fail)

    with pytest.raises(pb_utils.TritonModelException) as caught:
        load()

    assert str(caught.value) == "the model could not be loaded; the server's log says why"


def test_no_frame_of_a_load_error_names_a_path(load, server_model, pb_utils, tmp_path):
    # the server adds the stack frames, with file names, to the message
    pb_utils.model_dir = str(tmp_path)
    made = pb_utils.ModelConfig(json.dumps(EMPTY))
    model = server_model.TritonPythonModel()

    for call in (
        lambda: model.auto_complete_config(made),
        lambda: model.initialize(initialize_args(model_config())),
    ):
        with pytest.raises(pb_utils.TritonModelException) as caught:
            call()

        files = [str(entry.path) for entry in caught.traceback]
        files = [path for path in files if Path(path).parent != Path(__file__).parent]
        assert len(files) == 1
        assert not files[0].endswith(".py")


def test_what_the_server_fills_in_loads(load):
    filled = {
        "batch_input": [],
        "batch_output": [],
        "optimization": {"priority": "PRIORITY_DEFAULT", "eager_batching": False},
        "metric_tags": {},
        "model_warmup": [],
        "version_policy": {"latest": {"num_versions": 1}},
    }

    assert load(given=model_config(parameters={"dtype": "fp32"}, **filled)).is_ready()


def test_refuses_a_numpy_that_the_server_corrupts(load, pb_utils, monkeypatch):
    monkeypatch.setattr(np, "__version__", "2.4.6")
    pb_utils.corrupts_arrays = True

    message = "corrupts arrays of numpy 2.4.6: install numpy<2"
    with pytest.raises(pb_utils.TritonModelException, match=re.escape(message)):
        load()


@pytest.fixture
def complete(server_model, pb_utils):
    """Return a function that completes a configuration for a checkpoint."""

    def complete(folder, given):
        pb_utils.model_dir = str(folder)
        made = pb_utils.ModelConfig(json.dumps(given))
        return server_model.TritonPythonModel.auto_complete_config(made).as_dict()

    return complete


EMPTY = {"name": "m", "max_batch_size": 0, "input": [], "output": [], "parameters": {}}


def test_auto_complete_fills_an_empty_configuration(complete, small_bert):
    completed = complete(small_bert, EMPTY)

    assert completed["max_batch_size"] == 64
    names = ["text", "input_ids", "attention_mask", "token_type_ids"]
    assert [entry["name"] for entry in completed["input"]] == names
    assert all(entry["optional"] for entry in completed["input"])
    assert completed["output"] == [
        {"name": "sentence_embedding", "data_type": "TYPE_FP32", "dims": [24]},
        {"name": "num_tokens", "data_type": "TYPE_INT32", "dims": [1]},
    ]


def test_a_completed_configuration_loads(complete, small_bert, load):
    completed = complete(small_bert, EMPTY)

    assert load(given=completed).is_ready()


def test_auto_complete_and_load_leave_out_the_fields_that_the_owner_names(complete, folder, load):
    set_fields(folder, "config.json", is_decoder=True)
    parameters = {"ignore_config_fields": {"string_value": "is_decoder"}}

    completed = complete(folder, {**EMPTY, "parameters": parameters})

    assert load(folder, completed).is_ready()


def test_auto_complete_follows_the_task(complete, make_checkpoint):
    folder = make_checkpoint("BertForSequenceClassification", num_labels=5)
    given = {**EMPTY, "parameters": {"task": {"string_value": "rerank"}}}

    completed = complete(folder, given)

    assert completed["output"] == [
        {"name": "logits", "data_type": "TYPE_FP32", "dims": [5]},
        {"name": "scores", "data_type": "TYPE_FP32", "dims": [5]},
        {"name": "labels", "data_type": "TYPE_STRING", "dims": [5]},
        {"name": "num_tokens", "data_type": "TYPE_INT32", "dims": [1]},
    ]
    assert "text_pair" in [entry["name"] for entry in completed["input"]]


def test_auto_complete_keeps_what_was_written(complete, small_bert):
    given = model_config(max_batch_size=7)
    given["input"] = given["input"][:1]

    completed = complete(small_bert, copy.deepcopy(given))

    assert completed == given


def test_auto_complete_refuses_what_it_cannot_read(complete, pb_utils, small_bert, tmp_path):
    nonsense = {**EMPTY, "parameters": {"nonsense": {"string_value": "1"}}}

    with pytest.raises(pb_utils.TritonModelException, match="nonsense"):
        complete(small_bert, nonsense)
    with pytest.raises(pb_utils.TritonModelException, match="config.json"):
        complete(tmp_path, EMPTY)


@pytest.fixture(scope="session")
def small_gpt2(make_checkpoint):
    return make_checkpoint("GPT2LMHeadModel")


@pytest.fixture
def load_generator(load, small_gpt2):
    """Return a function that loads a model that generates."""

    def load_generator(*, decoupled=True, **parameters):
        given = model_config(
            "generate", parameters={"dtype": "fp32", "kv_bytes": "1000000", **parameters}
        )
        given["max_batch_size"] = 0
        given["model_transaction_policy"] = {"decoupled": decoupled}
        return load(small_gpt2, given)

    return load_generator


GREEDY = {"temperature": 0, "ignore_eos": True}


def generated(request):
    """Return the texts of the responses to a request."""
    wait_for(request)
    assert request.response.error() is None, request.response.error().message()
    return [response.output_tensors()[0].as_numpy().tolist() for response in request.responses]


def prompt(value="the cat"):
    return np.array([value.encode()], dtype=object)


def flag(value):
    return np.array([value])


def series_of(model):
    """Return the current value of each gauge and total of a model, by name."""
    return {metric.value: value for metric, value in model._service.snapshot().items()}


def test_a_model_that_generates_streams_if_it_is_decoupled(load_generator, ask, monkeypatch):
    model = load_generator()
    runner, steps = model._service.model.runner, []
    launch = runner.launch_batch

    def launch_when_sent(batch):
        # parts that wait to be sent go together
        steps.append(batch)
        deadline = time.monotonic() + 10.0
        while len(steps) == 6 and not streamed.sends and time.monotonic() < deadline:
            time.sleep(1e-3)
        return launch(batch)

    monkeypatch.setattr(runner, "launch_batch", launch_when_sent)
    options = {"max_tokens": 9, **GREEDY}
    streamed, whole = (
        ask(options, decoupled=True, text_input=prompt(), stream=flag(stream))
        for stream in (True, False)
    )

    model.execute([streamed])
    model.execute([whole])

    [[text]] = generated(whole)
    assert text.startswith(b"the cat")
    assert b"the cat" + b"".join(part for (part,) in generated(streamed)) == text
    assert streamed.sends > 1
    assert series_of(model)["varlen_decode_tokens_total"] >= 16


def test_a_model_that_generates_without_parts_answers_once(load_generator, ask, pb_utils):
    model = load_generator(decoupled=False)
    streamed = ask(text_input=prompt(), stream=flag(True))
    whole = ask(
        {"max_tokens": 5, **GREEDY}, input_ids=np.array([5, 6]), return_output_ids=flag(True)
    )

    model.execute([streamed])
    model.execute([whole])

    assert failure(streamed)[0] == pb_utils.TritonError.INVALID_ARG
    assert "model_transaction_policy" in failure(streamed)[1]
    generated(whole)
    [_, ids] = whole.response.output_tensors()
    assert (ids.name(), ids.as_numpy().shape) == ("output_ids", (5,))


def test_requests_that_wait_for_their_grammar_count_among_those_that_wait(
    load_generator, ask, pb_utils
):
    model = load_generator(max_queued_requests="1")
    go_on, late = Event(), ask(text_input=prompt())
    draft = Draft((TokenizationTask(1, lambda: (), lambda _: go_on.is_set()),), DEFAULT_OPTIONS)
    reply = SimpleNamespace(is_cancelled=lambda: False)
    model._service.model.compile_queue.submit(
        draft, reply, lambda _: None, arrival=time.monotonic()
    )

    model.execute([late])

    go_on.set()
    assert failure(late)[0] == pb_utils.TritonError.UNAVAILABLE
    assert "1 requests wait" in failure(late)[1]


def test_a_bad_request_to_generate_is_the_caller_s_fault(load_generator, ask, pb_utils):
    model = load_generator()
    bad = [
        ask(decoupled=True),
        ask({"max_tokens": 0}, decoupled=True, text_input=prompt()),
        ask(decoupled=True, text_input=prompt(""), stream=flag(True)),
        ask(timeout=30, decoupled=True, text_input=prompt()),
        ask(decoupled=True, input_ids=np.array([10**6])),
        ask(decoupled=True, messages=prompt("[]")),
    ]

    for request in bad:
        model.execute([request])

    assert [failure(request)[0] for request in bad] == [pb_utils.TritonError.INVALID_ARG] * 6
    assert all(request.sends == 1 for request in bad)


def assert_nothing_keeps(model, make_request):
    """Run a request, and check that all of it is freed without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        request = make_request()
        kept = weakref.ref(request)
        model.execute([request])
        wait_for(request)
        del request
        # the thread that has sent the answer may hold it for a moment
        deadline = time.monotonic() + SECONDS
        while kept() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "tensors",
    [
        {"text": text("the cat")},
        {"text": text(b"\xff")},
        {"text": text("the cat " * 10**5)},
        {"input_ids": ids([2, 5, 3])},
        {"input_ids": ids([2, 5, 10**6])},
        {"parameters": {"deadline_ms": 1e-3}, "text": text("the cat")},
        {"parameters": {"deadline_ms": "soon"}, "text": text("the cat")},
    ],
)
def test_nothing_keeps_a_request_once_it_is_answered(load, ask, tensors):
    assert_nothing_keeps(load(), lambda: ask(**tensors))


@pytest.mark.parametrize(
    "tensors",
    [
        {"text_input": prompt()},
        {"text_input": prompt(), "stream": flag(True)},
        {"text_input": np.array([b"\xff"], dtype=object)},
        {"messages": prompt("[]")},
        {"parameters": {"guided_json": "{"}, "text_input": prompt()},
        {"parameters": {"guided_json": '{"type": 1}'}, "text_input": prompt()},
        {"parameters": {"guided_regex": "("}, "text_input": prompt()},
    ],
)
def test_nothing_keeps_a_request_to_generate_once_it_is_answered(load_generator, ask, tensors):
    options = {"parameters": {"max_tokens": 5}} | tensors
    assert_nothing_keeps(load_generator(), lambda: ask(**options, decoupled=True))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_generation_and_its_blocks_return(
    load_generator, ask, pb_utils, stream
):
    model = load_generator()
    request = ask({"max_tokens": 300, **GREEDY}, decoupled=True, text_input=prompt())
    request._inputs.append(pb_utils.Tensor("stream", flag(stream)))

    model.execute([request])
    until = time.monotonic() + SECONDS
    while not series_of(model)["varlen_decode_tokens_total"]:
        assert time.monotonic() < until
    request.cancelled = True

    assert failure(request)[0] == pb_utils.TritonError.CANCELLED
    assert series_of(model)["varlen_kv_blocks_used"] == 0


def test_many_requests_to_generate_are_each_answered_once(load_generator, ask):
    model = load_generator()
    requests = [[] for _ in range(4)]

    def send(index):
        rng = np.random.default_rng(index)
        for _ in range(15):
            options = {"max_tokens": int(rng.integers(1, 20)), "n": int(rng.integers(1, 3))}
            if rng.random() < 0.2:
                options["deadline_ms"] = 20
            request = ask(
                options,
                decoupled=True,
                input_ids=rng.integers(1, 200, rng.integers(1, 60)),
                stream=flag(rng.random() < 0.7),
            )
            request.cancelled = rng.random() < 0.1
            request.part_fails = rng.random() < 0.1
            requests[index].append(request)
            model.execute([request])

    run_in_threads(4, send)

    everything = [request for part in requests for request in part]
    wait_for(*everything)
    until = time.monotonic() + SECONDS
    while series_of(model)["varlen_kv_blocks_used"] or model._service.admission.depth != (0, 0):
        assert time.monotonic() < until


@pytest.mark.parametrize("policy", [None, {"decoupled": False}, {"decoupled": True}], ids=str)
def test_auto_complete_decouples_a_model_that_generates_unless_told_otherwise(
    complete, small_gpt2, load, policy
):
    given = {**EMPTY, "parameters": {"kv_bytes": {"string_value": "1000000"}}}
    if policy is not None:
        given["model_transaction_policy"] = policy

    completed = complete(small_gpt2, given)

    assert completed["model_transaction_policy"] == (policy or {"decoupled": True})
    assert completed["max_batch_size"] == 0
    assert {"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]} in completed["output"]
    assert all(entry["optional"] for entry in completed["input"])
    assert load(small_gpt2, completed).is_ready()


def test_a_traced_request_has_spans_of_its_phases(load, ask, server_model, monkeypatch):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()

    def new_tracer(model, version):
        return RequestTracer(model, version, lambda: SimpleSpanProcessor(exporter))

    monkeypatch.setattr(server_model, "RequestTracer", new_tracer)
    model = load()
    context = '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}'
    traced, untraced = ask(text=text("the cat", "a")), ask(text=text("a"))
    refused = ask(text=text(b"\xff"))
    traced.trace_context = refused.trace_context = context

    model.execute([traced, untraced, refused])

    result(traced)
    result(untraced)
    failure(refused)
    # the spans come after the answer
    model._outbox.close()
    spans = exporter.get_finished_spans()
    ok = {span.name: span for span in spans if span.attributes["varlen.outcome"] == "ok"}
    assert set(ok) == {"varlen.queue", "varlen.run", "varlen.send"}
    assert ok["varlen.run"].attributes["varlen.rows"] == 2
    assert ok["varlen.run"].attributes["varlen.tokens"] == 3 + 4
    assert ok["varlen.run"].attributes["varlen.batch.sequences"] >= 1
    invalid = [span.name for span in spans if span.attributes["varlen.outcome"] == "invalid"]
    assert invalid == ["varlen.queue", "varlen.send"]


def test_a_request_is_answered_even_if_it_cannot_be_traced(load, ask, server_model, monkeypatch):
    asked = []

    class BrokenTracer:
        def begin(self, context, arrival):
            asked.append(context)
            raise OSError("no trace")

        def close(self):
            pass

    monkeypatch.setattr(server_model, "RequestTracer", lambda model, version: BrokenTracer())
    model = load()
    first, second = ask(text=text("a")), ask(text=text("b"))

    model.execute([first, second])

    result(first)
    result(second)
    # it is not tried again
    assert len(asked) == 1
