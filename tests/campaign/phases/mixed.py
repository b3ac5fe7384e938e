"""Good and bad requests, and clients that leave, to all models over both protocols: what a busy day brings."""

from ..attacks import bad, good, leaving
from ..drive import Share
from ..models import MODELS
from ..phase import Campaign, Report, attacked_server, send_mix
from ..target import Target

_MIX: tuple[Share[Target], ...] = (
    Share(20, good.embed),
    Share(12, good.embed_cached),
    Share(10, good.embed_with_little_queue),
    Share(4, good.embed_with_deadline),
    Share(6, good.hidden),
    Share(6, good.generate),
    Share(4, good.stream),
    Share(3, good.sample),
    Share(4, good.translate),
    Share(14, bad.bad_embed),
    Share(8, bad.bad_generate),
    Share(3, leaving.grpc_deadline),
    Share(2, leaving.grpc_cancel),
    Share(1, leaving.grpc_channel_close),
    Share(3, leaving.http_timeout),
    Share(4, leaving.http_disconnect),
    Share(2, leaving.stream_abandon),
    Share(2, leaving.stream_disconnect),
    Share(1, leaving.large_hidden_disconnect),
    Share(1, leaving.half_a_second_of_silence),
)


def mixed(campaign: Campaign, report: Report, seconds: float) -> None:
    """Send the mix; every counter must agree."""
    with attacked_server(campaign, report, MODELS) as target:
        send_mix(campaign, report, target, _MIX, seconds)
