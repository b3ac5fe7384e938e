"""Launch parameters of kernels: tile sizes, warps and stages, tuned for this GPU.

Each op lists its candidate launches for a key; the first is the default. A key holds widths and the dtype, never a
size that varies from batch to batch. `tuning.json` holds the fastest launches that `make tune-kernels` measured, by GPU
and by Triton version, because the fastest launch under one compiler may spill registers under the next. A GPU without
a table of its own uses the table of another GPU with the same compute capability. A running server tunes nothing.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch
import triton

# Tile sizes by parameter name of the kernel, and compiler options such as num_warps and num_stages.
Launch: TypeAlias = Mapping[str, int]
Key: TypeAlias = tuple[int | str | bool | torch.dtype, ...]
CandidateLaunches: TypeAlias = Callable[..., Sequence[Launch]]
Pick: TypeAlias = tuple[str, Key, CandidateLaunches]
# Tuned launches of one GPU under one Triton version, by op and by key in the form of `key_text`.
Table: TypeAlias = Mapping[str, Mapping[str, Launch]]

# Tables by compute capability, by GPU name and by Triton version.
Tables: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Table]]]

_log = logging.getLogger(__name__)

# Set explicitly, since Triton 3.10 changes the default.
_COMPILER_OPTIONS = {"enable_fp_fusion": True}

# Launches by GPU, op and key: the GPUs of one machine may differ.
_chosen: dict[tuple[int, str, Key], Launch] = {}
_tables_file = Path(__file__).with_name("tuning.json")
# One list per active `record_picks`; `pick` appends its arguments to each.
_recordings: list[list[Pick]] = []


def pick(op: str, key: Key, candidate_launches: CandidateLaunches) -> Launch:
    """Return the launch for (op, key): the tuned one, else the default.

    A tuned launch that is no longer a candidate was measured on an older kernel, so it is ignored.

    Args:
        key: the values that the launch may depend on.
        candidate_launches: returns the launches that are correct for the key; the first is the default.
    """
    for recording in _recordings:
        recording.append((op, key, candidate_launches))
    gpu = _current_gpu()
    launch = _chosen.get((gpu, op, key))
    if launch is None:
        allowed = candidate_launches(*key)
        tuned = _table(gpu).get(op, {}).get(key_text(key))
        if tuned is None or tuned not in allowed:
            tuned = allowed[0]
        launch = {**tuned, **_COMPILER_OPTIONS}
        _chosen[gpu, op, key] = launch
    return launch


@contextmanager
def forced_launch(op: str, key: Key, launch: Launch) -> Iterator[None]:
    """Make `pick` return this launch for (op, key) on the current GPU inside the context."""
    entry = (_current_gpu(), op, key)
    before = _chosen.get(entry)
    _chosen[entry] = {**launch, **_COMPILER_OPTIONS}
    try:
        yield
    finally:
        del _chosen[entry]
        if before is not None:
            _chosen[entry] = before


@contextmanager
def record_picks() -> Iterator[list[Pick]]:
    """Yield the growing list of calls of `pick` inside the context."""
    calls: list[Pick] = []
    _recordings.append(calls)
    try:
        yield calls
    finally:
        # by identity: the lists of two recordings may be equal
        _recordings[:] = [recording for recording in _recordings if recording is not calls]


def use_tables(file: Path) -> None:
    """Read launches from this file instead of the installed `tuning.json`.

    Raises:
        ValueError: see `parse_tables`.
    """
    global _tables_file  # noqa: PLW0603  # one per process, as the chosen launches
    parse_tables(file.read_text(encoding="utf-8"))
    _tables_file = file
    clear()


def clear() -> None:
    """Clear the cached launches and the cached table."""
    _chosen.clear()
    _table.cache_clear()


def key_text(key: Key) -> str:
    """Return a key in the form of `tuning.json`, such as "768/bfloat16"."""
    return "/".join(str(part).removeprefix("torch.") for part in key)


def minor_version() -> str:
    """Return the Triton version in the form of `tuning.json`, such as "3.6"."""
    return ".".join(triton.__version__.split(".")[:2])


def capability_text(capability: tuple[int, int]) -> str:
    """Return a compute capability in the form of `tuning.json`, such as "sm_90"."""
    return "sm_{}{}".format(*capability)


def _current_gpu() -> int:
    is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if is_initialized else 0


@cache
def _table(number: int) -> Table:
    """Return the tuned launches for this GPU of the machine and for the Triton version."""
    if not torch.cuda.is_available():
        return {}
    gpu, version = torch.cuda.get_device_name(number), minor_version()
    capability = capability_text(torch.cuda.get_device_capability(number))
    tables = {
        name: versions[version]
        for name, versions in parse_tables(_text()).get(capability, {}).items()
        if version in versions
    }
    if not tables:
        return {}
    name = gpu if gpu in tables else min(tables)
    if name != gpu:
        _log.info("no launches were tuned on %s; the launches of %s are used", gpu, name)
    return tables[name]


def _text() -> str:
    return _tables_file.read_text(encoding="utf-8")


def parse_tables(text: str) -> Tables:
    """Return the tables of `tuning.json`.

    Raises:
        ValueError: the text is not JSON, or a launch is not a mapping of names to integers; the
            message names the entry.
    """
    tables: Tables = json.loads(text)
    for capability, gpus in _entries("tuning.json", tables):
        for gpu, versions in _entries(capability, gpus):
            for version, ops in _entries(gpu, versions):
                for op, launches in _entries(version, ops):
                    for key, launch in _entries(op, launches):
                        for name, value in _entries(key, launch):
                            if type(value) is not int:
                                at = f"{capability}/{gpu}/{version}/{op}/{key}"
                                raise ValueError(
                                    f"{at} has {name} = {value!r}; allowed: an integer"
                                )
    return tables


def _entries(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the entries of `value`, which must be a JSON object; `name` is its key."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r} in tuning.json; allowed: an object")  # noqa: TRY004  # in a file
    yield from value.items()
