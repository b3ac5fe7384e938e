"""Fixtures: small random checkpoints, random numbers, a stand-in for the server's module, no GPU."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import save_checkpoint

from .fakes.server_api import Restricted, ServerApi, read_apis

_FAKES = Path(__file__).parent / "fakes"

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Return a function that saves a checkpoint into a new folder."""

    def make(*kind: str, **settings: Any) -> Path:
        return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), *kind, **settings)

    return make


@pytest.fixture(scope="session")
def small_bert(make_checkpoint: MakeCheckpoint) -> Path:
    """Return a shared checkpoint that tests must not change."""
    return make_checkpoint()


@pytest.fixture
def folder(small_bert: Path, tmp_path: Path) -> Path:
    """Return a copy of `small_bert` that a test may change."""
    return shutil.copytree(small_bert, tmp_path / "copy")


@pytest.fixture
def server_api() -> ServerApi:
    """Return the names of the server's module that all releases in `server_api.json` have."""
    return ServerApi.common(list(read_apis().values()))


@pytest.fixture
def pb_utils(monkeypatch: pytest.MonkeyPatch, server_api: ServerApi) -> Iterator[ModuleType]:
    """Return a fresh stand-in for the server's module; importing it gives names of `server_api` only."""
    name = "triton_python_backend_utils"
    spec = importlib.util.spec_from_file_location(name, _FAKES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, Restricted(module, server_api))
    yield module
    assert module.crashes == []


@pytest.fixture
def rng() -> np.random.Generator:
    """Return random numbers that are the same in every run."""
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's GPU; `tests/kernels/triton/test_encoder.py` runs on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
