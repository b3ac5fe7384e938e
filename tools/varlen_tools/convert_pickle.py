"""Convert pickled weights to safetensors: `python -m varlen_tools.convert_pickle FOLDER`.

The pickles are read by torch.load(weights_only=True), which builds tensors and plain containers and calls no other
code. They stay where they are.
"""

import json
import pickle
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from varlen.models.weights import pickled_weights

_INDEX = "pytorch_model.bin.index.json"


class PickleError(Exception):
    """The weights cannot be converted; the message says why."""


def convert(folder: Path) -> list[Path]:
    """Write a folder's pickled weights as safetensors, and return the new files.

    Raises:
        PickleError: a file holds more than tensors, or it is not clear which one has the weights.
    """
    if (folder / _INDEX).is_file():
        return _convert_shards(folder)
    names = pickled_weights(folder)
    if "pytorch_model.bin" in names:
        names = ["pytorch_model.bin"]
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise PickleError(f"{folder} has the pickles {found}; allowed: pytorch_model.bin, or one")
    return [_convert_file(folder / names[0], folder / "model.safetensors")]


def _convert_shards(folder: Path) -> list[Path]:
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        shards = sorted(set(index["weight_map"].values()))
        names = {shard: Path(shard).stem.replace("pytorch_model", "model") for shard in shards}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PickleError(f"{_INDEX} is damaged: {error}") from None
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise PickleError(f"{_INDEX} names {outside[0]}; allowed: files beside it")
    new = {shard: f"{stem}.safetensors" for shard, stem in names.items()}
    written = [_convert_file(folder / shard, folder / new[shard]) for shard in shards]
    index["weight_map"] = {name: new[shard] for name, shard in index["weight_map"].items()}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=1), encoding="utf-8")
    return [*written, path]


def _convert_file(source: Path, target: Path) -> Path:
    if target.exists():
        raise PickleError(f"{target} exists already; move it away first")
    # tied tensors share memory, which safetensors does not store
    tensors = {name: tensor.contiguous().clone() for name, tensor in _read(source).items()}
    save_file(tensors, target, metadata={"format": "pt"})
    return target


def _read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle by name."""
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise PickleError(f"{path.name} holds more than tensors; it is not converted") from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise PickleError(f"{path.name} cannot be read: {reason}") from None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not content:
        raise PickleError(f"{path.name} holds a {type(content).__name__}, not tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise PickleError(f"{path.name} has {name!r}, which is no tensor")
    return content


def main(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder with pickled weights.")
    ],
) -> None:
    """Write pickled weights as safetensors, without running code that a pickle may hold."""
    try:
        for path in convert(folder):
            typer.echo(f"{path} is written")
    except PickleError as error:
        typer.secho(f"convert_pickle: {error}", err=True, fg="red")
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
