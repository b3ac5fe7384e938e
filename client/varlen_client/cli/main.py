"""The command `varlen`: the tasks of models, a server's status, and the HTTP gateway.

An installed distribution adds commands by entry points of the group `varlen.commands`, as the backend's does.
Results go to stdout; progress, messages and errors go to stderr.
Exit codes: 0 success, 1 the server or the request failed, 2 wrong arguments or input file.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points, version
from typing import Annotated

import typer

from varlen_client.cli.embed import embed, similarity
from varlen_client.cli.generate import generate
from varlen_client.cli.options import print_message
from varlen_client.cli.rows import (
    classify,
    fill_mask,
    hidden,
    rerank,
    sparse_embed,
    token_classify,
    token_embed,
)
from varlen_client.cli.serve_http import serve_http
from varlen_client.cli.status import status
from varlen_client.cli.translate import translate

app = typer.Typer(
    help="Embed, classify, rank, generate and translate text at a Triton Inference Server with the varlen backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"varlen {version('varlen-client')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of the program itself."""


for command in (
    embed,
    sparse_embed,
    similarity,
    classify,
    rerank,
    fill_mask,
    token_embed,
    token_classify,
    hidden,
    generate,
    translate,
    status,
    serve_http,
):
    app.command()(command)


@cache
def program() -> typer.Typer:
    """Return the program with the commands of all installed distributions."""
    for entry in sorted(entry_points(group="varlen.commands"), key=lambda each: each.name):
        try:
            app.command(entry.name)(entry.load())
        except ImportError as error:
            print_message(f"warning: the command {entry.name} is left out: {error}")
    return app


def main() -> None:
    """Run the command line."""
    program()()


if __name__ == "__main__":
    main()
