"""The command `python -m varlen_bench.simulate generate --loads 0.6,0.8 --policies reserve,optimistic`."""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from varlen.config import NO_LIMIT, EngineConfig
from varlen.errors import VarlenError
from varlen_bench import workloads
from varlen_bench.simulate.command import (
    MILLISECONDS,
    AsConfigured,
    SeedOption,
    TableOption,
    new_console,
    parse_numbers,
    table_of_loads,
    write_results,
)
from varlen_bench.simulate.costs import StepCosts
from varlen_bench.simulate.measured_steps import measure
from varlen_bench.simulate.steps import StepFigures, StepStudy
from varlen_bench.workloads import Arrival
from varlen_client.cli.progress import with_progress
from varlen_tools.model_source import SettingsOption, parse_settings

_HEADINGS = (
    "policy, step,\nlatency ms", "offer\n/s", "token\n/s", "TTFT\np50 ms", "\np99", "TPOT\np50 ms", "\np99",
    "gap\np99 ms", "mean\ns", "p99\ns", "pre-\nempt", "KV\nused", "KV\nheld", "re-\nfuse",
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
    ] = "512",
    inter_token_latency_ms: Annotated[
        str, typer.Option(help="By comma: targets of the time between tokens, as in config.pbtxt.")
    ] = "0,400",  # noqa: S107  # milliseconds
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
    max_running_sequences: AsConfigured = 64,
    kv_blocks: Annotated[int, typer.Option(min=1, help="Number of KV blocks.")] = 512,
    kv_block_tokens: AsConfigured = 16,
    ttft_ms: Annotated[
        float, typer.Option(min=0, help="Find the highest rate with this p99; 0: any.")
    ] = 0.0,
    token_ms: Annotated[
        float, typer.Option(min=0, help="The same for the time per token; 0: any.")
    ] = 0.0,
    seed: SeedOption = 0,
    table: TableOption = None,
) -> None:
    """Compare policies and step sizes of generation."""
    console = new_console()
    try:
        base = EngineConfig(
            task="generate",
            max_running_sequences=max_running_sequences,
            kv_block_tokens=kv_block_tokens,
            max_queued_requests=NO_LIMIT,
            max_queued_tokens=NO_LIMIT,
        )
        configs = _configs(base, policies, max_step_tokens, inter_token_latency_ms)
        factors = parse_numbers("loads", loads)
        step_costs = StepCosts.parse(costs)
        arrivals = _arrivals(trace, stream, count, seed)
        if model is not None:
            step_costs, error = measure(model, parse_settings(settings))
            console.print(f"measured: --costs {step_costs}, with a median error of {error:.0%}")
    except (VarlenError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    study = StepStudy(arrivals, step_costs, kv_blocks, max_tokens or None)
    one = study.full_load(max_running_sequences)
    runs = [(config, factor * one) for factor in factors for config in configs]
    results = [study.measure(*run) for run in with_progress("simulating", runs)]
    console.print(f"load 1 is {one:.2f} requests per second; {len(arrivals):,} requests per run")
    console.print(table_of_loads(_HEADINGS, results, _cells))
    write_results(table, results)
    limits = {"first token": ttft_ms, "time per token": token_ms}
    named = " and ".join(f"{name} of {ms:g} ms" for name, ms in limits.items() if ms)
    ttft, token = (ms / MILLISECONDS or math.inf for ms in limits.values())
    for config in configs if named else ():
        most = study.most_within(config, ttft=ttft, token=token, upper=2 * one)
        console.print(f"{_name(config)}: {most:.2f} requests per second with a p99 {named}")


def _configs(base: EngineConfig, policies: str, sizes: str, latencies: str) -> list[EngineConfig]:
    """Return a configuration for each policy, largest step and target of the time between tokens."""
    numbers = (
        parse_numbers("max_step_tokens", sizes),
        parse_numbers("inter_token_latency_ms", latencies),
    )
    return [
        replace(
            base,
            kv_policy=policy,  # type: ignore[arg-type]  # checked there
            max_step_tokens=int(size),
            inter_token_latency_ms=int(latency),
        )
        for policy, size, latency in product(policies.split(","), *numbers)
    ]


def _name(settings: EngineConfig | StepFigures) -> str:
    """Return what tells a configuration from the others: policy, largest step and target."""
    policy = settings.kv_policy if isinstance(settings, EngineConfig) else settings.policy
    return f"{policy}, {settings.max_step_tokens}, {settings.inter_token_latency_ms}"


def _arrivals(trace: Path | None, stream: Stream, count: int, seed: int) -> list[Arrival]:
    if trace is None:
        if stream is Stream.trace:
            raise ValueError("stream is trace; it needs --trace")
        return workloads.generation_arrivals(count, seed)
    arrivals = workloads.generation_trace(trace, count, seed)
    return arrivals if stream is Stream.trace else workloads.with_poisson_times(arrivals, seed)


def _cells(result: StepFigures) -> list[str]:
    tokens = (result.token_p50, result.token_p99, result.gap_p99)
    return [
        _name(result),
        f"{result.offered:.2f}",
        f"{result.tokens:.0f}",
        *map(_milliseconds, (result.ttft_p50, result.ttft_p99, *tokens)),
        f"{result.latency_mean:.1f}",
        f"{result.latency_p99:.1f}",
        str(result.preemptions),
        f"{result.used:.0%}",
        f"{result.reserved:.0%}",
        str(result.refused),
    ]


def _milliseconds(seconds: float) -> str:
    milliseconds = MILLISECONDS * seconds
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:.0f}"


if __name__ == "__main__":
    typer.run(main)
