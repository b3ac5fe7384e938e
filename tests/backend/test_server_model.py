"""The server's entry against a stand-in for the server that punishes what the real one dies of."""

import contextlib
import copy
import importlib
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from tests.closeness import assert_close, encoder_roundings
from varlen import wire
from varlen.errors import DeadlineError

FAKES = Path(__file__).parent / "fakes"
UTILS = "triton_python_backend_utils"
SERVER_MODULES = ("varlen.server_model", "varlen.server_process", "varlen.server_replies")
SECONDS = 20.0
OUR_THREADS = ("varlen-engine", "varlen-sender", "varlen-metrics")


@pytest.fixture
def pb_utils(monkeypatch):
    """Return a fresh stand-in, importable under the real name."""
    spec = importlib.util.spec_from_file_location(UTILS, FAKES / f"{UTILS}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, UTILS, module)
    spec.loader.exec_module(module)
    yield module
    assert module.crashes == []


@pytest.fixture
def server_model(pb_utils, monkeypatch):
    """Return a fresh import of the entry, whose watchdog ends at once."""
    logger = logging.getLogger("varlen")
    kept = logger.level, logger.propagate, list(logger.handlers)
    for name in SERVER_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("varlen.server_model")
    monkeypatch.setattr(sys.modules["varlen.server_process"], "_WATCHDOG", "exit 0")
    yield module
    logger.setLevel(kept[0])
    logger.propagate = kept[1]
    logger.handlers[:] = kept[2]
    for name in SERVER_MODULES:
        sys.modules.pop(name, None)


def config(task="embed", hidden=24, labels=0, **changes):
    """Return a complete configuration as the server hands it over."""
    entries = {
        section: [{"name": s.name, "data_type": s.data_type, "dims": list(s.dims)} for s in specs]
        for section, specs in (
            ("input", wire.input_specs(task)),
            ("output", wire.output_specs(task, hidden, labels)),
        )
    }
    parameters = changes.pop("parameters", {})
    return {
        "name": "m",
        "max_batch_size": 64,
        **entries,
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        **changes,
    }


def args(model_config):
    return {
        "model_config": json.dumps(model_config),
        "model_name": "m",
        "model_version": "3",
        "model_instance_name": "m_0",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }


def our_threads():
    return [t for t in threading.enumerate() if t.name.startswith(OUR_THREADS)]


@pytest.fixture
def load(server_model, pb_utils, small_bert):
    """Return a function that loads a model; what is loaded is finalized when the test ends."""
    loaded = []

    def load(folder=small_bert, model_config=None, **parameters):
        pb_utils.model_dir = str(folder)
        model = server_model.TritonPythonModel()
        parameters = {"dtype": "fp32", "warmup_seconds": "0", **parameters}
        model.initialize(args(model_config or config(parameters=parameters)))
        loaded.append(model)
        return model

    yield load
    for model in loaded:
        finalizer = Thread(target=model.finalize, daemon=True)
        finalizer.start()
        finalizer.join(SECONDS)
        assert not finalizer.is_alive(), "finalize() hangs"
    assert our_threads() == []


@pytest.fixture
def ask(pb_utils):
    """Return a function that makes a request; it knows when it is answered."""

    def ask(parameters=None, *, timeout=0, **tensors):
        answered = Event()
        request = pb_utils.InferenceRequest(
            [pb_utils.Tensor(name, array) for name, array in tensors.items()],
            json.dumps(parameters) if parameters is not None else "",
            timeout=timeout,
            on_done=answered.set,
        )
        request.answered = answered
        return request

    return ask


def text(*rows):
    return np.array([[row if isinstance(row, bytes) else row.encode()] for row in rows], object)


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


def failure(request):
    wait_for(request)
    assert request.response.output_tensors() == []
    error = request.response.error()
    return error.code(), error.message()


def block(model):
    """Make the model wait in its first batch; return (it has begun, let it go on)."""
    runner = model._service.runner
    begun, go_on, run = Event(), Event(), runner.run

    def wait_and_run(prompts, options):
        begun.set()
        assert go_on.wait(SECONDS)
        return run(prompts, options)

    runner.run = wait_and_run
    return begun, go_on


def fail_once(model):
    """Make the model fail in its next batch."""
    runner = model._service.runner
    run = runner.run

    def fail(prompts, options):
        runner.run = run
        raise ZeroDivisionError("poison")

    runner.run = fail


def test_execute_answers_later_and_returns_none(load, ask):
    model = load()
    begun, go_on = block(model)
    request = ask(text=text("the cat"))

    assert model.execute([request]) is None
    assert begun.wait(SECONDS)
    assert request.sends == 0
    go_on.set()

    assert result(request).name() == "sentence_embedding"
    assert result(request).as_numpy().shape == (1, 24)
    assert request.sends == 1


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
    model_config = config(task, labels=3, parameters={"task": task})
    model = load(make_checkpoint(kind, num_labels=3), model_config)
    request = ask(text=text("the", "the cat"))

    model.execute([request])

    assert result(request).name() == name
    assert result(request).as_numpy().shape == shape


def test_a_bad_request_fails_alone(load, ask, pb_utils):
    model = load()
    good = [ask(text=text("the cat")), ask(input_ids=ids([2, 5, 3]))]
    bad = [
        (ask(text=text("")), "row 0: text is empty; send at least one word"),
        (ask(text=text(b"\xff")), "row 0: text is not UTF-8 at byte 0; send UTF-8"),
        (ask(text=text("a\0b")), "row 0: text holds a NUL character; remove it"),
        (ask(input_ids=ids([99])), "row 0: input_ids holds 99; this model takes 0 to 91"),
        (ask(input_ids=ids([])), "row 0: input_ids has no tokens; send at least one"),
        (
            ask(input_ids=ids([5] * 65)),
            "row 0: input_ids has 65 tokens; this model takes at most 64",
        ),
        (ask(), "the request has no inputs; send text, or input_ids"),
        (ask({"truncate": 1}, text=text("a")), "the parameter truncate is 1; send true or false"),
    ]

    model.execute([good[0], *(request for request, _ in bad), good[1]])

    for request, message in bad:
        assert failure(request) == (pb_utils.TritonError.INVALID_ARG, message)
    assert [result(request).as_numpy().shape for request in good] == [(1, 24)] * 2
    assert all(request.sends == 1 for request, _ in bad)


def test_a_full_queue_says_unavailable_at_once(load, ask, pb_utils):
    model = load(max_queued_requests="2")
    begun, go_on = block(model)
    running = ask(text=text("a"))
    model.execute([running])
    assert begun.wait(SECONDS)
    waiting = [ask(text=text("a")), ask(text=text("a"))]
    model.execute(waiting)
    refused = ask(text=text("a"))

    model.execute([refused])

    code, message = failure(refused)
    assert code == pb_utils.TritonError.UNAVAILABLE
    assert message == "the queue is full: 2 requests wait and 2 may; try again later"
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
    assert [request.options.deadline_seconds for request in seen] == [None, 5000.0, 4000.0]
    assert [request.options.priority for request in seen] == [0, 7, 0]


def test_a_missed_deadline_says_unavailable_and_is_counted_as_refused(
    load, ask, pb_utils, monkeypatch
):
    model = load()

    def refuse(request, reply):
        raise DeadlineError("the answer would come in 9 ms; 5 were given")

    monkeypatch.setattr(model._service.engine, "submit", refuse)
    request = ask({"deadline_ms": 5}, text=text("a"))

    model.execute([request])

    message = "deadline missed: the answer would come in 9 ms; 5 were given"
    assert failure(request) == (pb_utils.TritonError.UNAVAILABLE, message)
    model._exporter.flush()
    by_outcome = {
        metric.labels["outcome"]: metric.value
        for metric in family(pb_utils, "varlen_requests_total")
    }
    assert by_outcome["refused"] == 1


def test_a_cache_answers_again_without_the_model(load, ask):
    model = load(response_cache_bytes="100000")
    first = ask(text=text("the cat", "a river"))
    model.execute([first])
    expected = result(first).as_numpy()
    fail_once(model)
    again = [ask(text=text("a river")), ask({"normalize": True}, text=text("a river"))]

    model.execute(again)

    np.testing.assert_array_equal(result(again[0]).as_numpy(), expected[1:])
    assert "the model failed" in failure(again[1])[1]


def test_a_cancelled_request_is_answered_without_running(load, ask, pb_utils):
    model = load()
    begun, go_on = block(model)
    running, gone = ask(text=text("a")), ask(text=text("b"))
    model.execute([running])
    assert begun.wait(SECONDS)
    model.execute([gone])
    gone.cancelled = True
    go_on.set()

    assert failure(gone) == (pb_utils.TritonError.CANCELLED, "cancelled before it ran")
    result(running)


def test_a_cancel_check_that_fails_does_not_lose_the_request(load, ask):
    model = load()
    broken, company = ask(text=text("a")), ask(text=text("b"))
    broken.cancel_check_fails = True

    model.execute([broken, company])

    wait_for(broken, company)
    assert result(company).as_numpy().shape == (1, 24)
    assert model.is_ready()


def test_a_model_that_fails_says_so_without_details(load, ask, pb_utils):
    model = load()
    fail_once(model)
    broken = ask(text=text("a"))

    model.execute([broken])

    code, message = failure(broken)
    assert code == pb_utils.TritonError.INTERNAL
    assert (
        message == "the model failed on the batch that held this request; the server's log says why"
    )
    assert any(level == "error" and "ZeroDivisionError" in line for level, line in pb_utils.logged)
    after = ask(text=text("a"))
    model.execute([after])
    result(after)
    assert model.is_ready()


def test_a_model_whose_device_is_lost_is_not_ready_and_refuses_at_once(load, ask, pb_utils):
    model = load()

    def lost(prompts, options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    model._service.runner.run = lost
    first, later = ask(text=text("a")), ask(text=text("b"))
    model.execute([first])
    wait_for(first)
    assert not model.is_ready()

    model.execute([later])

    message = "the model has stopped after a fault of its device and cannot run requests; reload it"
    for request in (first, later):
        assert failure(request) == (pb_utils.TritonError.INTERNAL, message)


def test_a_request_that_cannot_be_read_is_answered(load, ask, pb_utils):
    model = load()
    broken, good = ask(text=text("a")), ask(text=text("b"))
    broken.inputs_fail = True

    model.execute([broken, good])

    message = "the request could not be read; the server's log says why"
    assert failure(broken) == (pb_utils.TritonError.INTERNAL, message)
    result(good)


@pytest.mark.parametrize("parameters", ["[]", "{", "3"])
def test_parameters_that_are_no_object_are_the_caller_s_fault(load, ask, pb_utils, parameters):
    model = load()
    request = ask(text=text("a"))
    request._parameters = parameters

    model.execute([request])

    message = f"the request parameters are {parameters!r}; send a JSON object"
    if parameters != "{":
        message = message.replace("'", "")
    assert failure(request) == (pb_utils.TritonError.INVALID_ARG, message)
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

    code, message = failure(thirty)

    assert code == pb_utils.TritonError.INVALID_ARG
    assert message.startswith("timeout is 30 microseconds; send at least 1000 microseconds")
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
    model._exporter.flush()
    by_outcome = {
        metric.labels["outcome"]: metric.value
        for metric in family(pb_utils, "varlen_requests_total")
    }
    assert (by_outcome["failed"], by_outcome["ok"]) == (1, 1)


def family(pb_utils, name):
    [found] = [family for family in pb_utils.MetricFamily.made if family.name == name]
    return found.series


class Stat:
    f_frsize = 4096

    def __init__(self, free):
        self.f_bavail = free // 4096


def test_a_large_answer_waits_for_no_shared_memory(load, ask, pb_utils, monkeypatch):
    model = load()
    monkeypatch.setattr(os, "statvfs", lambda path: Stat(100))
    monkeypatch.setattr(sys.modules["varlen.server_replies"], "_LARGE_BYTES", 200)
    large, small = ask(text=text("a", "b", "c")), ask(text=text("a"))

    model.execute([large, small])

    message = "the server has too little shared memory for an answer of 288 bytes"
    assert failure(large) == (pb_utils.TritonError.INTERNAL, message)
    assert large.sends == 1
    result(small)


def test_a_large_answer_is_sent_where_memory_holds_it_twice(server_model, monkeypatch):
    check = sys.modules["varlen.server_replies"].check_shared_memory
    for free, fits in [(2 << 21, True), ((2 << 21) - 4096, False)]:
        monkeypatch.setattr(os, "statvfs", lambda path, free=free: Stat(free))
        if fits:
            check(1 << 21)
        else:
            with pytest.raises(Exception, match="too little shared memory"):
                check(1 << 21)


def test_a_small_answer_asks_nothing_of_the_file_system(server_model, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: pytest.fail("asked"))

    sys.modules["varlen.server_replies"].check_shared_memory((1 << 20) - 1)


@pytest.mark.parametrize("cache_bytes", ["0", "6000"])
def test_many_requests_from_many_threads_are_each_answered_once(load, ask, cache_bytes):
    model = load(max_batch_tokens="64", max_queued_requests="50", response_cache_bytes=cache_bytes)
    requests = [[] for _ in range(4)]

    def send(index):
        rng = np.random.default_rng(index)
        for _ in range(100):
            kind = rng.integers(0, 5)
            if kind == 0:
                request = ask(text=text(""))
            elif kind == 1:
                request = ask(text=text("the cat"))
                request.cancelled = True
            else:
                shape = (rng.integers(1, 6), rng.integers(1, 20))
                # some of them are equal
                ids = rng.integers(0, 60, shape) if kind < 4 else np.full(shape, shape[1])
                given = [{}, {"deadline_ms": 5}, {"request_priority": 9}][rng.integers(0, 3)]
                request = ask(given, input_ids=ids)
            if kind == 2:
                request.send_fails = True
            requests[index].append(request)
            model.execute([request])

    threads = [Thread(target=send, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    everything = [request for part in requests for request in part]
    wait_for(*everything)
    assert all(request.sends == 1 for request in everything)
    assert model._service.admission.depth == (0, 0)


def test_is_ready_follows_the_engine(load):
    model = load()
    assert model.is_ready()

    model._service.close()

    assert not model.is_ready()


def test_finalize_answers_the_queue_and_ends_every_thread(load, ask):
    model = load(max_batch_tokens="64")
    begun, go_on = block(model)
    first = ask(text=text("a"))
    model.execute([first])
    assert begun.wait(SECONDS)
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

    assert failure(request) == (pb_utils.TritonError.INTERNAL, "the model is being unloaded")


def test_requests_are_counted_by_outcome(load, ask, pb_utils):
    model = load()
    requests = [ask(text=text("a", "b")), ask(text=text("")), ask(text=text("c"))]
    requests[2].cancelled = True
    model.execute(requests)
    wait_for(*requests)
    model.finalize()

    model._exporter.flush()

    totals = family(pb_utils, "varlen_requests_total")
    assert {metric.labels["outcome"]: metric.value for metric in totals} == {
        "ok": 1,
        "invalid": 1,
        "refused": 0,
        "cancelled": 1,
        "failed": 0,
    }
    labels = {"model": "m", "version": "3", "instance": "m_0"}
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
    line = r"varlen: m v3: serving embed in float32 on \d+ threads"
    assert any(re.match(line, entry) for entry in lines)
    assert all(entry.startswith("varlen: m v3: ") for entry in lines)


def refused(pb_utils, message):
    return pytest.raises(pb_utils.TritonModelException, match=re.escape(message))


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"response_cache": {"enable": True}},
            "response_cache is enabled; the server's cache ignores",
        ),
        (
            {"model_transaction_policy": {"decoupled": True}},
            "model_transaction_policy is decoupled",
        ),
        (
            {"sequence_batching": {}},
            "sequence_batching is set; its state per client has no meaning here",
        ),
        (
            {"dynamic_batching": {"preferred_batch_size": [64]}},
            "dynamic_batching is set; varlen forms batches itself, from its own queue: remove it",
        ),
        (
            {"batch_input": [{"kind": "BATCH_ELEMENT_COUNT"}]},
            "batch_input is set; varlen does not read it: remove it",
        ),
        (
            {"batch_output": [{"target_name": ["sentence_embedding"]}]},
            "batch_output is set; varlen does not write it: remove it",
        ),
        (
            {"instance_group": [{"kind": "KIND_CPU", "count": 2, "gpus": []}]},
            "instance_group has 2 instances on the CPU; allowed: 1. Each would load the weights",
        ),
        (
            {"instance_group": [{"kind": "KIND_MODEL", "count": 1}, {"kind": "KIND_CPU"}]},
            "instance_group has 2 instances on the CPU; allowed: 1",
        ),
        (
            {"instance_group": [{"kind": "KIND_GPU", "count": 3, "gpus": [0, 1]}]},
            "instance_group has 3 instances on GPU 0; allowed: 1",
        ),
        ({"max_batch_size": 0}, "max_batch_size is 0; a row is a sequence, so allow at least 1"),
        ({"parameters": {"batch_tokens": "3"}}, 'unknown parameter "batch_tokens". Did you mean'),
        ({"parameters": {"dtype": "int4"}}, 'dtype is "int4"; allowed: auto, fp32, fp16, bf16'),
        ({"parameters": {"dtype": "fp16"}}, 'dtype is "fp16", which needs a GPU; allowed on a CPU'),
        ({"parameters": {"device": "tpu"}}, 'device is "tpu"; allowed: auto, cpu, cuda'),
        ({"parameters": {"device": "cuda"}}, 'device is "cuda", GPU 0; torch sees no CUDA GPU'),
        ({"parameters": {"task": "classify"}}, 'task "classify" needs a BertForSequenceClassif'),
        (
            {"parameters": {"max_sequence_tokens": "65"}},
            "max_sequence_tokens is 65; this checkpoint",
        ),
        (
            {"input": [{"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]}]},
            'input "TEXT" is not one of the task embed; allowed: text, input_ids',
        ),
        (
            {"input": [{"name": "input_ids", "data_type": "TYPE_INT32", "dims": [-1]}]},
            "input \"input_ids\" is {'data_type': 'TYPE_INT32', 'dims': [-1]}; the model has",
        ),
        (
            {
                "input": [
                    {
                        "name": "text",
                        "data_type": "TYPE_STRING",
                        "dims": [1],
                        "reshape": {"shape": []},
                    }
                ]
            },
            'input "text" has a reshape; allowed: none, with dims [1]',
        ),
        (
            {"output": [{"name": "sentence_embedding", "data_type": "TYPE_FP32", "dims": [384]}]},
            "output \"sentence_embedding\" is {'data_type': 'TYPE_FP32', 'dims': [384]}; the model has",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses_to_load_what_it_could_not_serve(load, pb_utils, changes, message):
    with refused(pb_utils, message):
        load(model_config=config(**changes))
    assert our_threads() == []


def test_refuses_to_load_a_folder_that_is_no_checkpoint(load, pb_utils, tmp_path):
    with refused(pb_utils, "has no config.json"):
        load(tmp_path)


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
    load, server_model, pb_utils, small_bert, monkeypatch
):
    def fail(folder):
        raise OSError(5, "Input/output error", str(folder))

    monkeypatch.setattr(server_model.Checkpoint, "open", fail)
    message = "the model could not be loaded; the server's log says why"

    with refused(pb_utils, message):
        load()
    assert any(str(small_bert) in line and "Traceback" in line for line in errors(pb_utils))
    pb_utils.logged.clear()
    with refused(pb_utils, message):
        complete(server_model, pb_utils, small_bert, EMPTY)
    assert any(str(small_bert) in line and "Traceback" in line for line in errors(pb_utils))


def test_no_frame_of_a_load_error_names_a_path(load, server_model, pb_utils, tmp_path):
    # the server adds the frames, with their files, to the message
    pb_utils.model_dir = str(tmp_path)
    made = pb_utils.ModelConfig(json.dumps(EMPTY))
    model = server_model.TritonPythonModel()

    for call in (
        lambda: model.auto_complete_config(made),
        lambda: model.initialize(args(config())),
    ):
        with pytest.raises(pb_utils.TritonModelException) as caught:
            call()

        files = [str(entry.path) for entry in caught.traceback][2:]
        assert len(files) == 1
        assert not files[0].endswith(".py")


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [{"kind": "KIND_CPU", "count": 1, "gpus": []}],
        [{"kind": "KIND_MODEL", "count": 1}],
        [{"kind": "KIND_GPU", "count": 1, "gpus": [0, 1]}],
        [{"kind": "KIND_GPU", "count": 1, "gpus": [0]}, {"kind": "KIND_GPU", "gpus": [1]}],
    ],
    ids=str,
)
def test_one_instance_per_device_loads(load, groups):
    model_config = config(parameters={"dtype": "fp32"}, instance_group=groups)

    assert load(model_config=model_config).is_ready()


def test_what_the_server_fills_in_loads(load):
    filled = {
        "batch_input": [],
        "batch_output": [],
        "optimization": {"priority": "PRIORITY_DEFAULT", "eager_batching": False},
        "metric_tags": {},
        "model_warmup": [],
        "version_policy": {"latest": {"num_versions": 1}},
    }

    assert load(model_config=config(parameters={"dtype": "fp32"}, **filled)).is_ready()


def test_refuses_a_numpy_that_the_server_garbles(load, pb_utils):
    pb_utils.garbles_arrays = True

    with refused(pb_utils, f"garbles arrays of numpy {np.__version__}: install numpy<2"):
        load()


def test_dims_may_come_as_strings(load):
    model_config = config(parameters={"dtype": "fp32"})
    for section in ("input", "output"):
        for entry in model_config[section]:
            entry["dims"] = [str(dim) for dim in entry["dims"]]

    assert load(model_config=model_config).is_ready()


def complete(server_model, pb_utils, folder, given):
    pb_utils.model_dir = str(folder)
    made = pb_utils.ModelConfig(json.dumps(given))
    return server_model.TritonPythonModel.auto_complete_config(made).as_dict()


EMPTY = {"name": "m", "max_batch_size": 0, "input": [], "output": [], "parameters": {}}


def test_auto_complete_fills_an_empty_configuration(server_model, pb_utils, small_bert):
    completed = complete(server_model, pb_utils, small_bert, EMPTY)

    assert completed["max_batch_size"] == 64
    names = ["text", "input_ids", "attention_mask", "token_type_ids"]
    assert [entry["name"] for entry in completed["input"]] == names
    assert all(entry["optional"] for entry in completed["input"])
    assert completed["output"] == [
        {"name": "sentence_embedding", "data_type": "TYPE_FP32", "dims": [24]}
    ]


def test_a_completed_configuration_loads(server_model, pb_utils, small_bert, load):
    completed = complete(server_model, pb_utils, small_bert, EMPTY)

    assert load(model_config=completed).is_ready()


def test_auto_complete_follows_the_task(server_model, pb_utils, make_checkpoint):
    folder = make_checkpoint("BertForSequenceClassification", num_labels=5)
    given = {**EMPTY, "parameters": {"task": {"string_value": "rerank"}}}

    completed = complete(server_model, pb_utils, folder, given)

    assert completed["output"] == [{"name": "logits", "data_type": "TYPE_FP32", "dims": [5]}]
    assert "text_pair" in [entry["name"] for entry in completed["input"]]


def test_auto_complete_keeps_what_was_written(server_model, pb_utils, small_bert):
    given = config(max_batch_size=7)
    given["input"] = given["input"][:1]

    completed = complete(server_model, pb_utils, small_bert, copy.deepcopy(given))

    assert completed == given


@pytest.mark.parametrize(
    "parameters, message",
    [({"nonsense": {"string_value": "1"}}, 'unknown parameter "nonsense"')],
)
def test_auto_complete_says_what_is_wrong(server_model, pb_utils, small_bert, parameters, message):
    with refused(pb_utils, message):
        complete(server_model, pb_utils, small_bert, {**EMPTY, "parameters": parameters})


def test_auto_complete_says_which_file_is_missing(server_model, pb_utils, tmp_path):
    with refused(pb_utils, "has no config.json"):
        complete(server_model, pb_utils, tmp_path, EMPTY)


@pytest.fixture
def parent_and_child():
    """Start a process with a child; return (the process, the child's id)."""
    parent = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    yield parent, child
    parent.stdout.close()
    parent.kill()
    parent.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def watch(parent, child, proc="/proc"):
    server_process = importlib.import_module("varlen.server_process")
    script = server_process._WATCHDOG.replace("/proc", str(proc))

    return subprocess.Popen(["/bin/sh", "-c", script, "varlen-watchdog", str(parent), str(child)])


def runs(pid):
    """Return whether a process runs: it is there, and not dead but unburied."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def test_the_watchdog_ends_a_process_whose_parent_was_killed(pb_utils, parent_and_child):
    parent, child = parent_and_child
    watchdog = watch(parent.pid, child)
    assert runs(child)

    parent.kill()
    parent.wait()

    watchdog.wait(timeout=30)
    assert not runs(child)


@pytest.fixture
def zombie():
    """Return a process that was killed and that its parent, this one, has not waited for."""
    process = subprocess.Popen(["/bin/sh", "-c", "sleep 300"])
    yield process
    process.kill()
    process.wait()


def test_the_watchdog_ends_beside_a_zombie(pb_utils, zombie):
    watchdog = watch(os.getpid(), zombie.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        watchdog.wait(timeout=2)

    zombie.kill()

    assert watchdog.wait(timeout=30) == 0
    assert Path(f"/proc/{zombie.pid}").exists()


def test_the_watchdog_spares_another_process_of_the_same_id(pb_utils, tmp_path):
    # a /proc of our own: nothing can make the system give an id out again
    process = tmp_path / "77"
    process.mkdir()
    stat = "77 (a name (1) of it) S {parent} " + "0 " * 17 + "{started} 0 0\n"
    (process / "stat").write_text(stat.format(parent=5, started=1000))
    watchdog = watch(5, 77, proc=tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        watchdog.wait(timeout=2)

    # its parent is another one too, for which the first process would be killed
    (process / "next").write_text(stat.format(parent=6, started=2000))
    (process / "next").rename(process / "stat")

    assert watchdog.wait(timeout=30) == 0


def test_the_watchdog_ends_with_the_process_it_watches(pb_utils, parent_and_child):
    parent, child = parent_and_child
    watchdog = watch(parent.pid, child)

    os.kill(child, signal.SIGKILL)

    # its parent buries it
    assert watchdog.wait(timeout=30) is not None
    assert not runs(child)


def with_path(folder):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }


def test_importing_the_entry_does_not_import_torch():
    code = "import sys, varlen.model; sys.exit('torch' in sys.modules)"

    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=60,
        env=with_path(FAKES),
    )


def test_importing_the_entry_needs_no_class_of_the_server(tmp_path):
    # while the file is imported, the real module is still empty
    (tmp_path / f"{UTILS}.py").write_text("")

    subprocess.run(
        [sys.executable, "-c", "import varlen.model"],
        check=True,
        timeout=60,
        env=with_path(tmp_path),
    )


# Frees large blocks between small ones that stay: what a heap cannot give back.
FREE_LARGE_BLOCKS = """
import ctypes, resource, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from varlen.server_process import return_large_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
return_large_memory()
libc.free(libc.malloc(4 << 20))
before, blocks = resident(), []
for _ in range(32):
    blocks.append(libc.malloc(2 << 20))
    ctypes.memset(blocks[-1], 1, 2 << 20)
    ctypes.memset(libc.malloc(100_000), 1, 100_000)
assert resident() - before > 64 << 20
for block in blocks:
    libc.free(block)
print(resident() - before)
"""


def test_large_blocks_that_are_freed_go_back_to_the_system():
    done = subprocess.run(
        [sys.executable, "-c", FREE_LARGE_BLOCKS, str(FAKES)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert int(done.stdout) < 8 << 20


# Frees small blocks between a few that stay, and goes on working.
FREE_SMALL_BLOCKS = """
import ctypes, resource, sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from varlen.server_process import MemoryTrimmer

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
before, blocks = resident(), []
for _ in range(1000):
    blocks.append(libc.malloc(60_000))
    ctypes.memset(blocks[-1], 1, 60_000)
for number, block in enumerate(blocks):
    if number % 20:
        libc.free(block)
assert resident() - before > 32 << 20, "nothing keeps freed blocks back, so the test shows nothing"
trimmer = MemoryTrimmer()
deadline = time.monotonic() + 30
while resident() - before > 16 << 20 and time.monotonic() < deadline:
    sum(range(10_000))
trimmer.close()
print(resident() - before)
"""


def test_small_blocks_that_are_freed_go_back_to_the_system():
    done = subprocess.run(
        [sys.executable, "-c", FREE_SMALL_BLOCKS, str(FAKES)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert int(done.stdout) < 16 << 20


def test_a_c_library_without_these_calls_is_left_alone(server_model, monkeypatch):
    process = importlib.import_module("varlen.server_process")
    monkeypatch.setattr(process.ctypes, "CDLL", lambda _: object())

    process.return_large_memory()
    process.MemoryTrimmer().close()
