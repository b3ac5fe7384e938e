"""Convert pickled weights to safetensors: `varlen convert-pickle FOLDER`.

The pickles are read by torch.load(weights_only=True), which builds tensors and plain containers and calls no other
code. They stay where they are. The new files appear all together, or none does. Memory and disk are in proportion
to the size of a pickle, whatever it declares.
"""

import json
import pickle
import tempfile
import zipfile
from collections import Counter
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import has_file, locate, read_object
from varlen.models.checkpoint.vector_layers import SPARSE, VECTORS
from varlen.models.checkpoint.weights import INDEX, SINGLE, pickled_weights
from varlen_client.cli.progress import show_stage
from varlen_tools.messages import first_line

# The heads of bge-m3 beside its weights, and what is applied to what they give.
HEADS = {SPARSE: "activation.ReLU", VECTORS: "linear.Identity"}
_PICKLE_INDEX = "pytorch_model.bin.index.json"
# The first bytes of what torch.save writes today; older files are plain pickles.
_ZIP = b"PK\x03\x04"
# Largest weights of a file, relative to its size: tied tensors are stored once there, and several times here.
_TIED = 8


class PickleError(Exception):
    """The weights cannot be converted; the message says why."""


def convert(folder: Path, into: Path | None = None) -> list[Path]:
    """Write a folder's pickled weights as safetensors, and return the new files.

    The heads of bge-m3 become folders in the form of a Dense module. Where only they are pickled, only they are
    converted.

    Args:
        into: folder of the new files; None is the same.

    Raises:
        PickleError: a file holds more than tensors or is a link out of the folder, a new file exists already, or it
            is not clear which pickle has the weights.
    """
    into = into or folder
    heads = [name for name in HEADS if has_file(folder, f"{name}.pt")]
    has_weights = has_file(folder, SINGLE) or has_file(folder, INDEX)
    written = [] if heads and has_weights else _convert_weights(folder, into)
    return written + [path for name in heads for path in _convert_head(folder, into, name)]


def _convert_weights(folder: Path, into: Path) -> list[Path]:
    if has_file(folder, _PICKLE_INDEX):
        weight_map, index = _read_index(folder)
        targets = _shard_names(weight_map)
        index["weight_map"] = {name: targets[shard] for name, shard in weight_map.items()}
    else:
        targets, index = {_only_pickle(folder): SINGLE}, None
    names = [*targets.values(), *([] if index is None else [INDEX])]
    for name in names:
        if (into / name).exists() or (into / name).is_symlink():
            raise PickleError(f"{into / name} exists already; move it away first")
    try:
        # on the same disk, so that each file gets its place by a rename
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=into) as scratch:
            for source, target in targets.items():
                _convert_file(_inside(folder, source), Path(scratch, target))
            if index is not None:
                Path(scratch, INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
            return [Path(scratch, name).rename(into / name) for name in names]
    except OSError as error:
        raise PickleError(f"{into} cannot be written: {first_line(error)}") from None


def _convert_head(folder: Path, into: Path, name: str) -> list[Path]:
    source = f"{name}.pt"
    tensors = _read(_inside(folder, source))
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if len(tensors) != 2 or weight is None or bias is None or weight.ndim != 2:
        raise PickleError(
            f"{source} has {', '.join(map(repr, tensors))}; allowed: weight and bias of a linear layer"
        )
    target = into / name
    if target.exists() or target.is_symlink():
        raise PickleError(f"{target} exists already; move it away first")
    features, width = weight.shape
    layer = {
        "in_features": width,
        "out_features": features,
        "bias": True,
        "activation_function": f"torch.nn.modules.{HEADS[name]}",
    }
    try:
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=into) as scratch:
            made = Path(scratch, name)
            made.mkdir()
            (made / "config.json").write_text(json.dumps(layer, indent=1), encoding="utf-8")
            copies = {f"linear.{key}": each.contiguous().clone() for key, each in tensors.items()}
            save_file(copies, made / SINGLE, metadata={"format": "pt"})
            made.rename(target)
    except OSError as error:
        raise PickleError(f"{target} cannot be written: {first_line(error)}") from None
    return [target / "config.json", target / SINGLE]


