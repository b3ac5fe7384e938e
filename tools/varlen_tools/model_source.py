"""The model of a command: a checkpoint folder, or a model of a repository."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from varlen.config import EngineConfig
from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import read_text
from varlen.models.checkpoint.folder_forms import check_is_transformer, has_checkpoint
from varlen.models.checkpoint_folder import Checkpoint

_CONFIG = "config.pbtxt"

SourceArgument: TypeAlias = Annotated[
    Path,
    typer.Argument(help="Model of a model repository, with its settings, or a checkpoint folder."),
]
SettingsOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", help="Engine parameter, key=value. May be repeated.")
]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The name of a model, its checkpoint folder, and its settings."""

    name: str
    checkpoint: Path
    config: EngineConfig

    def open_checkpoint(self) -> Checkpoint:
        """Return the checkpoint, once its files are checked.

        Raises:
            CheckpointError: it is incomplete or of a kind that is not served.
        """
        return Checkpoint.open(self.checkpoint, **self.config.of_checkpoint)


def find_source(folder: Path, settings: Mapping[str, str]) -> ModelSource:
    """Return the model of a folder.

    Args:
        folder: a checkpoint, or a model of a model repository: config.pbtxt and numbered versions.
        settings: engine parameters that replace the configured ones.

    Raises:
        CheckpointError: the folder is neither.
        ConfigError: a setting is unknown or not allowed.
    """
    resolved = folder.resolve()
    if (folder / _CONFIG).is_file():
        config = EngineConfig.from_parameters({**_parameters(folder), **settings})
        return ModelSource(resolved.name, _latest_version(folder), config)
    if not has_checkpoint(folder):
        check_is_transformer(folder)
        raise CheckpointError(f"{folder} has neither {_CONFIG} nor config.json")
    # a checkpoint in a repository is a numbered version
    name = resolved.parent.name if resolved.name.isdecimal() else resolved.name
    return ModelSource(name, folder, EngineConfig.from_parameters(settings))


def read_model_config(folder: Path) -> model_config_pb2.ModelConfig:
    """Return the config.pbtxt of a model of a model repository.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / _CONFIG
    try:
        # it may be a link to anywhere: its owner runs the server
        real = path.resolve()
        text = read_text(real.parent, real.name)
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except (OSError, RuntimeError, ValueError, text_format.ParseError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _parameters(folder: Path) -> dict[str, str]:
    config = read_model_config(folder)
    return {key: value.string_value for key, value in config.parameters.items()}


def _latest_version(folder: Path) -> Path:
    versions = [entry for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir()]
    if not versions:
        raise CheckpointError(f"{folder} has no version: a folder whose name is a number")
    return max(versions, key=lambda entry: int(entry.name))


def parse_settings(pairs: Iterable[str] | None, **named: str | None) -> dict[str, str]:
    """Return the engine parameters of `--set`, and those that options of their own have set."""
    settings = {name: value for name, value in named.items() if value}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f'"{pair}"; allowed: key=value', param_hint="--set")
        if key in settings:
            message = f"{key} is {settings[key]} already; set it once"
            raise typer.BadParameter(message, param_hint="--set")
        settings[key] = value
    return settings
