"""Killed processes: a worker costs no request, the process of a model costs a reload."""

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event

from tests.server.serving import (
    is_running,
    load,
    metrics,
    stub_of,
    unload,
    wait_until,
    worker_processes,
)
from varlen_tools.local_server import LocalServer

from ..attacks import good
from ..beside import beside
from ..drive import ALL_RIGHT, Bounds, Least, Share, send_all
from ..endings import Ending, Ledger
from ..models import DECODER, ENCODER, TRANSLATOR
from ..phase import Campaign, attacked_server, send_mix
from ..report import Report
from ..state import settled
from ..target import Target

_MODELS = (ENCODER, DECODER)
_MIX: tuple[Share[Target], ...] = (
    Share(8, good.embed, ALL_RIGHT),
    Share(1, good.generate, ALL_RIGHT),
)
# Seconds between two kills: a batch that has lost two workers fails.
_PAUSE = 2.0
_HOST_SHARE = 0.15
# Length of a stream of requests, in which a process is killed.
_KILL_SECONDS = 3.0
_KILLED = (ENCODER, TRANSLATOR, DECODER)
_LOG_OF_KILLS = (
    r"[Ss]tub process|not healthy|exit timeout|Exit timeout|in-flight|model_lifecycle",
)
# Server 2.51 keeps its own threads for a process that held requests.
_THREADS_KEPT = 40
# What the server, and our client, say of a model whose process is gone.
_GONE = (
    "not healthy",
    "has ended or does not respond",
    "Stub process",
    "NOT_FOUND",
    "not ready",
    "unknown model",
    "no version",
)


def workers(campaign: Campaign, report: Report, seconds: float) -> None:
    """Kill workers and their hosts under load: every answer must come, and be right."""
    # a killed worker is logged as a warning; a model that is loaded again says so
    with attacked_server(campaign, report, _MODELS) as target:
        victims = _Victims(stub_of(target.server, ENCODER), report)
        kill = partial(_kill_some, victims, random.Random(f"{campaign.seed} kills"))
        killing = beside("the thread that kills", kill, report.ledger)
        send_mix(campaign, report, target, _MIX, seconds, beside=killing)
        restarts = round(metrics(target.server, ENCODER)["varlen_worker_restarts_total"])
        report.count("restarts", restarts)
        # a worker is found to have ended when it gets its next batch
        killed = report.notes.get("killed workers", 0)
        missing = killed - restarts
        report.check(holds=killed > 0, problem="no worker was killed")
        report.check(holds=0 <= missing <= 2, problem=f"{missing} restarts are not counted")


