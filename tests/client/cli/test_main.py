"""The program: its list of commands, their imports, and unknown names."""

import re
import runpy
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from varlen_client.cli import main as cli

from .conftest import run

NAMES = [name for names in cli.PANELS.values() for name in names]


@pytest.fixture
def without_the_backend(monkeypatch):
    """Only the distribution varlen-client is installed."""
    monkeypatch.setattr(cli, "entry_points", lambda group: [])


def test_help_lists_all_commands_in_four_groups_and_serve_first(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    listed = run("--help").stdout

    titles = re.findall("^╭─ (\\w+) ─", listed, re.MULTILINE)
    assert titles == ["Options", "Serve", "Prepare", "Ask", "Operate"]
    lines = re.findall("^│ ([a-z-]+)  +(.*?) +│$", listed, re.MULTILINE)
    # a line for each
    assert lines[2:] == [each for names in cli.PANELS.values() for each in names.items()]
    assert lines[2][0] == "serve"


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_command_begins_with_its_sentence_of_the_list(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    [summary] = (names[name] for names in cli.PANELS.values() if name in names)

    result = run(name, "-h")

    assert result.exit_code == 0
    assert summary.endswith(".")
    assert summary in " ".join(result.stdout.split())


def test_help_imports_no_command_and_no_torch():
    code = (
        "import sys; from varlen_client.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'numba', 'fastapi', 'uvicorn', 'starlette', 'varlen', 'varlen_tools',"
        " 'varlen_client.cli.rows') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True
    )

    assert "quantize" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", ["fetch", "clean_shared_memory", "profile_costs"])
def test_the_modules_are_aliases_of_commands(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--help"])
    # runpy warns of a module that is imported already
    for name in (f"varlen_tools.{module}", f"varlen_tools.{module}.__main__"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(f"varlen_tools.{module}", run_name="__main__", alter_sys=True)

    assert f"Usage: python -m varlen_tools.{module} " in capsys.readouterr().out


@pytest.mark.parametrize(
    "word, meant",
    [
        ("embeding", "embed"),
        ("Serve", "serve"),
        ("serve_http", "serve-http"),
        ("profile_costs", "costs"),
        ("pull", "fetch"),
        ("download", "fetch"),
        ("downlaod", "fetch"),
        ("run", "serve"),
        ("start", "serve"),
        ("ls", "list"),
        ("remove", "rm"),
        ("chat", "generate"),
        ("stop", "drain"),
    ],
)
def test_another_name_of_a_command_is_an_error_that_says_the_right_one(word, meant, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    result = run(word, "a", "--option")

    assert result.exit_code == 2
    assert f"No such command '{word}'. Did you mean '{meant}'?" in result.stderr


def test_a_name_like_no_other_is_an_error(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    result = run("xyzzy")

    assert result.exit_code == 2
    assert "No such command 'xyzzy'. `varlen --help` lists all." in result.stderr


def test_no_word_of_others_is_a_command_of_ours():
    assert cli._MEANT.keys().isdisjoint(NAMES)
    assert set(cli._MEANT.values()) <= set(NAMES)


@pytest.mark.parametrize(
    "word, message",
    [
        (
            "serve",
            "The package varlen has 'serve', and is not installed here: pip install 'varlen[serve]'",
        ),
        ("fetch", "The package varlen has 'fetch', and is not installed here: pip install varlen"),
        (
            "pull",
            "No such command 'pull'. Did you mean 'fetch'? The package varlen has 'fetch', and is not",
        ),
        ("embeding", "No such command 'embeding'. Did you mean 'embed'?"),
    ],
)
def test_a_command_of_a_package_that_is_not_installed_names_the_package(
    without_the_backend, word, message, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")

    result = run(word)

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", "").split())


def test_help_without_the_backend_lists_what_is_there_and_names_the_rest(without_the_backend):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["--help"])

    assert "│ embed " in result.stdout
    assert "│ fetch " not in result.stdout
    assert "pip install varlen adds serve, install-backend, fetch, list, rm" in result.stdout


def test_a_command_that_cannot_be_imported_says_why_and_leaves_the_others_alone(monkeypatch):
    broken = EntryPoint("zap", "no_such_module:zap", "varlen.commands")
    monkeypatch.setattr(cli, "entry_points", lambda group: [broken])

    listed, called = run("--help"), run("zap")

    assert "│ zap " in listed.stdout
    assert "│ embed " in listed.stdout
    assert called.exit_code == 2
    assert called.stderr.startswith("error: zap cannot be imported: No module named")
    assert len(called.stderr.splitlines()) == 1


def test_a_command_of_others_needs_no_docstring(monkeypatch):
    def zap(count: int = 1) -> None:
        print(f"zapped {count}")

    monkeypatch.setattr(EntryPoint, "load", lambda self: zap)
    other = EntryPoint("zap", "others:zap", "varlen.commands")
    monkeypatch.setattr(cli, "entry_points", lambda group: [other])

    assert run("zap", "--count", "2").stdout == "zapped 2\n"
