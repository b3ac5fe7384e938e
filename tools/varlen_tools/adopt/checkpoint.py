"""Finds the Hugging Face checkpoint that a model of a repository was made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from varlen_tools.adopt.wish import AdoptError
from varlen_tools.model_source import read_model_config

# Folders between a model and its checkpoint. A limit, since links may lead in circles.
_DEPTH = 3


def find_checkpoint(repository: Path, model: str) -> Path:
    """Return the folder of a checkpoint, in the model's own folder or in another model's.

    Raises:
        AdoptError: there is none, or more than one.
    """
    others = [
        entry
        for entry in sorted(repository.iterdir())
        if entry.is_dir() and entry.name != model and not is_varlen(entry)
    ]
    for folders in ([repository / model], others):
        by_place: dict[Path, Path] = {}
        for path in (path for folder in folders for path in _checkpoints(folder, _DEPTH)):
            by_place.setdefault(path.resolve(), path)
        found = list(by_place.values())
        if len(found) == 1:
            return found[0]
        if found:
            shown = ", ".join(str(each.relative_to(repository)) for each in found)
            raise AdoptError(f"{repository} has several checkpoints: {shown}; choose: --checkpoint")
    raise AdoptError(
        f"{repository} has no checkpoint with config.json and safetensors, which the weights come from; name the one"
        " that the model was made of, a folder or a hub name: --checkpoint"
    )


def is_varlen(model: Path) -> bool:
    """Return whether a model is of varlen, such as one of an earlier call."""
    has_config = (model / "config.pbtxt").is_file()
    return has_config and read_model_config(model).backend == "varlen"


def _checkpoints(folder: Path, depth: int) -> Iterator[Path]:
    """Yield checkpoints in a folder, but not their modules."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        yield folder
    elif depth and folder.is_dir():
        for entry in sorted(folder.iterdir()):
            yield from _checkpoints(entry, depth - 1)
