"""The models that `varlen serve` serves, as folders whose names are the models' names.

A checkpoint is fetched into the user's cache folder first. A file beside its config.pbtxt says what it was made of, so
that the next start takes it as it is.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from varlen.costs.store import cache_folder
from varlen.errors import CheckpointError
from varlen.models.checkpoint.folder_forms import GGUF, has_checkpoint
from varlen_client.cli.progress import show_stage
from varlen_kernels.cache_files import CacheFolder, holder
from varlen_tools.fetch import (
    STAGING_PREFIX,
    FetchError,
    check_arguments,
    default_name,
    fetch,
    is_hub_name,
    staging_parent,
)
from varlen_tools.model_source import read_model_config
from varlen_tools.scratch import remove_abandoned

# Name of the file that says what a model was made of, and the version of its content and of what `fetch` copies.
SOURCE_FILE, _FORMAT = "source.json", 1
# Name of the file that a process locks while it changes the models of a source.
LOCK = "lock"
# Longest fetch of another process that is waited for.
_LOCK_SECONDS = 3600.0


class ServeError(Exception):
    """The models cannot be served; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """How checkpoints become models.

    Attributes:
        force: whether a model is fetched again even if it is up to date.
    """

    name: str | None
    settings: Mapping[str, str]
    force: bool = False
    convert_pickles: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A source of models, as it was given.

    Attributes:
        name: checkpoint folder, hub name, package as of `fetch`, model of a model repository, or a whole one.
        is_fetched: whether it is a checkpoint, whose model is made in the cache.
    """

    name: str
    models: tuple[Path, ...]
    is_fetched: bool


def find_models(
    sources: Sequence[str], fetching: Fetching, *, report: Callable[[str], object]
) -> list[Source]:
    """Return the checked sources; nothing is fetched yet.

    Args:
        report: function that shows the parts that are left out.

    Raises:
        ServeError: a source is none, an option does not fit, or two models have the same name.
        CacheError: the user has no folder for caches.
    """
    own = {source: model_folders(Path(source).expanduser(), report) for source in sources}
    fetched = [source for source, folders in own.items() if not folders]
    if fetching.name is not None and (len(own) > 1 or not fetched):
        raise ServeError("--name is for one checkpoint; others keep their names")
    if (fetching.settings or fetching.force or fetching.convert_pickles) and not fetched:
        raise ServeError(
            "--task, --dtype, --set, --force and --convert-pickle are for checkpoints; models of a model repository"
            " have their settings in config.pbtxt"
        )
    for source in fetched:
        _check(source, fetching)
    found = [
        Source(
            source,
            tuple(folders) or (_kept(source) / (fetching.name or default_name(source)),),
            is_fetched=not folders,
        )
        for source, folders in own.items()
    ]
    _check_names(found)
    return found


def fetch_models(
    sources: Sequence[Source], fetching: Fetching, *, report: Callable[[str], object]
) -> list[Path]:
    """Return the folder of each model, once checkpoints are fetched.

    Raises:
        ServeError: a checkpoint cannot be fetched.
        CacheError: the cache cannot be written, or others can write to it.
    """
    for source in sources:
        if source.is_fetched:
            _fetch(source.name, source.models[0], fetching, report)
    return [folder for source in sources for folder in source.models]


def model_folders(folder: Path, report: Callable[[str], object]) -> list[Path]:
    """Return the models of a folder; none if it is a checkpoint, or no folder.

    Args:
        folder: a model, with config.pbtxt and versions, or a repository of such models.
        report: function that shows the parts that are left out.
    """
    if not folder.is_dir() or has_checkpoint(folder):
        return []
    # links keep their names: the server compares them with config.pbtxt
    folder = folder.absolute()
    entries = [folder] if _has_config(folder) else sorted(filter(_has_config, folder.iterdir()))
    for entry in entries:
        if not _has_version(entry):
            report(f"{entry} is left out: it has no version with files")
    return [entry for entry in entries if _has_version(entry)]


def _has_config(folder: Path) -> bool:
    try:
        return (folder / "config.pbtxt").is_file()
    except PermissionError:
        # such as lost+found
        return False


def _has_version(model: Path) -> bool:
    versions = [each for each in model.iterdir() if each.name.isdecimal() and each.is_dir()]
    return any(any(each.iterdir()) for each in versions) or (bool(versions) and _is_ensemble(model))


def _is_ensemble(model: Path) -> bool:
    try:
        return bool(read_model_config(model).HasField("ensemble_scheduling"))
    except CheckpointError as error:
        raise ServeError(str(error)) from None


def _check(source: str, fetching: Fetching) -> None:
    folder = Path(source).expanduser()
    if (
        source
        and folder.is_dir()
        and not any(each.suffix in (".json", GGUF) for each in folder.glob("*"))
    ):
        raise ServeError(
            f"{source} is neither a checkpoint folder, which has config.json, nor a model or a repository of models,"
            " which have config.pbtxt and a version"
        )
    try:
        check_arguments(source, fetching.name or default_name(source), fetching.settings)
    except FetchError as error:
        raise ServeError(str(error)) from None


def _fetch(source: str, folder: Path, fetching: Fetching, report: Callable[[str], object]) -> None:
    stamp = folder / SOURCE_FILE
    made_of = _made_of(source, fetching.settings)
    cache = CacheFolder(folder.parent)
    cache.make()
    # of killed fetches, also if nothing is fetched now
    remove_abandoned(STAGING_PREFIX, staging_parent(folder.parent))
    with cache.lock(LOCK, _LOCK_SECONDS, report):
        is_same = stamp.is_file() and stamp.read_text(encoding="utf-8") == made_of
        if is_same and not fetching.force:
            report(f"{source} is in {folder}; --force fetches it again")
            _use(stamp)
            return
        report(f"fetching {source} into {folder}")
        try:
            # The hub's library shows its own progress. Only this function writes there.
            with nullcontext() if is_hub_name(source) else show_stage(f"fetching {source}"):
                fetch(
                    source,
                    repository=folder.parent,
                    name=folder.name,
                    settings=fetching.settings,
                    convert_pickles=fetching.convert_pickles,
                    force=True,
                )
        except FetchError as error:
            raise ServeError(str(error)) from None
        stamp.write_text(made_of, encoding="utf-8")
        _use(stamp)


def _use(stamp: Path) -> None:
    """Note the time of use, and keep the model from `varlen rm` until this process ends."""
    # a file system may lack times or locks
    with suppress(OSError):
        os.utime(stamp)
        # stays open
        descriptor = os.open(stamp, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def user_of(folder: Path) -> str | None:
    """Return the process that serves a fetched model, for a message; None if none does."""
    with (folder / SOURCE_FILE).open("rb") as stamp:
        try:
            fcntl.flock(stamp, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return holder(stamp.fileno())
        except OSError:
            # a file system without locks
            return None
    return None


def models_folder() -> Path:
    """Return the folder of all fetched models of this user.

    Raises:
        CacheError: the user has no folder for caches.
    """
    return cache_folder("auto") / "models"


def _kept(source: str) -> Path:
    return models_folder() / hashlib.sha256(_identity(source).encode()).hexdigest()[:12]


def _identity(source: str) -> str:
    folder = Path(source).expanduser()
    return str(folder.resolve()) if folder.exists() else source


def _made_of(source: str, settings: Mapping[str, str]) -> str:
    folder = Path(source).expanduser()
    facts = [(path, path.stat()) for path in _files(folder)]
    files = [(str(path.relative_to(folder)), it.st_size, it.st_mtime_ns) for path, it in facts]
    made_of = {
        "format": _FORMAT,
        "source": _identity(source),
        "settings": dict(settings),
        "files": files,
    }
    return json.dumps(made_of, indent=2, sort_keys=True) + "\n"


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted([folder, *folder.glob("*"), *folder.glob("*/*")]):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and path.is_file():
            yield path


def _check_names(sources: Sequence[Source]) -> None:
    by_name: dict[str, tuple[Path, str]] = {}
    for source in sources:
        for folder in source.models:
            other, theirs = by_name.setdefault(folder.name, (folder, source.name))
            if other != folder:
                raise ServeError(
                    f"{theirs} and {source.name} both have a model {folder.name}; give one of them another name:"
                    " varlen fetch SOURCE --name NAME"
                )
