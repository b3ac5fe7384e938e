"""Mutated requests beside good ones, which must stay right."""

from tests.server.serving import metrics

from ..attacks import fuzz as mutated
from ..attacks import good
from ..drive import ALL_RIGHT, Least, Share
from ..models import DECODER, ENCODER, TRANSLATOR
from ..phase import Campaign, attacked_server, send_mix
from ..report import Report
from ..target import Target

_MODELS = (ENCODER, DECODER, TRANSLATOR)
# A mutation that changes nothing that matters passes every check of the server.
_SOME_ANSWERED: Least = {"refused": 0.1, "answered": 0.0}
_MIX: tuple[Share[Target], ...] = (
    Share(25, mutated.fuzz_json, _SOME_ANSWERED),
    Share(20, mutated.fuzz_parameters, _SOME_ANSWERED),
    Share(15, mutated.fuzz_binary, {"refused": 0.1}),
    Share(15, mutated.fuzz_grpc, _SOME_ANSWERED),
    Share(15, good.embed, ALL_RIGHT),
    Share(6, good.generate, ALL_RIGHT),
    Share(4, good.translate, ALL_RIGHT),
)


def fuzz(campaign: Campaign, report: Report, seconds: float) -> None:
    """Send the mix; no client knows which mutated requests reached a model."""
    with attacked_server(campaign, report, _MODELS) as target:
        send_mix(campaign, report, target, _MIX, seconds, is_complete=False)
        for model in _MODELS:
            refused = round(metrics(target.server, model)["varlen_requests_total invalid"])
            report.count("refused by the backend", refused)
            report.check(holds=refused > 0, problem=f"no mutated request reached {model}")
