"""The command `varlen`: embed, compare, generate and translate texts; a server's status.

Results go to stdout; progress, messages and errors go to stderr.
Exit codes: 0 success, 1 the server or the request failed, 2 wrong arguments or input file.
"""

from __future__ import annotations

import typer

from varlen_client.cli_embed import embed, similarity
from varlen_client.cli_generate import generate
from varlen_client.cli_status import status
from varlen_client.cli_translate import translate

app = typer.Typer(
    help="Embed, generate and translate text at a Triton Inference Server that runs the varlen backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (embed, similarity, generate, translate, status):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