def stubs(campaign: Campaign, report: Report, seconds: float) -> None:
    """Kill the process of a model under load, and load it again, some times."""
    draw = random.Random(f"{campaign.seed} stubs")
    with attacked_server(
        campaign,
        report,
        _KILLED,
        allowed_log=_LOG_OF_KILLS,
        loses_processes=True,
        arguments=("--exit-timeout-secs=3",),
    ) as target:
        name, bounds = f"{campaign.seed} stubs", Bounds(_KILL_SECONDS, campaign.requests)
        send_all(target, _AFTER_MIX, bounds, report.ledger, name=f"{name} warm-up")
        until = time.monotonic() + seconds
        report.before = settled(target.mark)
        number = 0
        # each model at least once
        while time.monotonic() < until or number < len(_KILLED):
            model = _KILLED[number % len(_KILLED)]
            target.killed = model
            bounds = Bounds(_KILL_SECONDS, max(1, campaign.requests // 10))
            kill = partial(_kill_stub, report, target.server, model, draw.uniform(0.2, 1.0))
            with beside(f"the kill of {model}", kill, report.ledger):
                send_all(target, _LOSING_MIX, bounds, report.ledger, name=f"{name} {number}")
            # a server that has lost the requests of a process never says that the model is unloaded
            unload(target.server, model)
            reason = load(target.server, model)
            report.check(holds=reason is None, problem=f"{model} does not load again: {reason}")
            target.killed = ""
            _check_answers(target, report.ledger, f"{name} {number} after")
            number += 1
        killed = report.notes.get("killed", 0)
        report.check(
            holds=0 < number == killed, problem=f"{killed} processes were killed in {number} rounds"
        )
        mix = (*_LOSING_MIX, *_AFTER_MIX)
        report.ledger.check_least({share.kind: share.least for share in mix})
        # the workers of killed processes have ended too; their watchdogs wait for the end of the server
        before = report.before
        watchdogs = before.processes["watchdog"] + number
        most = replace(
            before,
            processes={**before.processes, "watchdog": watchdogs},
            threads=before.threads + number * _THREADS_KEPT,
        )
        report.after = settled(target.mark, most)
        for problem in most.growth(report.after):
            report.ledger.report(problem)


def _embed_or_lose(draw: random.Random, target: Target) -> Ending:
    """Vectors, or an error that says that the model is gone."""
    return _or_lost(good.embed(draw, target), target)


def _translate_or_lose(draw: random.Random, target: Target) -> Ending:
    """A translation, or such an error."""
    return _or_lost(good.translate(draw, target), target)


def _stream_or_lose(draw: random.Random, target: Target) -> Ending:
    """A stream of tokens, or such an error."""
    return _or_lost(good.stream(draw, target), target)


def _or_lost(ending: Ending, target: Target) -> Ending:
    is_gone = ending.end == "lost" or any(text in ending.message for text in _GONE)
    if is_gone and ending.model == target.killed:
        # without the message, which is the server's own
        return Ending("left", ending.model, ending.code, rows=ending.rows)
    return ending


def _check_answers(target: Target, ledger: Ledger, name: str) -> None:
    send_all(target, _AFTER_MIX, Bounds(60.0, 12), ledger, name=name, threads=2)


# Both have requests that are lost, and good ones before the process is killed.
_LOST: Least = {"right": 0.05, "left": 0.0}
_LOSING_MIX = (
    Share(3, _embed_or_lose, _LOST),
    Share(1, _translate_or_lose, _LOST),
    Share(1, _stream_or_lose, _LOST),
)
_AFTER_MIX = (
    Share(1, good.embed, ALL_RIGHT),
    Share(1, good.translate, ALL_RIGHT),
    Share(1, good.stream, ALL_RIGHT),
)


class _Victims:
    """The host and the workers of one model."""

    def __init__(self, stub: int, report: Report) -> None:
        self._stub, self._report = stub, report
        # workers outlive their host; the oldest first
        self._workers: list[int] = []

    def kill_one(self, draw: random.Random) -> None:
        """Kill the oldest worker or the host, unless the host is loading."""
        host, found = self._find()
        if host and not found:
            return
        if host and draw.random() < _HOST_SHARE:
            os.kill(host, signal.SIGKILL)
            self._report.count("killed hosts")
        elif self._workers and (len(self._workers) > 1 or not host):
            victim = self._workers.pop(0)
            os.kill(victim, draw.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)))
            self._report.count("killed workers")

    def kill_orphans(self) -> None:
        """Kill the workers whose host is gone; those that replace them have one."""
        _, found = self._find()
        for pid in set(self._workers) - set(found):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._report.count("killed workers")

    def _find(self) -> tuple[int, list[int]]:
        """Return the host and its workers, and remember them; 0 is no host."""
        host, found = 0, list[int]()
        with suppress(ValueError):
            # a stub without a host has no such children
            host, found = worker_processes(self._stub)
        self._workers += [pid for pid in found if pid not in self._workers]
        self._workers = [pid for pid in self._workers if is_running(pid)]
        return host, found


def _kill_some(victims: _Victims, draw: random.Random, is_over: Event) -> None:
    """Kill a process now and then until the requests are over, one at least."""
    was_over = False
    while not was_over:
        # a process may have ended meanwhile
        with suppress(ProcessLookupError, FileNotFoundError):
            victims.kill_one(draw)
        was_over = is_over.wait(_PAUSE)
    victims.kill_orphans()


def _kill_stub(report: Report, server: LocalServer, model: str, delay: float, _: Event) -> None:
    time.sleep(delay)
    pid = stub_of(server, model)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid), f"process {pid} has ended")
    report.count("killed")
