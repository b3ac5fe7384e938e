"""The fixture that runs commands against the fake server."""

import pytest
from typer.testing import CliRunner

from varlen_client.cli import main as cli


def run(*arguments):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def varlen(server, monkeypatch):
    """Return a function that runs the command against the fake server."""
    monkeypatch.setenv("VARLEN_URL", server.url)
    monkeypatch.delenv("VARLEN_MODEL", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return run
