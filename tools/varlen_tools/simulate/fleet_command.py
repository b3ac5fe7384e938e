"""Options and output of `varlen simulate --replicas N`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import typer

from varlen.config import EngineConfig
from varlen_client.cli.progress import with_progress
from varlen_tools.simulate.autoscaling import AutoscaleOptions
from varlen_tools.simulate.command import MILLISECONDS, new_console, table_of_loads
from varlen_tools.simulate.fleet_study import FleetFigures, FleetStudy
from varlen_tools.simulate.routing import Routing

MAX_REPLICAS = 10_000
_HEADINGS = (
    "routing, policy", "offered/s", "mean ms", "p50", "p99", "busy", "largest share", "sent again",
    "refused", "lost",
)  # fmt: skip

ReplicasOption: TypeAlias = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_REPLICAS,
        help="Replicas behind a router, which a load of 1 fills; 0: one engine without a router.",
    ),
]
RoutingOption: TypeAlias = Annotated[
    str, typer.Option(help=f"By comma: {', '.join(each.value for each in Routing)}.")
]
MetricsAgeOption: TypeAlias = Annotated[
    float,
    typer.Option(min=0, help="Greatest age of the metric that queued_tokens reads, in seconds."),
]
SlowOption: TypeAlias = Annotated[
    float,
    typer.Option(min=1, max=1000, help="Factor by which one replica is slower than the others."),
]
DeadOption: TypeAlias = Annotated[
    float,
    typer.Option(min=0, help="Seconds in which one replica is dead, from the middle of the run."),
]
GoalOption: TypeAlias = Annotated[
    float,
    typer.Option(min=0, help="Also find the fewest replicas with this p99, in seconds; 0: do not."),
]
AutoscaleOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="MIN:MAX", help="Replicas that are added and removed; --replicas run at first."
    ),
]
QueuedSecondsOption: TypeAlias = Annotated[
    float, typer.Option(min=0.001, help="Seconds of waiting work that autoscaling aims at.")
]
ScrapeOption: TypeAlias = Annotated[
    float, typer.Option(min=0.1, help="Seconds between scrapes of autoscaling.")
]
DecisionOption: TypeAlias = Annotated[
    float, typer.Option(min=0.1, help="Seconds between decisions of autoscaling.")
]
StartupOption: TypeAlias = Annotated[
    float, typer.Option(min=0, help="Seconds until a new replica takes requests.")
]
DownOption: TypeAlias = Annotated[
    float, typer.Option(min=0, help="Seconds of too many replicas until some are removed.")
]


def parse_autoscale(text: str | None, **seconds: float) -> AutoscaleOptions | None:
    """Return the options of `MIN:MAX` with these fields in seconds; None without a text.

    Raises:
        ValueError: the text has something else, or too large a number.
    """
    if text is None:
        return None
    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal() and int(most) <= MAX_REPLICAS):
        raise ValueError(f'autoscale is "{text}"; allowed: MIN:MAX, at most {MAX_REPLICAS}')
    return AutoscaleOptions(int(least), int(most), **seconds)


def parse_routings(text: str) -> list[Routing]:
    """Return the routings of an option.

    Raises:
        ValueError: there is no such routing.
    """
    names = [routing.value for routing in Routing]
    for name in text.split(","):
        if name not in names:
            raise ValueError(f'routing is "{name}"; allowed: {", ".join(names)}')
    return [Routing(name) for name in text.split(",")]


def compare_routings(
    study: FleetStudy,
    configs: Sequence[EngineConfig],
    rates: Sequence[float],
    routings: Sequence[Routing],
    *,
    goal_p99: float,
) -> list[FleetFigures]:
    """Print and return the figures of every rate, routing and policy.

    Args:
        study: the replicas.
        configs: policies.
        rates: requests per second.
        routings: ways to choose a replica.
        goal_p99: p99 whose fewest replicas are printed too, in seconds; 0: none.
    """
    runs = [(config, rate, routing) for rate in rates for routing in routings for config in configs]
    results = [study.measure(*run) for run in with_progress("simulating", runs)]
    options, console = study.options, new_console()
    console.print(f"{options.replicas:,} replicas of {options.workers} workers")
    console.print(table_of_loads(_HEADINGS, results, _cells))
    for result in results if options.autoscale is not None else ():
        console.print(
            f"{result.routing}, {result.policy}, {result.offered:.1f}/s: longest wait {result.longest_wait:.1f} s,"
            f" {result.replica_seconds:,.0f} replica-seconds, at most {result.most_replicas} replicas"
        )
    for config, rate, routing in runs if goal_p99 else ():
        fewest = study.fewest_within(config, rate, routing, p99=goal_p99)
        found = f"more than {options.replicas}" if fewest is None else str(fewest)
        console.print(
            f"{routing.value}, {config.policy}: {found} replicas serve {rate:.1f} requests per second"
            f" with a p99 of {goal_p99:g} s"
        )
    return results


def _cells(result: FleetFigures) -> list[str]:
    times = (result.mean, result.p50, result.p99)
    return [
        f"{result.routing}, {result.policy}, {result.execution}",
        f"{result.offered:.1f}",
        *(f"{MILLISECONDS * seconds:.1f}" for seconds in times),
        f"{result.utilisation:.0%}",
        f"{result.largest_share:.1%}",
        str(result.sent_again),
        str(result.refused),
        str(result.lost),
    ]
