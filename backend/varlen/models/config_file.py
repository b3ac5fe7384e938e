"""JSON files of a checkpoint folder, and the checks that all of them share."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

from varlen.errors import CheckpointError

Json: TypeAlias = dict[str, Any]

# A field's value is shown in a message up to this many characters.
_MAX_SHOWN = 80


def read_object(folder: Path, name: str) -> Json:
    """Return the object in a JSON file, or raise CheckpointError that names the file."""
    content = read_json(folder, name)
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} holds a {type(content).__name__}, not an object")
    return cast(Json, content)


def read_optional_object(folder: Path, name: str) -> Json:
    """Return the object in a JSON file, empty if there is no such file."""
    return read_object(folder, name) if (folder / name).is_file() else {}


def read_json(folder: Path, name: str) -> Any:
    """Return the content of a JSON file, or raise CheckpointError that names the file."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) and not (folder / name).is_symlink():
        raise CheckpointError(f"{name} is outside the checkpoint folder")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {name}") from None
    except ValueError as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from None


def read_int(config: Json, key: str, *, lowest: int = 1, name: str = "config.json") -> int:
    """Return an integer of a configuration file, or raise CheckpointError that names it."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise CheckpointError(f"{name} has {key} {value!r}; allowed: whole numbers from {lowest}")
    return value


def check_fields(
    config: Json, name: str, *, known: Collection[str], fixed: Mapping[str, object]
) -> None:
    """Raise CheckpointError for a field that would change results and is not served.

    Args:
        config: content of the file.
        name: of the file.
        known: fields that are read elsewhere, or change no result.
        fixed: fields that are served with one value; null means that value too.
    """
    for key, value in config.items():
        if key in fixed:
            if value is not None and value != fixed[key]:
                raise CheckpointError(
                    f"{name} has {key} {show(value)}; allowed: {show(fixed[key])}"
                )
        elif key not in known and not _is_off(value):
            raise CheckpointError(
                f'{name} has the field "{key}" ({show(value)}), which this version does not know'
            )


def show(value: object) -> str:
    """Return a value as JSON, shortened for a message."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _is_off(value: object) -> bool:
    # an unknown feature that is switched off, or has no settings
    return value is None or value is False or value in ([], {})
