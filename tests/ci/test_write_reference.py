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


def test_every_setting_and_every_metric_has_one_row() -> None:
    pages = write_reference.pages().values()
    rows = [line.split(" | ")[0] for text in pages for line in text.splitlines()]

    for name in [*SETTINGS, *(metric.value for metric in METRICS)]:
        assert rows.count(f"| `{name}`") == 1
