"""The pages of settings and metrics say what the code says."""

import pytest

from varlen.config import SETTINGS
from varlen.metrics import METRICS
from varlen_tools.write_reference import COMMAND, DOCS, pages


@pytest.mark.parametrize("name", ["configuration.md", "metrics.md"])
def test_the_committed_page_is_the_one_that_is_written(name: str) -> None:
    committed = (DOCS / name).read_text()

    assert committed == pages()[name], f"docs/{name} is out of date: run `{COMMAND}`"


def test_every_setting_and_every_metric_has_one_row() -> None:
    rows = [line.split(" | ")[0] for text in pages().values() for line in text.splitlines()]

    for name in [*SETTINGS, *(metric.value for metric in METRICS)]:
        assert rows.count(f"| `{name}`") == 1
