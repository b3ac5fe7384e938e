"""The command `varlen adopt`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varlen_client.cli.options import print_message, usage_error

if TYPE_CHECKING:
    from varlen_tools.adopt.adoption import Adoption
    from varlen_tools.adopt.load import Measured


def adopt(
    repository: Annotated[
        Path, typer.Argument(help="Model repository with a model that tokenizes or takes tokens.")
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option(help="Model that clients ask; default: the only ensemble, or only model."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint that the model was made of, a folder or a hub name; default: the one in the repository."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the new model; default: the old one's and _varlen.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Output of the old model that is its answer.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Task of the new model; default: by the answers' shape.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Engine parameter of the new model, key=value. May be repeated."
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file with one text per line; default: built-in English texts."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="Requests in flight under load.")
    ] = 16,
    seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds of load on each model; 0: none.")
    ] = 9.0,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier model of the new name.")
    ] = False,
) -> None:
    """Write the varlen model of an existing model; compare answers, throughput and p99.

    The exit code is 1 when the answers differ.
    """
    try:
        # torch and the backend, which other commands do not need
        from varlen.errors import CheckpointError, ConfigError
        from varlen.execution.cpu.calibration_texts import TEXTS
        from varlen_tools.adopt.adoption import Wish, adopt_model
        from varlen_tools.adopt.errors import AdoptError
        from varlen_tools.local_server import ServerError, end_on_sigterm
        from varlen_tools.model_source import parse_settings
        from varlen_tools.quantize import read_texts
        from varlen_tools.serve.server import server_command
    except ModuleNotFoundError as error:
        usage_error(f"adopt needs {error.name}: pip install 'varlen[serve]'")
    if not repository.is_dir():
        usage_error(f"{repository} is not a folder; give a model repository")
    end_on_sigterm()
    try:
        wish = Wish(
            repository=repository,
            model=model,
            checkpoint=checkpoint,
            name=name,
            output=output,
            settings=({"task": task} if task else {}) | parse_settings(settings),
            texts=TEXTS if texts is None else read_texts(texts),
            concurrency=concurrency,
            seconds=seconds,
            force=force,
        )
        with server_command() as command:
            done = adopt_model(wish, command, report=print_message)
    except (AdoptError, CheckpointError, ConfigError, OSError) as error:
        usage_error(str(error))
    except ServerError as error:
        # with the lines of the server's log
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    print_adoption(done)
    if not done.comparison.agrees:
        raise typer.Exit(1)


def print_adoption(done: Adoption) -> None:
    """Print what was written and found to stdout."""
    from rich.console import Console

    from varlen_tools.tables import Table

    old, new, found = done.old, done.new, done.comparison
    tokens = zip(old.token_tensors.values(), new.token_tensors.values(), strict=True)
    pairs = [(old.text, new.text), *tokens]
    inputs = ", ".join(f"{a.name} -> {b.name}" for a, b in pairs if a is not None and b is not None)
    parameters = ", ".join(f"{key}: {str(value).lower()}" for key, value in new.parameters.items())
    print(f"{done.folder}: task {done.task}")
    print(f"  inputs    {inputs}")
    print(f"  output    {old.output} -> {new.output}")
    print(f"  parameters of requests  {parameters or 'none'}")
    verdict = "agree" if found.agrees else "DIFFER"
    cosine = "" if found.cosine is None else f", least cosine {found.cosine:.5f}"
    remark = f" ({found.remark})" if found.remark else ""
    print(f"answers to {found.count} texts {verdict}{cosine}{remark}")
    if done.replaced:
        print(
            f"ran in Python's onnxruntime, since this server has no ONNX backend: {', '.join(done.replaced)}"
        )
    if done.loads:
        theirs, ours = done.loads
        lines = [_line(old.name, theirs), _line(new.name, ours)]
        lines.append(
            ["ratio", f"{ours.rate / theirs.rate:.2f}"]
            + [f"{ours.percentile(share) / theirs.percentile(share):.2f}" for share in (0.5, 0.99)]
        )
        headings = ["model", "texts/s", "p50, ms", "p99, ms"]
        Console().print(Table("", headings, lines, align_right=True))


def _line(name: str, measured: Measured) -> list[str]:
    return [
        name,
        f"{measured.rate:.1f}",
        f"{measured.percentile(0.5):.0f}",
        f"{measured.percentile(0.99):.0f}",
    ]
