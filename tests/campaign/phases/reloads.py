"""Models that are unloaded and loaded under load: accepted requests are answered."""

import random
import time
from functools import partial
from threading import Event

from tests.server.serving import load, model_state, unload, wait_until
from varlen_client import ModelNotFound, ModelUnloaded, ServerUnavailable
from varlen_tools.local_server import LocalServer

from ..attacks import good
from ..beside import beside
from ..drive import ALL_RIGHT, SOME_RIGHT, Bounds, Share, send_all
from ..endings import Ending
from ..models import CACHED, DECODER, TRANSLATOR
from ..phase import Campaign, attacked_server
from ..report import Report
from ..state import settled
from ..target import Target

_MODELS = (CACHED, DECODER, TRANSLATOR)
# Errors of varlen's client when a model is not there.
_ABSENT = tuple(each.__name__ for each in (ModelNotFound, ModelUnloaded, ServerUnavailable))


def reloads(campaign: Campaign, report: Report, seconds: float) -> None:
    """Unload and load models at random, some before they have ended, while requests come."""
    with attacked_server(campaign, report, _MODELS) as target:
        mix = tuple(
            Share(weight, attack, SOME_RIGHT)
            for weight, attack in (
                (3, _embed_or_absent),
                (2, _stream_or_absent),
                (1, _generate_or_absent),
                (1, _translate_or_absent),
            )
        )
        name = f"{campaign.seed} reloads"
        send_all(target, mix, Bounds(0.1 * seconds, 50), report.ledger, name=f"{name} warm-up")
        report.before = settled(target.mark)
        bounds = Bounds(0.9 * seconds, campaign.requests)
        reload = partial(_reload, campaign, report, target.server)
        with beside("the thread that reloads", reload, report.ledger):
            send_all(target, mix, bounds, report.ledger, name=name, threads=6)
        report.check(holds=report.notes.get("reloads", 0) > 0, problem="no model was reloaded")
        for model in _MODELS:
            reason = load(target.server, model)
            report.check(holds=reason is None, problem=f"{model} does not load: {reason}")
        good_mix = tuple(
            Share(1, attack, ALL_RIGHT)
            for attack in (good.embed_cached, good.generate, good.translate)
        )
        bounds = Bounds(60.0, 40)
        send_all(target, good_mix, bounds, report.ledger, name=f"{name} after", threads=4)
        report.ledger.check_least({share.kind: share.least for share in (*mix, *good_mix)})
        report.after = settled(target.mark, report.before)
        for problem in report.before.growth(report.after):
            report.ledger.report(problem)


def _reload(campaign: Campaign, report: Report, server: LocalServer, is_over: Event) -> None:
    """Reload models until the requests are over, one at least."""
    draw = random.Random(f"{campaign.seed} reload")
    was_over = False
    while not was_over:
        was_over = is_over.wait(draw.uniform(0.1, 2.0))
        model = draw.choice(_MODELS)
        unload(server, model)
        if draw.random() < 0.6:
            wait_until(partial(_is_unloaded, server, model), "it is unloaded")
        else:
            time.sleep(draw.uniform(0.0, 0.3))
        reason = load(server, model)
        report.check(holds=reason is None, problem=f"{model} does not load: {reason}")
        report.count("reloads")


def _is_unloaded(server: LocalServer, model: str) -> bool:
    return model_state(server, model) == "UNAVAILABLE"


def _embed_or_absent(draw: random.Random, target: Target) -> Ending:
    """Vectors, or a refusal."""
    return _or_absent(good.embed_cached(draw, target))


def _stream_or_absent(draw: random.Random, target: Target) -> Ending:
    """A stream, or a refusal."""
    return _or_absent(good.stream(draw, target))


def _generate_or_absent(draw: random.Random, target: Target) -> Ending:
    """A continuation, or a refusal."""
    return _or_absent(good.generate(draw, target))


def _translate_or_absent(draw: random.Random, target: Target) -> Ending:
    """A translation, or a refusal."""
    return _or_absent(good.translate(draw, target))


def _or_absent(ending: Ending) -> Ending:
    if ending.code not in _ABSENT:
        return ending
    # leave the server some time for loading
    time.sleep(0.02)
    return Ending("refused", ending.model, ending.code, ending.message, ending.rows)
