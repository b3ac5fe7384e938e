"""How a kernel is launched: tile sizes, warps and stages, from a table measured on this GPU or by rule.

Each op lists its candidate launches for a key (its widths and dtype, never a size that varies from batch to batch),
the first being what is right without a measurement. `tuning.json` holds what `make tune-kernels` found fastest,
by GPU and by version of Triton, since a launch that is best under one compiler may spill under the next.
Nothing is tuned in a running server.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import TypeAlias

import torch
import triton

# Tile sizes by their names in the kernel, and num_warps, num_stages.
Launch: TypeAlias = Mapping[str, int]
Key: TypeAlias = tuple[int | str | bool | torch.dtype, ...]
Candidates: TypeAlias = Callable[..., Sequence[Launch]]
# The launches of one GPU under one version of Triton, by op and by key as `spell` has it.
Table: TypeAlias = Mapping[str, Mapping[str, Launch]]

# One compiled form for all versions: 3.10 changes the default.
_COMPILER_OPTIONS = {"enable_fp_fusion": True}

_chosen: dict[tuple[str, Key], Launch] = {}
# Who wants to know what is asked for.
_watchers: list[list[tuple[str, Key, Candidates]]] = []


def pick(op: str, key: Key, candidates: Candidates) -> Launch:
    """Return the launch for (op, key): the tuned one, or else the first of `candidates(*key)`.

    A tuned launch that is no candidate any more was measured on an older kernel, and is passed over.

    Args:
        op: the launcher's name.
        key: what the launch may depend on.
        candidates: launches that are correct for the key, the first the one to use unmeasured.
    """
    for watcher in _watchers:
        watcher.append((op, key, candidates))
    launch = _chosen.get((op, key))
    if launch is None:
        allowed = candidates(*key)
        tuned = _table().get(op, {}).get(spell(key))
        if tuned is None or tuned not in allowed:
            tuned = allowed[0]
        launch = {**tuned, **_COMPILER_OPTIONS}
        _chosen[op, key] = launch
    return launch


@contextmanager
def forced(op: str, key: Key, launch: Launch) -> Iterator[None]:
    """Make `pick` return this launch for (op, key), for as long as the context lasts."""
    before = _chosen.get((op, key))
    _chosen[op, key] = {**launch, **_COMPILER_OPTIONS}
    try:
        yield
    finally:
        del _chosen[op, key]
        if before is not None:
            _chosen[op, key] = before


@contextmanager
def watch() -> Iterator[list[tuple[str, Key, Candidates]]]:
    """Collect what `pick` is asked for inside the context, as (op, key, candidates)."""
    asked: list[tuple[str, Key, Candidates]] = []
    _watchers.append(asked)
    try:
        yield asked
    finally:
        # by identity: another watcher may have collected the same
        _watchers[:] = [watcher for watcher in _watchers if watcher is not asked]


def forget() -> None:
    """Forget what was chosen, so that the table is read again."""
    _chosen.clear()
    _table.cache_clear()


def spell(key: Key) -> str:
    """Return a key as the table spells it, such as "768/bfloat16"."""
    return "/".join(str(part).removeprefix("torch.") for part in key)


def minor_version() -> str:
    """Return the version of Triton as the table spells it, such as "3.6"."""
    return ".".join(triton.__version__.split(".")[:2])


@cache
def _table() -> Table:
    """Return the tuned launches of this machine's GPU and version of Triton; none without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return parse_tables(_text()).get(torch.cuda.get_device_name(), {}).get(minor_version(), {})


def _text() -> str:
    return files("varlen_kernels").joinpath("tuning.json").read_text()


def parse_tables(text: str) -> dict[str, dict[str, Table]]:
    """Return the tables of `tuning.json`, by GPU name and by version of Triton.

    Raises:
        ValueError: the text is not JSON, or a launch is not a mapping of names to integers; the
            message says where.
    """
    tables: dict[str, dict[str, Table]] = json.loads(text)
    for gpu, of_gpu in _entries("tuning.json", tables):
        for version, of_version in _entries(gpu, of_gpu):
            for op, of_op in _entries(version, of_version):
                for key, launch in _entries(op, of_op):
                    for name, value in _entries(key, launch):
                        if type(value) is not int:
                            raise ValueError(
                                f"{gpu}/{version}/{op}/{key} has {name} = {value!r}; allowed: an integer"
                            )
    return tables


def _entries(name: str, found: object) -> Iterator[tuple[str, object]]:
    """Yield the entries of what must be a JSON object; `name` is what it stands under."""
    if not isinstance(found, dict):
        raise ValueError(f"{name} is {found!r} in tuning.json; allowed: an object")  # noqa: TRY004  # of the file
    yield from found.items()
