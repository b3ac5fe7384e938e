"""Random regular expressions and JSON schemas, whose answers must match."""

from ..attacks.constrained import FuzzedConstraints
from ..drive import Share
from ..models import DECODER
from ..phase import Campaign, attacked_server, send_mix
from ..report import Report
from ..target import Target


def constraints(campaign: Campaign, report: Report, seconds: float) -> None:
    """Send constraints, and note how many differ and why some are refused."""
    fuzzed = FuzzedConstraints()
    mix: tuple[Share[Target], ...] = (
        Share(1, fuzzed.constrained_regex, {"right": 0.3}),
        Share(1, fuzzed.constrained_schema, {"right": 0.3}),
    )
    with attacked_server(campaign, report, (DECODER,)) as target:
        send_mix(campaign, report, target, mix, seconds)
    report.count("distinct constraints", fuzzed.num_distinct)
    for reason, number in fuzzed.refusals.items():
        report.count(f"refused: {reason}", number)
