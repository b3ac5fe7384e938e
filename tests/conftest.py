"""Setup of all tests: MiniLM folder, GPU skips, cost cache, one core per worker."""

import gc
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# no test may depend on how fast the machine is
settings.register_profile("varlen", deadline=None)
settings.load_profile("varlen")

_KERNEL_TESTS = Path(__file__).parent / "kernels/triton"
_MINILM = Path(__file__).parents[1] / "model_repository/minilm/1"

if "PYTEST_XDIST_WORKER" in os.environ:
    # torch reads it when it is imported; the processes that tests start inherit it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# transformers starts threads for each load, which take longer than to read a small checkpoint
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

_SERVER_TESTS = "tests/server/"
# These start their own servers; the other files there share one.
_OWN_SERVERS = (
    *("test_adopt.py", "test_drain.py", "test_emulated_gpu.py", "test_ending.py"),
    *("test_generate.py", "test_gpu.py"),
    *("test_generation_workers.py", "test_int8.py", "test_killed_process.py", "test_parallel.py"),
    *("test_second_start.py", "test_serve.py", "test_translate.py"),
)
# Beginnings of the longest tests: servers, benchmarks, training, a build of the site, models on an emulated GPU.
_LONGEST = (_SERVER_TESTS, "tests/tools/", "tests/ci/", "tests/kernels/triton/test_fake_")
# Their tests share no setup, and a few files hold most of them: each test goes wherever a worker is free.
_SINGLE_TESTS = ("tests/kernels/compiled/", "tests/kernels/triton/")
# Except these, whose tests share the captured graphs of a model.
_SHARED_KERNEL_SETUP = "test_fake_steps.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the settings of pytest-asyncio where it is missing, as on a GPU machine."""
    if find_spec("pytest_asyncio") is None:
        for setting in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(setting, "ignored: pytest-asyncio is not installed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give each file to one worker, which sets its models, oracles and servers up once.

    The longest files come first, so that short ones at the end keep every worker busy. `--dist loadgroup` would keep
    tests that share a server together, but pytest-xdist 3.8 finds no groups under pytest 9.2. A machine with a GPU may
    run its tests without pytest-xdist.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.startswith(_SERVER_TESTS) and not file.endswith(_OWN_SERVERS):
                return _SERVER_TESTS
            is_single = file.startswith(_SINGLE_TESTS) and not file.endswith(_SHARED_KERNEL_SETUP)
            return nodeid if is_single else file

        def _assign_work_unit(self, node: Any) -> None:
            self.workqueue.move_to_end(min(self.workqueue, key=_place), last=False)
            super()._assign_work_unit(node)

    return ByFile(config, log) if config.getoption("dist") == "loadgroup" else None


def _place(scope: str) -> int:
    """Return how early these tests run, from 0 (tests of one place keep pytest-xdist's order)."""
    return next((n for n, folder in enumerate(_LONGEST) if scope.startswith(folder)), len(_LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while tests are collected: nearly all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep what was collected out of the garbage collections in tests: half a second each.

    pytest also adds its handlers to each logger that does not propagate, six times a test: torch has forty of them.
    """
    gc.collect()
    gc.freeze()
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch."):
            logging.getLogger(name).propagate = True


def pytest_unconfigure() -> None:
    """Let the interpreter release all at its end: libraries report what stays as leaks."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark kernel tests as GPU tests too, unless the interpreter runs them."""
    kernel_tests = [item for item in items if item.path.is_relative_to(_KERNEL_TESTS)]
    if kernel_tests and not _interpreted():
        for item in kernel_tests:
            item.add_marker("gpu")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _gpu_is_there():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and there is none"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Store measured costs in a temporary folder; servers started by tests inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Return the folder of the real MiniLM checkpoint."""
    if not (_MINILM / "model.safetensors").is_file():
        pytest.fail("model_repository/minilm/1 has no weights; run `make setup` to fetch them")
    return _MINILM


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _gpu_is_there() -> bool:
    import torch

    return torch.cuda.is_available()
