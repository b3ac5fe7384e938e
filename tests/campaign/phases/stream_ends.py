"""Streams that clients leave at the last part: the server keeps none of them.

Servers keep a gRPC stream that is cancelled between its last response and its end, and with it the model, which is
then never unloaded (decision 0074). So our client must not cancel at that moment.
"""

import random
import time
from collections.abc import Generator
from contextlib import closing
from typing import cast

from tests.server.serving import load, model_state, unload, wait_until
from varlen_client import GeneratedPart

from ..drive import ALL_RIGHT, Bounds, Share, send_all
from ..endings import TIMEOUT_SECONDS, Ending
from ..known import GREEDY
from ..models import DECODER
from ..phase import Campaign, attacked_server
from ..report import Report
from ..target import PROTOCOLS, Target

_ROUND_SECONDS = 5.0
_ROUND_STREAMS = 200
# Longest unload: the server's own pauses are a second.
_UNLOAD_SECONDS = 10.0


def stream_ends(campaign: Campaign, report: Report, seconds: float) -> None:
    """Leave many streams at their last part, then unload the model."""
    with attacked_server(campaign, report, (DECODER,)) as target:
        until, number = time.monotonic() + seconds, 0
        while not number or time.monotonic() < until:
            name = f"{campaign.seed} stream ends {number}"
            most = min(_ROUND_STREAMS, campaign.requests)
            send_all(target, _MIX, Bounds(_ROUND_SECONDS, most), report.ledger, name=name)
            began = time.monotonic()
            unload(target.server, DECODER)
            wait_until(
                lambda: model_state(target.server, DECODER) == "UNAVAILABLE",
                "the model is unloaded",
                _UNLOAD_SECONDS,
            )
            slowest = report.notes.get("milliseconds of the slowest unload", 0)
            taken = round(1000 * (time.monotonic() - began))
            report.notes["milliseconds of the slowest unload"] = max(slowest, taken)
            reason = load(target.server, DECODER)
            report.check(holds=reason is None, problem=f"{DECODER} does not load again: {reason}")
            number += 1
        send_all(target, _MIX, Bounds(_ROUND_SECONDS, most), report.ledger, name=f"{name} last")
        report.count("rounds", number)
        report.ledger.check_least({share.kind: share.least for share in _MIX})


def leave_at_the_last_part(draw: random.Random, target: Target) -> Ending:
    """A stream that is closed when its last part has come."""
    prompt, expected = draw.choice(list(target.known.continuations.items()))
    client = target.client(DECODER, draw.choice(PROTOCOLS))
    tokens: list[int] = []
    most = draw.randint(1, len(expected))
    parts = client.stream(prompt, max_tokens=most, timeout=TIMEOUT_SECONDS, **GREEDY)
    with closing(cast("Generator[GeneratedPart, None, None]", parts)):
        for part in parts:
            tokens += part.token_ids
            if part.finish_reason:
                break
    is_right = tuple(tokens) == expected[:most]
    return Ending("right" if is_right else "wrong", DECODER, message="" if is_right else "tokens")


_MIX = (Share(1, leave_at_the_last_part, ALL_RIGHT),)
