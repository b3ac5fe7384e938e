"""Mutated requests beside good ones, which must stay right."""

from ..attacks import fuzz as mutated
from ..attacks import good
from ..drive import Share
from ..models import DECODER, ENCODER, TRANSLATOR
from ..phase import Campaign, Report, attacked_server, send_mix
from ..target import Target

_MODELS = (ENCODER, DECODER, TRANSLATOR)
_MIX: tuple[Share[Target], ...] = (
    Share(25, mutated.fuzz_json),
    Share(20, mutated.fuzz_parameters),
    Share(15, mutated.fuzz_binary),
    Share(15, mutated.fuzz_grpc),
    Share(15, good.embed),
    Share(6, good.generate),
    Share(4, good.translate),
)


def fuzz(campaign: Campaign, report: Report, seconds: float) -> None:
    """Send the mix; nobody knows which of the mutated requests reached a model."""
    with attacked_server(campaign, report, _MODELS) as target:
        send_mix(campaign, report, target, _MIX, seconds, is_complete=False)
