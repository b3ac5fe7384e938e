"""The command `varlen costs model_repository/minilm`.

What it measures goes into the cache that the server reads, so that a model's first start measures nothing.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from varlen.costs.store import StoredCosts
from varlen.errors import VarlenError
from varlen.execution.workers.workers import load_workers
from varlen.service.costs import measured_costs, warm_up
from varlen.telemetry.metrics import Stats
from varlen_client.cli.progress import show_stage
from varlen_tools.model_source import (
    ModelSource,
    SettingsOption,
    SourceArgument,
    find_source,
    parse_settings,
)
from varlen_tools.profile_costs.profile import Profile, tables

_DEFAULT_SECONDS = 20


def main(
    source: SourceArgument,
    settings: SettingsOption = None,
    seconds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Seconds to measure at most; default: the model's warmup_seconds."
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure again what is in the cache.")
    ] = False,
    gpu: Annotated[int, typer.Option(min=0, help="Number of the GPU, if the model uses one.")] = 0,
) -> None:
    """Measure what a model's batches cost; print it.

    Costs in the cache are not measured again.
    """
    try:
        found = find_source(source, parse_settings(settings))
        with show_stage(f"loading {found.name}") as on_stage:
            # lines of the log go above the stage
            logging.basicConfig(level=logging.INFO, format="%(message)s")
            costs = _costs(found, seconds, on_stage, gpu=gpu, again=again)
    except VarlenError as error:
        raise typer.BadParameter(str(error), param_hint="SOURCE") from None
    profile = Profile.of(found.name, costs)
    Console().print(*tables(profile), sep="\n")


def _costs(
    source: ModelSource,
    seconds: int | None,
    on_stage: Callable[[str], object],
    *,
    gpu: int,
    again: bool,
) -> StoredCosts:
    """Return the costs of batches, measured as the server measures them."""
    allowed = seconds or source.config.warmup_seconds or _DEFAULT_SECONDS
    config = replace(source.config, warmup_seconds=allowed)
    checkpoint = source.open_checkpoint()
    workers = load_workers(checkpoint, config, Stats(), gpu=gpu, isolated=True)
    executor = workers.new_executor()
    try:
        warm_up(workers.info, executor, config)
        on_stage(f"measuring batches, at most {allowed} s")
        return measured_costs(workers.info, executor, checkpoint, config, again=again)
    finally:
        if executor.close():
            workers.close()


if __name__ == "__main__":
    typer.run(main)
