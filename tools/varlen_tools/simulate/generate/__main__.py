"""The command: `python -m varlen_tools.simulate.generate --loads 0.6,0.8 --policies reserve,optimistic`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from itertools import product, zip_longest
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from varlen.config import NO_LIMIT, EngineConfig
from varlen.errors import VarlenError
from varlen_tools import workloads
from varlen_tools.model_source import SettingsOption, parse_settings
from varlen_tools.simulate.command import (
    MILLISECONDS,
    new_console,
    parse_numbers,
    write_results,
)
from varlen_tools.simulate.generate.costs import StepCosts, measure
from varlen_tools.simulate.generate.study import Result, Setup, compare, full_load, most_within
from varlen_tools.workloads import Arrival

_HEADINGS = (
    "policy, step", "offered\n/s", "tokens\n/s", "TTFT\np50 ms", "\np99", "token\np50 ms", "\np99",
    "longest\ngap ms", "pre-\nempted", "KV\nused", "KV pro-\nmised", "refused",
)  # fmt: skip


class Stream(str, Enum):
    """How requests arrive."""

    poisson = "poisson"
    trace = "trace"


def main(
    policies: Annotated[
        str, typer.Option(help="By comma, as kv_policy in config.pbtxt.")
    ] = "reserve,optimistic",
    max_step_tokens: Annotated[
        str, typer.Option(help="By comma: largest steps, in tokens, as in config.pbtxt.")
    ] = "128,512",
    loads: Annotated[
        str, typer.Option(help="By comma; 1 keeps max_running_sequences busy.")
    ] = "0.4,0.6,0.8,1.0",
    costs: Annotated[
        str, typer.Option(help="Microseconds of a step, of a token, and of a KV token it reads.")
    ] = "20000,700,5",
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint or model whose steps are measured instead.", exists=True),
    ] = None,
    settings: SettingsOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV file of an Azure LLM trace: TIMESTAMP, ContextTokens, GeneratedTokens."
            " Default: prompts of 32 to 256 tokens, answers of 1 to 128.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    stream: Annotated[
        Stream,
        typer.Option(help="How requests arrive; a trace's own times are scaled to the load."),
    ] = Stream.poisson,
    count: Annotated[int, typer.Option(min=2, help="Requests of each run.")] = 1000,
    max_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="max_tokens of each request; 0: the length of its answer, known before."
        ),
    ] = 0,
    max_running_sequences: Annotated[int, typer.Option(min=1, help="As in config.pbtxt.")] = 64,
    kv_blocks: Annotated[int, typer.Option(min=1, help="Number of KV blocks.")] = 512,
    kv_block_tokens: Annotated[int, typer.Option(min=1, help="As in config.pbtxt.")] = 16,
    ttft_ms: Annotated[
        float, typer.Option(min=0, help="Find the highest rate with this p99; 0: any.")
    ] = 0.0,
    token_ms: Annotated[
        float, typer.Option(min=0, help="The same for the time per token; 0: any.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and lengths.")] = 0,
    table: Annotated[Path | None, typer.Option(help="CSV file of all results to write.")] = None,
) -> None:
    """Run the scheduler of generation on a virtual clock; compare policies and sizes of steps."""
    console = new_console()
    try:
        base = EngineConfig(
            task="generate",
            max_running_sequences=max_running_sequences,
            kv_block_tokens=kv_block_tokens,
            max_queued_requests=NO_LIMIT,
            max_queued_tokens=NO_LIMIT,
        )
        configs = _configs(base, policies, max_step_tokens)
        factors = parse_numbers("loads", loads)
        step_costs = StepCosts.parse(costs)
        arrivals = _arrivals(trace, stream, count, seed)
        if model is not None:
            step_costs, error = measure(model, parse_settings(settings))
            console.print(f"measured: --costs {step_costs}, with a median error of {error:.0%}")
    except (VarlenError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    setup = Setup(arrivals, step_costs, kv_blocks, max_tokens or None)
    one = full_load(setup, max_running_sequences)
    results = list(compare(setup, configs, [factor * one for factor in factors]))
    console.print(f"load 1 is {one:.2f} requests per second; {len(arrivals):,} requests per run")
    console.print(_table(results))
    if table is not None:
        write_results(table, results)
    limits = {"first token": ttft_ms, "time per token": token_ms}
    named = " and ".join(f"{name} of {ms:g} ms" for name, ms in limits.items() if ms)
    for config in configs if named else ():
        most = most_within(
            setup,
            config,
            ttft=ttft_ms / MILLISECONDS or math.inf,
            token=token_ms / MILLISECONDS or math.inf,
            upper=2 * one,
        )
        console.print(
            f"{config.kv_policy}, {config.max_step_tokens}: {most:.2f} requests per second with a p99 {named}"
        )


def _configs(base: EngineConfig, policies: str, sizes: str) -> list[EngineConfig]:
    """Return a configuration for each policy and largest step."""
    return [
        replace(base, kv_policy=policy, max_step_tokens=int(size))  # type: ignore[arg-type]  # checked there
        for policy, size in product(policies.split(","), parse_numbers("max_step_tokens", sizes))
    ]


def _arrivals(trace: Path | None, stream: Stream, count: int, seed: int) -> list[Arrival]:
    if trace is None:
        if stream is Stream.trace:
            raise ValueError("stream is trace; it needs --trace")
        return workloads.generation_arrivals(count, seed)
    arrivals = workloads.generation_trace(trace, count, seed)
    return arrivals if stream is Stream.trace else workloads.with_poisson_times(arrivals, seed)


def _table(results: Sequence[Result]) -> Table:
    table = Table()
    for heading in _HEADINGS:
        is_name = heading == _HEADINGS[0]
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for result, following in zip_longest(results, results[1:]):
        tokens = (result.token_p50, result.token_p99, result.gap)
        times = (result.ttft_p50, result.ttft_p99, *tokens)
        table.add_row(
            f"{result.policy}, {result.max_step_tokens}",
            f"{result.offered:.2f}",
            f"{result.tokens:.0f}",
            *map(_milliseconds, times),
            str(result.preemptions),
            f"{result.used:.0%}",
            f"{result.reserved:.0%}",
            str(result.refused),
            end_section=following is not None and following.offered != result.offered,
        )
    return table


def _milliseconds(seconds: float) -> str:
    milliseconds = MILLISECONDS * seconds
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:.0f}"


if __name__ == "__main__":
    typer.run(main)
