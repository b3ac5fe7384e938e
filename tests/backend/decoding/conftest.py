"""Ends the sandboxes of a module with it."""

import pytest

from tests.backend.decoding.sandboxes import close_sandboxes


@pytest.fixture(scope="module", autouse=True)
def _sandboxes_end():
    yield
    close_sandboxes()
