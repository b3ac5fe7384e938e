"""The commands `varlen list` and `varlen rm`, for models in the user's cache folder.

`varlen serve` fetches them there: a folder for each source, with the model and a file of its own beside config.pbtxt.
Whatever lacks that file is neither listed nor removed.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from varlen.errors import CheckpointError
from varlen_client.cli.options import fail, print_message, usage_error
from varlen_kernels.cache_files import CacheError, CacheFolder, LockedError
from varlen_tools.fetch import STAGING_PREFIX, staging_parent
from varlen_tools.model_source import read_model_config
from varlen_tools.scratch import scratch_folder
from varlen_tools.serve.models import LOCK, SOURCE_FILE, models_folder, user_of

_SOURCE_FOLDER = re.compile("[0-9a-f]{12}")
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model in the cache.

    Attributes:
        task: its task; "?" if its config.pbtxt cannot be read.
        used: seconds since the epoch when it was last served.
    """

    folder: Path
    source: str
    task: str
    size: int
    used: float

    @property
    def name(self) -> str:
        return self.folder.name


def list_models(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per model.")
    ] = False,
) -> None:
    """List the models that `varlen serve` has fetched.

    Each has its task, its size on disk, the time when it was last served, and its source. Models of a model repository
    are not among them.
    """
    models = _fetched_models()
    if as_json:
        for each in models:
            typer.echo(json.dumps(_fields(each), ensure_ascii=False))
        return
    if not models:
        print_message(f"{models_folder()} has no models; `varlen serve MODEL` fetches one")
        return
    for line in _columns([("name", "task", "size", "used", "source"), *map(_cells, models)]):
        typer.echo(line)
    total = decimal(sum(each.size for each in models))
    print_message(f"{_counted(models)}, {total} in {models_folder()}")


def remove_models(
    names: Annotated[
        list[str], typer.Argument(help="Names or sources of models, as `varlen list` shows them.")
    ],
) -> None:
    """Remove models that `varlen serve` has fetched.

    Says how much disk space that frees. Sources, models of a model repository and models in use stay.
    """
    models = _fetched_models()
    # all names are checked before anything is removed
    chosen = {each.folder: each for name in names for each in [_find(name, models)]}
    for each in chosen.values():
        try:
            _remove(each)
        except (CacheError, OSError) as error:
            fail(f"{each.name} is not removed: {error}")
        print_message(f"{each.name} is removed: {decimal(each.size)} freed")


def _fetched_models() -> list[FetchedModel]:
    try:
        # checks who can write to it
        names = CacheFolder(models_folder()).names()
    except CacheError as error:
        usage_error(str(error))
    folders = [models_folder() / name for name in names if _SOURCE_FOLDER.fullmatch(name)]
    found = [model for folder in folders for model in _models_in(folder)]
    return sorted(found, key=lambda each: (-each.used, each.name))


def _models_in(folder: Path) -> Iterator[FetchedModel]:
    if folder.is_symlink() or not folder.is_dir():
        return
    for model in folder.iterdir():
        stamp = model / SOURCE_FILE
        if model.name.startswith(STAGING_PREFIX) or model.is_symlink() or stamp.is_symlink():
            continue
        try:
            source = json.loads(stamp.read_bytes())["source"]
            used = stamp.stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield FetchedModel(model, str(source), _task(model), _disk_bytes(model), used)


def _task(model: Path) -> str:
    try:
        return str(read_model_config(model).parameters["task"].string_value) or "?"
    except CheckpointError:
        return "?"


def _disk_bytes(folder: Path) -> int:
    """Return the disk space that a folder frees: without files that have other links."""
    files = [Path(at, name).lstat() for at, _, names in os.walk(folder) for name in names]
    return sum(each.st_blocks * _BLOCK_BYTES for each in files if each.st_nlink == 1)


def _find(name: str, models: Sequence[FetchedModel]) -> FetchedModel:
    found = [each for each in models if name in (each.name, each.source)]
    if len(found) > 1:
        known = ", ".join(f"{each.name} of {each.source}" for each in found)
        usage_error(f"{name} is the name or source of {len(found)} models: {known}; give the other")
    if not found:
        known = ", ".join(each.name for each in models) or "none"
        usage_error(f"no fetched model has the name or source {name!r}; there are: {known}")
    return found[0]


def _remove(model: FetchedModel) -> None:
    """Remove a model, whole for everyone who looks."""
    parent = model.folder.parent
    with CacheFolder(parent).lock(LOCK, 0.0):
        if user := user_of(model.folder):
            raise LockedError(f"{user} serves it")
        # where the next fetch removes what this process leaves if it is killed
        with scratch_folder(STAGING_PREFIX, staging_parent(parent)) as scratch:
            model.folder.rename(scratch.path / model.name)
    if scratch.path.exists():
        raise OSError(f"some of its files are left in {scratch.path}")


def _cells(model: FetchedModel) -> tuple[str, ...]:
    used = datetime.fromtimestamp(model.used).astimezone().strftime("%Y-%m-%d %H:%M")
    return model.name, model.task, decimal(model.size), used, model.source


def _fields(model: FetchedModel) -> dict[str, object]:
    used = datetime.fromtimestamp(model.used).astimezone().isoformat(timespec="seconds")
    named = {"name": model.name, "task": model.task, "bytes": model.size, "used": used}
    return {**named, "source": model.source, "folder": str(model.folder)}


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _counted(models: Sequence[FetchedModel]) -> str:
    return "1 model" if len(models) == 1 else f"{len(models)} models"
