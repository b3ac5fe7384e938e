"""Fixtures of the tests of execution."""

from pathlib import Path

import pytest

from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen_kernels import reference


@pytest.fixture(scope="module")
def runner(small_bert: Path) -> Runner:
    """A runner of the reference, whose answers are right; tests must not change it."""
    config = EngineConfig(device="cpu", dtype="fp32")
    return Runner(Checkpoint.open(small_bert), config, kernels=reference)
