"""Doors of a server, of its machine and of its checkpoints: each is found shut."""

from ..doors import DOORS
from ..phase import Campaign
from ..report import Report


def doors(campaign: Campaign, report: Report, _: float) -> None:
    """Try each door once, however long it takes."""
    for name, door in DOORS.items():
        campaign.progress(f"{report.name}: {name}")
        before = report.ledger.num_problems
        try:
            door(campaign, report)
        except Exception as error:
            # the others are worth trying
            report.ledger.report(f"{name}: {error!r}")
        report.count("doors shut", int(report.ledger.num_problems == before))
    report.count("doors", len(DOORS))
