"""Fixtures of the tests of execution."""

from pathlib import Path

import pytest

from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint


@pytest.fixture(scope="module")
def runner(small_bert: Path) -> Runner:
    """A runner on the CPU, whose answers are right; tests must not change it."""
    return Runner(Checkpoint.open(small_bert), EngineConfig(device="cpu", dtype="fp32"))
