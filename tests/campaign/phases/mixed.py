"""Good and bad requests, and clients that leave: what a busy day brings."""

from tests.server.serving import metrics

from ..attacks import bad, good, leaving
from ..drive import ALL_REFUSED, ALL_RIGHT, SOME_LEFT, Share
from ..models import CACHED, MODELS
from ..phase import Campaign, attacked_server, send_mix
from ..report import Report
from ..target import Target

_MIX: tuple[Share[Target], ...] = (
    Share(20, good.embed, ALL_RIGHT),
    Share(12, good.embed_cached, ALL_RIGHT),
    Share(10, good.embed_with_little_queue, {"right": 0.3, "refused": 0.0}),
    Share(4, good.embed_with_deadline, {"right": 0.1, "left": 0.0}),
    Share(6, good.hidden, ALL_RIGHT),
    Share(6, good.generate, ALL_RIGHT),
    Share(4, good.stream, ALL_RIGHT),
    Share(3, good.sample, ALL_RIGHT),
    Share(4, good.translate, ALL_RIGHT),
    Share(14, bad.bad_embed, ALL_REFUSED),
    Share(8, bad.bad_generate, ALL_REFUSED),
    Share(3, leaving.grpc_deadline, SOME_LEFT),
    Share(2, leaving.grpc_cancel, SOME_LEFT),
    Share(1, leaving.grpc_channel_close, SOME_LEFT),
    Share(3, leaving.http_timeout, SOME_LEFT),
    Share(4, leaving.http_disconnect),
    Share(2, leaving.stream_abandon),
    Share(2, leaving.stream_disconnect),
    Share(1, leaving.large_hidden_disconnect),
    Share(1, leaving.half_a_second_of_silence),
)


def mixed(campaign: Campaign, report: Report, seconds: float) -> None:
    """Send the mix; every counter must agree, and the response cache must have been used."""
    with attacked_server(campaign, report, MODELS) as target:
        send_mix(campaign, report, target, _MIX, seconds)
        series = metrics(target.server, CACHED)
        for event in ("hits", "misses", "evictions"):
            count = round(series[f"varlen_response_cache_{event}_total"])
            report.count(f"cache {event}", count)
            report.check(holds=count > 0, problem=f"the response cache has no {event}")
