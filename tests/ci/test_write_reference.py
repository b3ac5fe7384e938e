"""The pages of settings, metrics, commands and requests say what the code says."""

import json
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from tests.ci.scripts import PROJECT, load_script
from varlen.config import SETTINGS
from varlen.telemetry.metrics import METRICS
from varlen_client.cli.main import app

write_reference = load_script("write_reference")


@pytest.fixture(scope="module")
def written():
    """Return the pages that a fresh process writes.

    Python keeps one of two equal Literals, so the order of their words depends on what was imported before.
    """
    code = "import json, write_reference; print(json.dumps(write_reference.pages()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=PROJECT / ".ci",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(write_reference.pages()))
def test_the_committed_page_is_the_one_that_is_written(written, name):
    committed = (PROJECT / "docs/reference" / name).read_text()

    expected = written[name]
    assert committed == expected, (
        f"docs/reference/{name} is out of date: run `{write_reference.COMMAND}`"
    )


def test_every_setting_has_one_heading_and_every_metric_one_row():
    pages = write_reference.pages().values()
    lines = [line for text in pages for line in text.splitlines()]

    for name in SETTINGS:
        assert lines.count(f"### `{name}`") == 1
    for metric in METRICS:
        assert sum(line.startswith(f"| `{metric.value}` |") for line in lines) == 1


def test_every_command_has_a_part_with_its_options():
    parts = re.split(r"^##+ ", write_reference.pages()["commands.md"], flags=re.MULTILINE)
    parts_by_name = {text.partition("\n")[0]: text for text in parts}

    for name in get_command(app).commands:
        assert f"varlen {name}" in parts_by_name
    rerank = parts_by_name["varlen rerank"]
    assert "| `QUERY` | required | What the documents are compared with. |" in rerank
    assert "| `--activation WORD` | `auto` |" in rerank
    assert "`--url" not in rerank
    assert "| `--url TEXT` | `grpc://127.0.0.1:8001` |" in parts_by_name["Options of requests"]
    assert "`--truncation-side WORD`" in parts_by_name["Options of requests"]
