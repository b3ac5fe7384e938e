"""Requests that ask for much work, beside small ones that must not wait for it."""

import random
import time
from functools import partial
from statistics import median
from threading import Event

from ..attacks import costly, good
from ..beside import beside
from ..drive import ALL_REFUSED, ALL_RIGHT, Share
from ..models import CHAT, DECODER
from ..phase import Campaign, attacked_server, send_mix
from ..report import Report
from ..target import Target

_MIX: tuple[Share[Target], ...] = (
    Share(12, costly.constrained, {"right": 0.2}),
    Share(6, costly.costly_grammar, {"refused": 0.3}),
    Share(2, costly.costly_template, ALL_REFUSED),
    Share(2, costly.large_json, ALL_REFUSED),
    Share(2, costly.many_samples, ALL_RIGHT),
    Share(4, good.generate, ALL_RIGHT),
)
_ALONE = 20


def costly_requests(campaign: Campaign, report: Report, seconds: float) -> None:
    """Send the mix, and note how long small requests wait beside it."""
    with attacked_server(campaign, report, (DECODER, CHAT)) as target:
        draw = random.Random(f"{campaign.seed} small")
        _note(report, "alone", [_seconds(draw, target, report) for _ in range(_ALONE)])
        waits: list[float] = []
        send = partial(_send_small, draw, target, report, waits)
        small = beside("the thread of small requests", send, report.ledger)
        send_mix(campaign, report, target, _MIX, seconds, is_complete=False, beside=small)
        _note(report, "beside it", waits)


def _send_small(
    draw: random.Random, target: Target, report: Report, waits: list[float], is_over: Event
) -> None:
    while not is_over.is_set():
        waits.append(_seconds(draw, target, report))


def _seconds(draw: random.Random, target: Target, report: Report) -> float:
    """Return the time of a small request."""
    began = time.monotonic()
    ending = good.generate(draw, target)
    report.check(holds=ending.end == "right", problem=f"a small request is {ending}")
    return time.monotonic() - began


def _note(report: Report, when: str, waits: list[float]) -> None:
    report.notes[f"ms of small requests {when}, median"] = round(1000 * median(waits))
    report.notes[f"ms of small requests {when}, longest"] = round(1000 * max(waits))
