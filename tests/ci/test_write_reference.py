"""The pages of settings and metrics say what the code says."""

import pytest

from tests.ci.scripts import PROJECT, load_script
from varlen.config import SETTINGS
from varlen.metrics import METRICS

write_reference = load_script("write_reference")


@pytest.mark.parametrize("name", ["configuration.md", "metrics.md"])
def test_the_committed_page_is_the_one_that_is_written(name: str) -> None:
    committed = (PROJECT / "docs" / name).read_text()

    expected = write_reference.pages()[name]
    assert committed == expected, f"docs/{name} is out of date: run `{write_reference.COMMAND}`"


def test_every_setting_has_one_heading_and_every_metric_one_row() -> None:
    pages = write_reference.pages().values()
    lines = [line for text in pages for line in text.splitlines()]

    for name in SETTINGS:
        assert lines.count(f"### `{name}`") == 1
    for metric in METRICS:
        assert sum(line.startswith(f"| `{metric.value}` |") for line in lines) == 1
