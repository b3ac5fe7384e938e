"""Models that are unloaded and loaded under load: an accepted request is answered, the others are refused."""

import random
import time
from threading import Event, Thread

from tests.server.serving import load, model_state, unload, wait_until
from varlen_tools.local_server import LocalServer

from ..attacks import good
from ..drive import Bounds, Share, send_all
from ..endings import Ending
from ..models import CACHED, DECODER, TRANSLATOR
from ..phase import Campaign, Report, attacked_server
from ..state import settled
from ..target import Target

_MODELS = (CACHED, DECODER, TRANSLATOR)
# Errors of varlen's client when a model is not there.
_ABSENT = ("ModelNotFound", "ServerUnavailable")


def reloads(campaign: Campaign, report: Report, seconds: float) -> None:
    """Unload and load models at random, some before they have ended, while requests come."""
    with attacked_server(campaign, report, _MODELS) as target:
        mix = (Share(3, _embed), Share(2, _stream), Share(1, _generate), Share(1, _translate))
        name = f"{campaign.seed} reloads"
        send_all(target, mix, Bounds(0.1 * seconds, 50), report.ledger, name=f"{name} warm-up")
        report.before = settled(target.server.pid)
        ended = Event()
        thread = Thread(target=_reload, args=(campaign, report, target.server, ended))
        thread.start()
        bounds = Bounds(0.9 * seconds, campaign.requests)
        send_all(target, mix, bounds, report.ledger, name=name, threads=6)
        ended.set()
        thread.join()
        for model in _MODELS:
            reason = load(target.server, model)
            report.check(holds=reason is None, problem=f"{model} does not load: {reason}")
        good_mix = (Share(1, good.embed_cached), Share(1, good.generate), Share(1, good.translate))
        bounds = Bounds(60.0, 40)
        send_all(target, good_mix, bounds, report.ledger, name=f"{name} after", threads=4)
        report.after = settled(target.server.pid, report.before)
        for problem in report.before.growth(report.after):
            report.ledger.report(problem)


def _reload(campaign: Campaign, report: Report, server: LocalServer, ended: Event) -> None:
    draw = random.Random(f"{campaign.seed} reload")
    while not ended.wait(draw.uniform(0.1, 2.0)):
        model = draw.choice(_MODELS)
        unload(server, model)
        if draw.random() < 0.6:
            wait_until(lambda m=model: model_state(server, m) == "UNAVAILABLE", "it is unloaded")
        else:
            time.sleep(draw.uniform(0.0, 0.3))
        reason = load(server, model)
        report.check(holds=reason is None, problem=f"{model} does not load: {reason}")
        report.count("reloads")


def _embed(draw: random.Random, target: Target) -> Ending:
    """Vectors, or a refusal."""
    return _or_absent(good.embed_cached(draw, target))


def _stream(draw: random.Random, target: Target) -> Ending:
    """A stream, or a refusal."""
    return _or_absent(good.stream(draw, target))


def _generate(draw: random.Random, target: Target) -> Ending:
    """A continuation, or a refusal."""
    return _or_absent(good.generate(draw, target))


def _translate(draw: random.Random, target: Target) -> Ending:
    """A translation, or a refusal."""
    return _or_absent(good.translate(draw, target))


def _or_absent(ending: Ending) -> Ending:
    if ending.code not in _ABSENT:
        return ending
    # leave the server some time for loading
    time.sleep(0.02)
    return Ending("refused", ending.model, ending.code, ending.message, ending.rows)
