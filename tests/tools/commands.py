"""Commands of varlen_tools, run in this process on a wide terminal."""

import typer
from click.testing import Result
from typer.testing import CliRunner


def run_command(main, *words) -> Result:
    """Return the result of a module's `main`, as `python -m` runs it; lines are not folded."""
    app = typer.Typer(add_completion=False)
    app.command()(main)
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(word) for word in words])
