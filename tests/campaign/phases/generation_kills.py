"""Killed workers of models that generate: their requests go on in the next one."""

import math
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from threading import Event

from tests.server.serving import load, metrics, step_worker, stub_of, unload, wait_until

from ..attacks import good
from ..beside import beside
from ..drive import ALL_RIGHT, Attack, Bounds, Least, Share, send_all
from ..endings import Ending
from ..models import DECODER, TRANSLATOR
from ..phase import Campaign, attacked_server, send_mix
from ..report import Report
from ..target import Target

_MODELS = (DECODER, TRANSLATOR)
_GOOD: tuple[tuple[float, Attack[Target]], ...] = (
    (2, good.stream),
    (2, good.stream_seeded),
    (1, good.samples_seeded),
    (1, good.generate),
    (4, good.translate),
)
_MOST_RIGHT: Least = {"right": 0.7}
# Restarts that a model has in ten minutes.
_RESTARTS = 3
# Share of kills that come as soon as the next worker runs, so that some requests meet two.
_AT_ONCE = 0.5
_CRASHED_TWICE = "worker processes ended while they ran this request"
_STOPPED = "stopped after a fault"
_POLL_SECONDS = 0.1
# Bounds of each stream of requests in which a worker is killed until its model stops.
_STOP_BOUNDS = Bounds(3.0, 60)
_AFTER_BOUNDS = Bounds(60.0, 12)
# What the server logs of a model that stops: a step that failed, a check that failed, and the end.
_LOG_OF_STOPS = (
    r"a batch of \d+ sequences failed",
    "the smallest batch failed too",
    _STOPPED,
    "^Traceback",
)


def generation_workers(campaign: Campaign, report: Report, seconds: float) -> None:
    """Kill workers under load as often as they start again, and then once more.

    Every answer must be right, unless its request was in the steps of two killed workers. After the last kill the
    model stops, all its requests end, and it serves again once it is loaded.
    """
    with attacked_server(campaign, report, _MODELS, allowed_log=_LOG_OF_STOPS) as target:
        victims = {model: _Victim(target, model, f"{campaign.seed} {model}") for model in _MODELS}
        mix = [
            Share(weight, unless_killed_twice(each, victims), _MOST_RIGHT) for weight, each in _GOOD
        ]
        kill = partial(_kill_all, [*victims.values()], seconds)
        killing = beside("the thread that kills", kill, report.ledger)
        send_mix(campaign, report, target, mix, seconds, beside=killing)
        report.check(
            holds="Traceback" not in target.server.log(), problem="a restart logs a traceback"
        )
        for victim in victims.values():
            wait_until(victim.has_restarted, f"the restarts of {victim.model} are counted")
            report.count("killed workers", len(victim.kills))
            _stop(target, victim, report, f"{campaign.seed} stop")
        after = [Share(1, each, ALL_RIGHT) for each in (good.stream_seeded, good.translate)]
        send_all(target, after, _AFTER_BOUNDS, report.ledger, name=f"{campaign.seed} after")


@dataclass(slots=True)
class _Kill:
    """A killed worker: when it was killed, and when another one was known to run."""

    began: float
    ended: float = math.inf


class _Victim:
    """The worker of one model.

    Attributes:
        model: name of the model.
        kills: killed workers.
    """

    def __init__(self, target: Target, model: str, seed: str) -> None:
        self._server = target.server
        self._stub = stub_of(target.server, model)
        self._draw = random.Random(f"{seed} kills")
        self.model = model
        self.kills: list[_Kill] = []

    def has_restarted(self) -> bool:
        """Return whether the server has counted a restart for each kill."""
        restarts = metrics(self._server, self.model)["varlen_worker_restarts_total"]
        if restarts == len(self.kills) and self.kills:
            self.kills[-1].ended = min(self.kills[-1].ended, time.monotonic())
        return restarts == len(self.kills)

    def kills_since(self, began: float) -> int:
        """Return the number of killed workers that may have run a request since this time."""
        return sum(kill.ended >= began for kill in self.kills)

    def kill(self) -> None:
        """Kill the worker, which has loaded the model."""
        kind = self._draw.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT))
        # first, since a request that fails looks for it
        self.kills.append(_Kill(time.monotonic()))
        os.kill(step_worker(self._stub), kind)

    def kill_some(self, seconds: float, is_over: Event) -> None:
        """Kill the worker while requests come, once at least, as often as it starts again."""
        while len(self.kills) < _RESTARTS:
            if not self.kills or self._draw.random() >= _AT_ONCE:
                is_over.wait(self._draw.uniform(0, seconds / (_RESTARTS + 1)))
            if self.kills and is_over.is_set():
                return
            self.kill()
            # one that loads is not killed: a model whose worker cannot start stops
            while not self.has_restarted() and not is_over.wait(_POLL_SECONDS):
                pass


def _kill_all(victims: Sequence[_Victim], seconds: float, is_over: Event) -> None:
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda victim: victim.kill_some(seconds, is_over), victims):
            pass


def unless_killed_twice(attack: Attack[Target], victims: Mapping[str, _Victim]) -> Attack[Target]:
    """Return an attack whose requests may fail if two workers were killed meanwhile."""

    @wraps(attack)
    def send(draw: random.Random, target: Target) -> Ending:
        began = time.monotonic()
        ending = attack(draw, target)
        if _CRASHED_TWICE not in ending.message:
            return ending
        return _internal(ending) if victims[ending.model].kills_since(began) >= 2 else ending

    return send


def _stop(target: Target, victim: _Victim, report: Report, name: str) -> None:
    """Kill the worker until the model stops, and load it again."""
    model = victim.model
    attack = {DECODER: good.stream_seeded, TRANSLATOR: good.translate}[model]
    mix = [Share(1, _or_stopped(unless_killed_twice(attack, {model: victim})))]

    def kill(_: Event) -> None:
        wait_until(victim.has_restarted, f"{model} runs again")
        victim.kill()

    while len(victim.kills) <= _RESTARTS:
        with beside(f"the kill of {model}", kill, report.ledger):
            send_all(target, mix, _STOP_BOUNDS, report.ledger, name=f"{name} {len(victim.kills)}")
    ending = attack(random.Random(name), target)
    report.check(holds=_STOPPED in ending.message, problem=f"{model} has not stopped: {ending}")
    unload(target.server, model)
    reason = load(target.server, model)
    report.check(holds=reason is None, problem=f"{model} does not load again: {reason}")
    report.count("stopped models")


def _or_stopped(attack: Attack[Target]) -> Attack[Target]:
    """Return an attack whose requests may find that the model has stopped."""

    @wraps(attack)
    def send(draw: random.Random, target: Target) -> Ending:
        ending = attack(draw, target)
        return _internal(ending) if _STOPPED in ending.message else ending

    return send


def _internal(ending: Ending) -> Ending:
    return Ending("refused", ending.model, "INTERNAL", ending.message, is_ours=True)
