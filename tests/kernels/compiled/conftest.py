"""Setup of the compile tests, which do not run where kernels are interpreted."""

import pytest
from triton import knobs

from varlen_kernels import tuning

collect_ignore_glob = ["test_*.py"] if knobs.runtime.interpret else []


def pytest_itemcollected(item):
    item.add_marker("full")


@pytest.fixture(autouse=True)
def default_launches(monkeypatch):
    """Ignore the tuned launches of this machine's GPU."""
    monkeypatch.setattr(tuning, "_text", lambda: "{}")
    tuning.clear()
    yield
    tuning.clear()
