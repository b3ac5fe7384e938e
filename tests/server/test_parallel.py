"""Models that several processes hold, ranks or stages, in the real server.

A lost process costs no answer, and none outlives its model.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import save_checkpoint
from varlen_client import Client

from .serving import (
    add_model,
    holders_of,
    is_running,
    load,
    metrics,
    model_state,
    running_server,
    stub_of,
    unload,
    wait_until,
)

pytestmark = pytest.mark.full

WRITER, ENCODER = "writer", "encoder"
SETTINGS = {"rank_timeout_seconds": "2", "threads": "2"}
# By the word that messages have for a process.
PARALLEL = {"rank": {"tensor_parallel": "2"}, "stage": {"pipeline_parallel": "2"}}
SENDERS = 8
# Least number of requests; more by hand.
REQUESTS = int(os.environ.get("VARLEN_PARALLEL_REQUESTS", "100"))


@pytest.fixture(scope="module", params=PARALLEL)
def word(request):
    """What each process of a model is called."""
    return str(request.param)


@pytest.fixture(scope="module")
def repository(word, tmp_path_factory):
    """A model of each kind, whose prompts and batches take several steps."""
    folder = tmp_path_factory.mktemp(word)
    settings = SETTINGS | PARALLEL[word]
    sizes = {"n_embd": 64, "n_inner": 256, "n_layer": 2, "n_head": 4, "n_positions": 2048}
    decoder = save_checkpoint(folder / "gpt2", "GPT2LMHeadModel", **sizes)
    encoder = save_checkpoint(folder / "bert", num_attention_heads=4, max_position_embeddings=512)
    add_model(folder / "models", WRITER, decoder, task="generate", max_step_tokens="96", **settings)
    add_model(folder / "models", ENCODER, encoder, **settings)
    return folder / "models"


@pytest.fixture(scope="module")
def running(repository):
    """A server with both."""
    with running_server(repository) as server:
        yield server


@pytest.fixture
def server(running):
    """The server, whose models may lose processes: one that generates stops after three restarts."""
    for model in (WRITER, ENCODER):
        if model_state(running, model) == "READY":
            restarts = metrics(running, model)["varlen_worker_restarts_total"]
            if model == ENCODER or not restarts:
                continue
        unload(running, model)
        assert load(running, model) is None
    return running


def tokens_of(length: int) -> list[int]:
    """Return a prompt."""
    return np.random.default_rng(length).integers(1, 50, length).tolist()


Ask = Callable[[Client, Client], Any]


def _write(length: int, **options: Any) -> Ask:
    def ask(writer: Client, _: Client) -> Any:
        return writer.generate(tokens_of(length), **options).token_ids

    return ask


def _embed(*lengths: int) -> Ask:
    def ask(_: Client, encoder: Client) -> Any:
        return encoder.embed([tokens_of(length) for length in lengths])

    return ask


# Prompts of many chunks, short and long answers, draws, searches, and batches of an encoder.
KINDS: tuple[Ask, ...] = (
    _write(700, max_tokens=4, temperature=0),
    _write(20, max_tokens=120, temperature=0, ignore_eos=True),
    _write(9, max_tokens=40, seed=5, ignore_eos=True),
    _write(30, max_tokens=30, num_beams=3),
    _embed(300, 3, 40),
    _embed(12),
)


def assert_same(found: Any, expected: Any) -> None:
    """Compare tokens, or vectors up to rounding: they depend on what a batch holds besides."""
    if isinstance(found, np.ndarray):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert found == expected


# How the model that generates and the encoder lose a process, then their leaders.
LOSSES = (
    (signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP),
    (signal.SIGKILL, signal.SIGSTOP, signal.SIGSTOP, signal.SIGKILL),
)


# the second half is for long runs by hand
@pytest.mark.parametrize("numbers", LOSSES if REQUESTS >= 1000 else LOSSES[:1], ids=str)
def test_answers_under_load_are_right_although_processes_are_lost(server, numbers):
    with (
        Client(server.grpc_url, WRITER) as writer,
        Client(server.grpc_url, ENCODER) as encoder,
    ):
        expected = [ask(writer, encoder) for ask in KINDS]
        count, ends = Counter[str](), threading.Event()

        def send(seed: int) -> None:
            numbers = random.Random(seed)
            while not ends.is_set() or count["answered"] < REQUESTS:
                kind = numbers.randrange(len(KINDS))
                assert_same(KINDS[kind](writer, encoder), expected[kind])
                count["answered"] += 1

        def restarts_of(model: str) -> float:
            return metrics(server, model)["varlen_worker_restarts_total"]

        def lose_processes() -> None:
            """Lose each process of each model in turn, while requests come."""
            restarts = {model: restarts_of(model) for model in (WRITER, ENCODER)}
            left = iter(numbers)
            for place in (1, 0):
                for model in (WRITER, ENCODER):
                    most = count["answered"] + REQUESTS // 8
                    wait_until(lambda most=most: count["answered"] > most, "requests are answered")
                    lost = holders_of(stub_of(server, model))[place]
                    os.kill(lost, next(left))
                    # a stopped one too
                    wait_until(lambda lost=lost: not is_running(lost), "a lost process is ended")
                    wait_until(
                        lambda model=model, most=restarts[model]: restarts_of(model) > most,
                        "all processes are started again",
                    )
                    restarts[model] += 1

        with ThreadPoolExecutor() as pool:
            senders = [pool.submit(send, seed) for seed in range(SENDERS)]
            try:
                lose_processes()
            finally:
                ends.set()
        for sender in senders:
            sender.result()


def test_a_process_that_is_lost_while_it_loads_refuses_the_model(word, server):
    before = holders_of(stub_of(server, WRITER))[1]
    unload(server, WRITER)
    ended = threading.Event()

    def kill_one() -> None:
        while not ended.is_set():
            # they are started one after another
            with suppress(ValueError, IndexError, OSError):
                started = holders_of(stub_of(server, WRITER))[1]
                if started != before:
                    os.kill(started, signal.SIGKILL)
                    ended.set()
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_one)
        error = load(server, WRITER)
        killing.result()

    assert error is not None
    assert f"{word} 1 of 2" in error
    assert model_state(server, WRITER) != "READY"
    assert load(server, WRITER) is None


def _kill_with_a_stopped_leader(stub: int) -> None:
    """Kill the process of a model whose leader reads no socket."""
    os.kill(holders_of(stub)[0], signal.SIGSTOP)
    os.kill(stub, signal.SIGKILL)


def test_no_process_outlives_its_model(server):
    ends: tuple[Callable[[int], None], ...] = (
        lambda _: unload(server, WRITER),
        _kill_with_a_stopped_leader,
        # the last test: a killed stub may end server 2.51 too (decision 0048)
        lambda _: os.kill(server.pid, signal.SIGKILL),
    )
    for end in ends:
        model = ENCODER if end is ends[-1] else WRITER
        stub = stub_of(server, model)
        holders = holders_of(stub)
        end(stub)
        wait_until(
            lambda holders=holders: not any(map(is_running, holders)), "all processes have ended"
        )
        if end is ends[0]:
            load(server, WRITER)
