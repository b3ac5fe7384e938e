"""The models that `varlen serve` serves, as folders of model repositories.

A checkpoint is fetched into a repository first. A file beside its config.pbtxt says what it was made of, so that the
next start takes it as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from varlen.costs.store import cache_folder
from varlen_tools.fetch import FetchError, default_name, fetch

# Name of the file that says what a model was made of.
SOURCE_FILE = "source.json"


class ServeError(Exception):
    """The models cannot be served; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """How checkpoints become models.

    Attributes:
        repository: model repository in which they are kept.
        name: name of the model; None is made from its source.
        settings: engine parameters that differ from their defaults.
        force: whether a model is fetched again even if it is up to date.
    """

    repository: Path
    name: str | None
    settings: Mapping[str, str]
    force: bool = False


def default_repository() -> Path:
    """Return the folder in which fetched models are kept, in the user's cache folder."""
    return cache_folder("auto") / "models"


def find_models(
    sources: Sequence[str], fetching: Fetching, *, report: Callable[[str], object]
) -> list[Path]:
    """Return the folder `REPOSITORY/NAME` of each model, once checkpoints are fetched.

    Args:
        sources: checkpoint folders, hub names, packages as of `fetch`, models of a model repository, and whole model
            repositories.
        fetching: settings of checkpoints that are fetched.
        report: function that shows a line of progress.

    Raises:
        ServeError: a source is not one of these, an option does not fit, or two models have the same name.
    """
    own = {source: model_folders(Path(source).expanduser()) for source in sources}
    fetched = [source for source, folders in own.items() if not folders]
    if fetching.name is not None and (len(sources) > 1 or not fetched):
        raise ServeError("--name is for one checkpoint; fetch several one by one")
    if (fetching.settings or fetching.force) and not fetched:
        raise ServeError(
            "--task, --dtype, --set and --force are for checkpoints; models of a model repository have their settings"
            " in config.pbtxt"
        )
    folders = [
        folder
        for source in sources
        for folder in own[source] or [_fetched(source, fetching, report)]
    ]
    _check_names(folders)
    return folders


def model_folders(folder: Path) -> list[Path]:
    """Return the models of a folder; none if it is a checkpoint, or no folder.

    Args:
        folder: a model, with config.pbtxt and versions, or a repository of such models.
    """
    if not folder.is_dir() or (folder / "config.json").is_file():
        return []
    if _is_model(folder):
        return [folder.resolve()]
    return sorted(entry.resolve() for entry in folder.iterdir() if _is_model(entry))


def _is_model(folder: Path) -> bool:
    has_version = any(each.name.isdecimal() and any(each.iterdir()) for each in _folders(folder))
    return has_version and (folder / "config.pbtxt").is_file()


def _folders(folder: Path) -> Iterable[Path]:
    return (each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else ()


def _fetched(source: str, fetching: Fetching, report: Callable[[str], object]) -> Path:
    """Return the model of a checkpoint, fetched unless it is there and up to date."""
    folder = (fetching.repository / (fetching.name or default_name(source))).resolve()
    stamp = folder / SOURCE_FILE
    made_of = _made_of(source, fetching.settings)
    is_same = stamp.is_file() and stamp.read_text(encoding="utf-8") == made_of
    if is_same and not fetching.force and _is_model(folder):
        report(f"{source} is in {folder}; --force fetches it again")
        return folder
    report(f"fetching {source} into {folder}")
    # a folder that another command has made is not replaced
    is_ours = fetching.force or stamp.exists()
    try:
        fetch(
            source,
            repository=fetching.repository,
            name=folder.name,
            settings=fetching.settings,
            force=is_ours,
        )
    except FetchError as error:
        raise ServeError(str(error)) from None
    stamp.write_text(made_of, encoding="utf-8")
    return folder


def _made_of(source: str, settings: Mapping[str, str]) -> str:
    """Return source and settings of a model, and sizes and times of its files."""
    folder = Path(source).expanduser()
    files = []
    if folder.is_dir():
        source = str(folder.resolve())
        found = [*folder.glob("*"), *folder.glob("*/*")]
        facts = [(path, path.stat()) for path in sorted(found) if path.is_file()]
        files = [(str(path.relative_to(folder)), it.st_size, it.st_mtime_ns) for path, it in facts]
    made_of = {"source": source, "settings": dict(settings), "files": files}
    return json.dumps(made_of, indent=2, sort_keys=True) + "\n"


def _check_names(folders: Sequence[Path]) -> None:
    """Raise ServeError if two models have one name, which they would share on the server."""
    by_name: dict[str, Path] = {}
    for folder in folders:
        other = by_name.setdefault(folder.name, folder)
        if other != folder:
            raise ServeError(
                f"two models are named {folder.name}: {other} and {folder}; fetch one of them with --name"
            )
