"""Fixtures of the server's entry point, against a strict stand-in for the server."""

import importlib
import json
import logging
import sys
import threading
from threading import Event, Thread

import pytest

from tests.backend.fakes.server_api import of_fake
from tests.backend.model_configs import initialize_args, model_config
from varlen.execution.workers import process
from varlen.service import generation, one_shot

SERVER_MODULES = ("varlen.server.entry", "varlen.server.process", "varlen.server.replies")
SECONDS = 20.0
MAIN_OUTPUTS = ("sentence_embedding", "last_hidden_state", "logits")
OUR_THREADS = (
    "varlen-engine",
    "varlen-sender",
    "varlen-metrics",
    "varlen-tokenizer",
    "varlen-grammar",
)


@pytest.fixture
def server_model(pb_utils, monkeypatch):
    """Return a fresh import of the entry point over `server_api`; its watchdog ends immediately."""
    loggers = [logging.getLogger(name) for name in ("varlen", "varlen_kernels")]
    kept = [(each.level, each.propagate, list(each.handlers)) for each in loggers]
    for name in SERVER_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("varlen.server.entry")
    monkeypatch.setattr(sys.modules["varlen.server.process"], "_WATCHDOG", "exit 0")
    # it visits all that this process has imported: a second
    monkeypatch.setattr(module, "freeze_objects", lambda: None)
    monkeypatch.setattr(module, "drop_library_pages", lambda: None)
    # this process does not end before the model loads
    monkeypatch.setattr(process, "start_early", lambda *_, **__: None)
    restricted = sys.modules[pb_utils.__name__]
    entry = module.TritonPythonModel
    for name in ("execute", "auto_complete_config"):
        monkeypatch.setattr(entry, name, seen_by_backend(entry.__dict__[name], restricted))
    yield module
    for logger, (level, propagates, handlers) in zip(loggers, kept, strict=True):
        logger.setLevel(level)
        logger.propagate = propagates
        logger.handlers[:] = handlers
    for name in SERVER_MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def our_threads():
    """Return a function that lists our threads that the test has started.

    Models that other tests of this process share may run too.
    """
    others = set(threading.enumerate())

    def our_threads():
        started = set(threading.enumerate()) - others
        return [each for each in started if each.name.startswith(OUR_THREADS)]

    return our_threads


@pytest.fixture
def load(server_model, pb_utils, small_bert, monkeypatch, our_threads):
    """Return a function that loads a model with one thread as its worker."""
    loaded = []
    load_workers = one_shot.load_workers

    def load_thread(*args, isolated, **kwargs):
        return load_workers(*args, isolated=False, **kwargs)

    monkeypatch.setattr(one_shot, "load_workers", load_thread)
    load_step_model = generation.load_step_model

    def load_here(*args, isolated, **kwargs):
        return load_step_model(*args, isolated=False, **kwargs)

    monkeypatch.setattr(generation, "load_step_model", load_here)

    def load(folder=small_bert, given=None, **parameters):
        pb_utils.model_dir = str(folder)
        model = server_model.TritonPythonModel()
        parameters = {"dtype": "fp32", "threads": "1", "warmup_seconds": "0", **parameters}
        model.initialize(initialize_args(given or model_config(parameters=parameters)))
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
    """Return a function that makes a request and can wait for its answer."""

    def ask(parameters=None, *, outputs=MAIN_OUTPUTS, timeout=0, decoupled=False, **tensors):
        answered = Event()
        request = pb_utils.InferenceRequest(
            [pb_utils.Tensor(name, array) for name, array in tensors.items()],
            json.dumps(parameters) if parameters is not None else "",
            outputs=outputs,
            timeout=timeout,
            decoupled=decoupled,
            on_done=answered.set,
        )
        request.answered = answered
        return request

    return ask


def seen_by_backend(function, restricted):
    """Return a method of the entry point that is called with objects of the fake."""
    if isinstance(function, staticmethod):
        return staticmethod(lambda given: of_fake(function(restricted.view(given))))
    return lambda self, given: function(self, restricted.view(given))