def _only_pickle(folder: Path) -> str:
    names = [name for name in pickled_weights(folder) if name.removesuffix(".pt") not in HEADS]
    if "pytorch_model.bin" in names:
        return "pytorch_model.bin"
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise PickleError(f"{folder} has the pickles {found}; allowed: pytorch_model.bin, or one")
    return names[0]


def _read_index(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        index = read_object(folder, _PICKLE_INDEX)
        weight_map: dict[str, str] = index["weight_map"]
        outside = [shard for shard in weight_map.values() if Path(shard).name != shard]
    except CheckpointError as error:
        raise PickleError(str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PickleError(f"{_PICKLE_INDEX} is damaged: {error}") from None
    if outside:
        raise PickleError(f"{_PICKLE_INDEX} names {outside[0]}; allowed: files beside it")
    return weight_map, index


def _shard_names(weight_map: dict[str, str]) -> dict[str, str]:
    names = {
        shard: f"{Path(shard).stem.replace('pytorch_model', 'model')}.safetensors"
        for shard in sorted(set(weight_map.values()))
    }
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise PickleError(f"{_PICKLE_INDEX} names several pickles that become {twice[0]}")
    return names


def _inside(folder: Path, name: str) -> Path:
    try:
        return locate(folder, name)
    except CheckpointError as error:
        raise PickleError(str(error)) from None


def _convert_file(source: Path, target: Path) -> None:
    tensors = _read(source)
    try:
        # tied tensors share memory, which safetensors does not store
        copies = {name: each.detach().contiguous().clone() for name, each in tensors.items()}
        save_file(copies, target, metadata={"format": "pt"})
    except Exception as error:
        raise PickleError(f"{source.name} cannot be converted: {first_line(error)}") from None


def _read(path: Path) -> dict[str, Tensor]:
    try:
        is_zip = _check_archive(path)
        # storages of an archive stay in the file until they are copied
        content: Any = torch.load(str(path), map_location="cpu", weights_only=True, mmap=is_zip)
    except PickleError:
        raise
    except pickle.UnpicklingError:
        raise PickleError(f"{path.name} holds more than tensors; it is not converted") from None
    # a damaged pickle raises whatever its instructions lead to
    except Exception as error:
        raise PickleError(f"{path.name} cannot be read: {first_line(error)}") from None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not content:
        raise PickleError(f"{path.name} holds a {type(content).__name__}, not tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise PickleError(f"{path.name} has {name!r}, which is no tensor")
        _check_tensor(path.name, name, value)
    total, size = sum(map(_bytes, content.values())), path.stat().st_size
    if total > _TIED * size:
        raise PickleError(
            f"{path.name} has tensors of {total} bytes in {size}; allowed: {_TIED} times as many"
        )
    return content


def _check_archive(path: Path) -> bool:
    """Return whether a file is a zip archive; raise PickleError if an entry is compressed."""
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return False
    with zipfile.ZipFile(path) as archive:
        packed = [each.filename for each in archive.infolist() if each.compress_type]
    if packed:
        raise PickleError(
            f"{path.name} is compressed ({packed[0]!r}); allowed: archives as torch.save writes them"
        )
    return True


def _check_tensor(file: str, name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device.type}"
        raise PickleError(f"{file} has the tensor {name!r}, which is {kind}; allowed: plain ones")
    stored = tensor.untyped_storage().nbytes()
    if _bytes(tensor) > stored:
        raise PickleError(
            f"{file} has the tensor {name!r} of {_bytes(tensor)} bytes and stores {stored} of them;"
            " allowed: tensors without repeated values"
        )


def _bytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * tensor.element_size()


def main(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder with pickled weights.")
    ],
) -> None:
    """Convert pickled weights to safetensors; run none of them.

    No code that a pickle may hold runs.
    """
    try:
        with show_stage(f"converting the weights of {folder}"):
            written = convert(folder)
        for path in written:
            typer.echo(f"{path} is written")
    except PickleError as error:
        typer.secho(f"convert-pickle: {error}", err=True, fg="red")
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
