"""The command `varlen doctor`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from varlen_client.cli.progress import show_stage

if TYPE_CHECKING:
    from varlen_tools.doctor.report import Report
    from varlen_tools.model_source import ModelSource


def doctor(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Checkpoint folder, or a model of a model repository, with its settings."
        ),
    ],
    *,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Engine parameter, key=value. May be repeated."),
    ] = None,
    speed: Annotated[bool, typer.Option(help="Measure tokens per second on this machine.")] = True,
    require: Annotated[
        bool,
        typer.Option("--require", help="Exit with 1 also if the answers could not be compared."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a checkpoint, and compare it with its own library.

    Says what the checkpoint holds and needs, and measures its speed.
    Comparing needs transformers and sentence-transformers, and peft for adapters.
    The exit code is 1 when the checkpoint is refused or its answers differ.
    """
    try:
        from varlen.errors import CheckpointError, ConfigError
        from varlen.models.checkpoint.folder_forms import check_is_folder
        from varlen_tools.doctor.report import Report
        from varlen_tools.model_source import find_source, parse_settings
    except ModuleNotFoundError as error:
        typer.echo(f"error: doctor needs {error.name}: pip install varlen", err=True)
        raise typer.Exit(2) from None
    try:
        if folder.is_file():
            check_is_folder(folder)
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a folder; `varlen fetch` downloads models of the hub"
            )
        source = find_source(folder, parse_settings(settings))
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except CheckpointError as error:
        report = Report(folder.resolve().name, refused=str(error))
    else:
        with show_stage(f"examining {source.name}"):
            report = _examine(source, has_speed=speed)
    if as_json:
        typer.echo(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        report.print(Console())
    if report.verdict in ("refused", "differs") or (require and not report.is_compared):
        raise typer.Exit(1)


def _examine(source: ModelSource, *, has_speed: bool) -> Report:
    from varlen.errors import VarlenError
    from varlen.service.service import log_notes
    from varlen_tools.doctor.examine import examine
    from varlen_tools.doctor.report import Report
    from varlen_tools.findings import TextFacts, find, read_languages
    from varlen_tools.model_config import render_config

    # what each load logs is in the report
    notes = logging.getLogger(log_notes.__module__)
    notes.disabled = True
    try:
        checkpoint = source.open_checkpoint()
        text = render_config(source.name, checkpoint, source.config)
        facts = TextFacts(read_languages(source.checkpoint / "README.md"))
        findings = find(checkpoint, source.config, facts)
        examination = examine(checkpoint, source.config, has_speed=has_speed)
    except VarlenError as error:
        return Report(source.name, refused=str(error))
    finally:
        notes.disabled = False
    return Report(source.name, None, findings, examination, text)
