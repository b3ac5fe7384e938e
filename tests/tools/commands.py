"""Commands of varlen_tools, run in this process on a wide terminal."""

import typer
from click.testing import Result
from typer.testing import CliRunner

from varlen_client.cli.main import app as varlen

_RUNNER = CliRunner(env={"COLUMNS": "300"})


def run_varlen(*words) -> Result:
    """Return the result of the program; lines are not folded."""
    return run_app(varlen, *words)


def run_app(app, *words) -> Result:
    """Return the result of a command line, as `python -m` of its package runs it."""
    return _RUNNER.invoke(app, [str(word) for word in words])


def run_module(main, *words) -> Result:
    """Return the result of a module's `main`, as `python -m` runs it."""
    single = typer.Typer(add_completion=False)
    single.command()(main)
    return run_app(single, *words)
