"""Requests that ask for much work, beside small ones that must not wait for it."""

import time

from tests.server.serving import metrics
from varlen.config import EngineConfig

from ..attacks import costly, good
from ..attacks.constrained import FuzzedConstraints
from ..drive import ALL_REFUSED, ALL_RIGHT, Bounds, Share, send_all
from ..models import CHAT, DECODER
from ..phase import Campaign, attacked_server, send_mix
from ..report import Report
from ..small_requests import small_requests
from ..target import Target

_FUZZED = FuzzedConstraints()
_COSTLY: tuple[Share[Target], ...] = (
    Share(6, _FUZZED.constrained_regex, {"right": 0.2}),
    Share(6, _FUZZED.constrained_schema, {"right": 0.2}),
    Share(6, costly.costly_grammar, {"refused": 0.3}),
    Share(2, costly.costly_template, ALL_REFUSED),
    Share(2, costly.large_json, ALL_REFUSED),
    Share(2, costly.many_samples, ALL_RIGHT),
)
_MIX = (*_COSTLY, Share(4, good.generate, ALL_RIGHT))
# Parts of the time of the phase: small requests alone, and beside each kind of request by itself.
_ALONE, _APART = 0.05, 0.45


def costly_requests(campaign: Campaign, report: Report, seconds: float) -> None:
    """Send each kind by itself, then the mix; note how long small requests take."""
    with (
        attacked_server(campaign, report, (DECODER, CHAT)) as target,
        small_requests(target) as small,
    ):

        def apart() -> None:
            with small.sent(report, "alone"):
                time.sleep(_ALONE * seconds)
            bounds = Bounds(_APART * seconds / len(_COSTLY), campaign.requests // len(_MIX))
            for share in _COSTLY:
                with small.sent(report, f"beside {share.kind}"):
                    name = f"{campaign.seed} costly {share.kind}"
                    send_all(target, [share], bounds, report.ledger, name=name)

        # first, since only many large requests at once fill the pools of the server
        rest = (1 - _ALONE - _APART) * seconds
        mixed = small.sent(report, "beside all")
        send_mix(
            campaign, report, target, _MIX, rest, is_complete=False, before=apart, beside=mixed
        )
        held = metrics(target.server, DECODER)["varlen_grammar_bytes"]
        report.check(
            holds=held <= EngineConfig().grammar_cache_bytes,
            problem=f"grammars hold {held:,.0f} bytes",
        )
