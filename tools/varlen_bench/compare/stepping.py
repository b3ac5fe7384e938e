"""Engines that batch requests themselves, but whose steps their caller runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import TypeAlias

from varlen_bench.compare.passes import Ids, OnTokens, Submit

# Gives a request to the engine: its number, prompt and length of its answer.
Add: TypeAlias = Callable[[int, Ids, int], None]
# Runs one step: the number of each request with new tokens, these tokens, and whether they are its last.
Step: TypeAlias = Callable[[], Iterable[tuple[int, Ids, bool]]]


@dataclass(eq=False, slots=True)
class _Request:
    prompt: Ids
    limit: int
    on_tokens: OnTokens
    done: Future[None] = field(default_factory=Future)


def step_in_thread(load: Callable[[], tuple[Add, Step]]) -> Submit:
    """Return a function that starts one request; a thread runs steps while requests run.

    Tokens have the moment when their step ended. An error fails the requests that run, and all later ones.

    Args:
        load: loads the engine, in the thread that runs its steps: threads of OpenMP belong to the thread that calls.
    """
    loaded: Future[None] = Future()
    arrived: SimpleQueue[_Request] = SimpleQueue()
    running: dict[int, _Request] = {}
    numbers = count()

    def run_step(add: Add, step: Step) -> None:
        # without requests, wait for one
        while not running or not arrived.empty():
            request = arrived.get()
            number = next(numbers)
            running[number] = request
            add(number, request.prompt, request.limit)
        delivered = list(step())
        moment = time.perf_counter()
        for number, tokens, is_last in delivered:
            running[number].on_tokens(0, tokens, moment)
            if is_last:
                running.pop(number).done.set_result(None)

    def run() -> None:
        try:
            add, step = load()
        except BaseException as error:  # engines exit the program too
            loaded.set_exception(error)
            return
        loaded.set_result(None)
        try:
            while True:
                run_step(add, step)
        except Exception as error:  # whatever an engine raises
            for request in running.values():
                request.done.set_exception(error)
            # later ones would wait for ever
            while True:
                arrived.get().done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    loaded.result()

    def submit(prompt: Ids, limit: int, on_tokens: OnTokens) -> Future[None]:
        request = _Request(prompt, limit, on_tokens)
        arrived.put(request)
        return request.done

    return submit
