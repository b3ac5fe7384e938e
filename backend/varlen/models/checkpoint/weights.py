"""Tensors of a checkpoint by name, from one safetensors file or from shards.

safetensors is a header and raw bytes: nothing in it is executed. Headers are read without the
tensors and without torch. Files are memory-mapped, so a tensor is read when it is asked for.

A checkpoint may have adapters for tasks: one of them is merged when weights are read. Each weight has low-rank factors
for every task, in the parametrizations of torch. Without an adapter the model is the one that they were trained on.
Source: Hu et al. 2021, arXiv:2106.09685 (LoRA); Sturua et al. 2024, arXiv:2409.10173, and
jinaai/xlm-roberta-flash-implementation on the Hugging Face hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_fields import read_quantization
from varlen.models.checkpoint.files import (
    Json,
    check_no_pointers,
    describe_damage,
    has_file,
    locate,
    read_int,
    read_json,
    read_number,
    show,
)
from varlen.models.checkpoint.quantized_tensors import FLOATS, CodeBlocks, QuantizedTensor, join

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

# Names of the files that have the weights.
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Endings of files that may be pickles, and the beginnings of the names of those that hold no weights.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_STATE_OF_TRAINING = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
# End of the name of one of several files.
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")
_INDEX_DTYPES = ("I64", "I32")
# Size of a safetensors file's header: its bytes, and the most that it may be. A tensor takes 100 bytes.
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 32 << 20
# Beginning of the names of an encoder in a model of GLiNER, whose own layers have other names; of its encoder of
# labels; and of the encoder of GLiNER2, with a tensor that only it has.
_ENCODER_OF_GLINER = "token_rep_layer.bert_layer.model."
_ENCODER_OF_LABELS = "token_rep_layer.labels_encoder.model."
_ENCODER_OF_GLINER2, _OF_GLINER2 = "encoder.", "count_pred.0.weight"
# TensorFlow's names of the two tensors of a layer norm, which transformers renames in the same way; and torch's name of
# a weight that has adapters.
_OLD_NAMES = {
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
    ".parametrizations.weight.original": ".weight",
}
# Fields of config.json that say which adapters there are.
_NAMES = "lora_adaptations"
ADAPTER_FIELDS = frozenset({_NAMES, "lora_alpha", "lora_rank"})
NO_ADAPTER = "none"
_MARK = ".parametrizations.weight.0."


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a checkpoint.

    Attributes:
        scale: multiplies their product.
    """

    number: int
    count: int
    rank: int
    scale: float

    def shapes(self, shape: tuple[int, ...], *, of_table: bool) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the factors A and B of a weight.

        Args:
            of_table: whether it is a table of embeddings, whose factors stand in the other order.
        """
        rows, columns = shape
        if of_table:
            return (self.count, rows, self.rank), (self.count, self.rank, columns)
        return (self.count, self.rank, columns), (self.count, rows, self.rank)

    def merged(self, weight: Tensor, factors: tuple[Tensor, Tensor], *, of_table: bool) -> Tensor:
        """Return a weight plus the product of its factors, in fp32.

        Args:
            weight: `[rows, columns]`.
            factors: A and B of all adapters, see `shapes`.
        """
        a, b = (each[self.number].float() for each in factors)
        product = a @ b if of_table else b @ a
        return weight.float().add_(product, alpha=self.scale)


def factor_names(weight: str) -> tuple[str, str]:
    """Return the names of the factors A and B of a weight."""
    stem = weight.removesuffix(".weight") + _MARK
    return f"{stem}lora_A", f"{stem}lora_B"


def weight_of_factor(name: str) -> str | None:
    """Return the name of a factor's weight; None for another tensor."""
    stem, mark, _ = name.partition(_MARK)
    return f"{stem}.weight" if mark else None


def adapter_names(config: Json) -> tuple[str, ...]:
    """Return the names of the adapters in a config.json; none if it has none."""
    names = config.get(_NAMES) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json has {_NAMES} {show(names)}; allowed: a list of names")
    return tuple(names)


def read_adapter(config: Json, name: str) -> Adapter | None:
    """Return the adapter of this name; None for `NO_ADAPTER`.

    Raises:
        CheckpointError: the checkpoint has no such adapter.
    """
    names = adapter_names(config)
    if name == NO_ADAPTER:
        return None
    if name not in names:
        has = f"allowed: {', '.join((NO_ADAPTER, *names))}" if names else "this checkpoint has none"
        raise CheckpointError(f'adapter is "{name}"; {has}')
    rank = read_int(config, "lora_rank", default=4)
    scale = read_number(config, "lora_alpha", default=1.0) / rank
    return Adapter(names.index(name), len(names), rank, scale)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Entry of a tensor in a safetensors header.

    Attributes:
        dtype: dtype in safetensors' words, such as F32; of a quantized weight, int and its bits, or a float of 8 bits.
        quantized: the parts of a quantized weight; its codes have the file and the stored name.
    """

    file: str
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    quantized: QuantizedTensor | None = None


def read_headers(folder: Path, *, of_labels: bool = False) -> dict[str, TensorHeader]:
    """Return the headers of the tensors of a checkpoint folder, by transformers' names.

    The parts of a quantized weight are one tensor.

    Args:
        of_labels: whether to return the tensors of an encoder that only reads labels; else all other tensors.

    Raises:
        CheckpointError: there is no safetensors file, or one is damaged or missing, or a name occurs twice; or the
            parts of a quantized weight do not fit each other.
    """
    check_no_pointers(folder)
    headers: dict[str, TensorHeader] = {}
    for path in shards(folder):
        try:
            with safe_open(locate_weights(folder, path.name), framework="np") as file:
                stored_names = file.keys()
                prefix = _ENCODER_OF_GLINER2 if _OF_GLINER2 in stored_names else _ENCODER_OF_GLINER
                if of_labels:
                    prefix = _ENCODER_OF_LABELS
                for stored_name in stored_names:
                    if stored_name.startswith(_ENCODER_OF_LABELS) != of_labels:
                        continue
                    view = file.get_slice(stored_name)
                    header = TensorHeader(
                        path.name, stored_name, view.get_dtype(), tuple(view.get_shape())
                    )
                    name = _canonical_name(stored_name, prefix)
                    if name in headers:
                        raise CheckpointError(f'the checkpoint has two tensors "{name}"')
                    headers[name] = header
        except OSError as error:
            raise CheckpointError(
                f"{path.name} cannot be read: {error.strerror or error}"
            ) from None
        except SafetensorError as error:
            raise CheckpointError(describe_damage(path, error)) from None
    quantization = read_quantization(folder)
    if quantization is None:
        return headers

    def values(header: TensorHeader) -> np.ndarray[Any, Any]:
        with safe_open(locate_weights(folder, header.file), framework="np") as file:
            stored: np.ndarray[Any, Any] = file.get_tensor(header.stored_name)
            return stored

    return join(headers, quantization, values)


def locate_weights(folder: Path, name: str) -> Path:
    """Return the real path of a safetensors file; checks the size of its header.

    Raises:
        CheckpointError: the header is too large; see also `locate`.
        OSError: the file cannot be read.
    """
    path = locate(folder, name)
    # safetensors says of any file that it cannot open that there is none
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size > _MOST_HEADER_BYTES:
        raise CheckpointError(
            f"{name} cannot be read: its header has {size} bytes; allowed: at most {_MOST_HEADER_BYTES}"
        )
    return path


def check_tensor(
    headers: Mapping[str, TensorHeader], name: str, shape: tuple[int, ...]
) -> TensorHeader:
    """Return the header of a tensor.

    Raises:
        CheckpointError: the tensor is missing, has another shape than `shape`, or its values are no plain floats.
    """
    header = headers.get(name)
    if header is None:
        raise CheckpointError(f'the checkpoint has no tensor "{name}"')
    if header.quantized is None and header.dtype not in FLOATS:
        raise CheckpointError(
            f'the tensor "{header.stored_name}" has dtype {header.dtype}; allowed: {", ".join(FLOATS)}'
            " (quantized weights need their scales, and quantization_config in config.json)"
        )
    if header.shape != shape:
        raise CheckpointError(
            f'the tensor "{header.stored_name}" has shape {list(header.shape)}; config.json implies {list(shape)}'
        )
    return header


def is_quantized(headers: Mapping[str, TensorHeader], name: str) -> bool:
    """Return whether a tensor has parts."""
    return name in headers and headers[name].quantized is not None


def check_indices(headers: Mapping[str, TensorHeader], name: str, count: int) -> TensorHeader:
    """Return the header of a tensor of row numbers, `[count]`.

    Raises:
        CheckpointError: it is missing, has another shape, or its values are no whole numbers.
    """
    header = headers.get(name)
    if header is None or header.dtype not in _INDEX_DTYPES or header.shape != (count,):
        found = "none" if header is None else f"{header.dtype} {list(header.shape)}"
        raise CheckpointError(
            f'the tensor "{name}" is {found}; allowed: {", ".join(_INDEX_DTYPES)} {[count]}'
        )
    return header


def check_factors(headers: Mapping[str, TensorHeader], adapter: Adapter) -> None:
    """Raise CheckpointError unless the weights have factors that fit the adapter."""
    weights = dict.fromkeys(filter(None, map(weight_of_factor, headers)))
    if not weights:
        raise CheckpointError(
            "the setting adapter names an adapter of config.json, and the weights have no factors of adapters; leave"
            " adapter out, or download the weights of the original"
        )
    for name in weights:
        header = headers.get(name)
        if header is None or len(header.shape) != 2:
            raise CheckpointError(f'the checkpoint has factors of "{name}", which is no matrix')
        shapes = adapter.shapes(header.shape, of_table=_is_table(name))
        for factor, shape in zip(factor_names(name), shapes, strict=True):
            check_tensor(headers, factor, shape)


def check_shapes(
    headers: Mapping[str, TensorHeader],
    shapes: Mapping[str, tuple[int, ...]],
    is_harmless: Callable[[str], bool],
) -> None:
    """Raise CheckpointError unless the tensors have these shapes, and all others are harmless."""
    for name, shape in shapes.items():
        check_tensor(headers, name, shape)
    check_unused(headers, shapes, is_harmless)


def check_unused(
    headers: Mapping[str, TensorHeader], used: Container[str], is_harmless: Callable[[str], bool]
) -> None:
    """Raise CheckpointError for a tensor that is neither used nor harmless."""
    unused = [name for name in headers if name not in used and not is_harmless(name)]
    if unused:
        raise CheckpointError(
            f'the checkpoint has the tensor "{min(unused)}", which the model in config.json does not use'
            f" ({len(unused)} such tensors); scales of quantized weights, adapters and added layers are not served"
        )


class CheckpointWeights:
    """The tensors of one checkpoint folder; a context manager that keeps its files mapped."""

    def __init__(
        self, folder: Path, adapter: Adapter | None = None, *, of_labels: bool = False
    ) -> None:
        """Map the files.

        Args:
            adapter: the adapter that is merged into the weights that have one.
            of_labels: whose tensors these are, see `read_headers`.

        Raises:
            CheckpointError: see `read_headers`.
        """
        self._headers = read_headers(folder, of_labels=of_labels)
        self._adapter = adapter
        self._stack = ExitStack()
        self._files = {
            path.name: self._stack.enter_context(
                safe_open(locate_weights(folder, path.name), framework="pt")
            )
            for path in shards(folder)
        }

    def __enter__(self) -> CheckpointWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: object) -> bool:
        return name in self._headers

    @property
    def names(self) -> Collection[str]:
        return self._headers.keys()

    def read(self, name: str, *shape: int) -> Tensor:
        """Return a tensor as a view of its file, which stays mapped with it.

        With an adapter it is a copy; a quantized weight is widened to fp32.

        Raises:
            CheckpointError: see `check_tensor`.
        """
        tensor = self._read(name, shape)
        names = factor_names(name)
        if self._adapter is None or names[0] not in self._headers:
            return tensor
        of_table = _is_table(name)
        shapes = self._adapter.shapes(shape, of_table=of_table)
        first, second = map(self._read, names, shapes)
        return self._adapter.merged(tensor, (first, second), of_table=of_table)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        header = check_tensor(self._headers, name, shape)
        return (
            self._values(header)
            if header.quantized is None
            else header.quantized.widen(self._values)
        )

    def is_quantized(self, name: str) -> bool:
        return is_quantized(self._headers, name)

    def read_blocks(self, name: str, *shape: int) -> CodeBlocks | None:
        """Return a weight as codes; None if they cannot stay.

        Raises:
            CheckpointError: see `check_tensor`.
        """
        quantized = check_tensor(self._headers, name, shape).quantized
        is_adapted = self._adapter is not None and factor_names(name)[0] in self._headers
        if quantized is None or is_adapted or not quantized.has_blocks:
            return None
        return quantized.blocks(self._values)

    def _values(self, header: TensorHeader) -> Tensor:
        tensor: Tensor = self._files[header.file].get_tensor(header.stored_name)
        return tensor

    def read_indices(self, name: str, count: int) -> Tensor:
        """Return a tensor of row numbers, `[count]` int64.

        Raises:
            CheckpointError: see `check_indices`.
        """
        return self._values(check_indices(self._headers, name, count)).long()

    def read_parts(
        self, name: str, *shape: int, axis: int, bounds: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Return parts of a tensor, one after another; nothing else of it is read.

        Args:
            axis: the axis that is cut: 0, or 1 of two.
            bounds: first and last row of each part, or column.

        Raises:
            CheckpointError: see `check_tensor`.
        """
        import torch

        header = check_tensor(self._headers, name, shape)
        if self._adapter is not None or header.quantized is not None:
            whole = self.read(name, *shape)
            return torch.cat(
                [whole.narrow(axis, first, last - first) for first, last in bounds], axis
            )
        view = self._files[header.file].get_slice(header.stored_name)
        return torch.cat([_cut(view, axis, *each) for each in bounds], axis)


def _is_table(name: str) -> bool:
    return "embeddings." in name


def _cut(view: Any, axis: int, first: int, last: int) -> Tensor:
    part: Tensor = view[first:last] if axis == 0 else view[:, first:last]
    return part


def shards(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder.

    Raises:
        CheckpointError: there is none, or the index that names them is damaged.
    """
    if has_file(folder, SINGLE):
        return [folder / SINGLE]
    if not has_file(folder, INDEX):
        check_no_pickles(folder)
        _refuse_other_names(folder)
        raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}")
    try:
        names = set(read_json(folder, INDEX)["weight_map"].values())
        outside = any(Path(name).name != name for name in names)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{INDEX} is damaged: {error}") from None
    if outside:
        raise CheckpointError(f"{INDEX} names a file outside the checkpoint folder")
    if missing := [name for name in sorted(names) if not has_file(folder, name)]:
        raise CheckpointError(
            f"{folder} has no {missing[0]}, which {INDEX} names ({len(missing)} of {len(names)} files are missing): it"
            " was not downloaded whole; download it again"
        )
    return [folder / name for name in sorted(names)]


def _refuse_other_names(folder: Path) -> None:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if names and _SHARD.search(names[0]):
        raise CheckpointError(
            f"{folder} has no {SINGLE} and no {INDEX}; it has {len(names)} shards ({names[0]}), whose index is missing:"
            f" download {INDEX} too"
        )
    if names:
        raise CheckpointError(
            f"{folder} has no {SINGLE} and no {INDEX}; it has {names[0]}: if that file has all weights, rename it to"
            f" {SINGLE}"
        )


def pickled_weights(folder: Path) -> list[str]:
    """Return the names of the files that may hold pickled weights."""
    return sorted(path.name for path in folder.glob("*") if is_pickle(path.name))


def is_pickle(name: str) -> bool:
    """Return whether a file of this name may hold pickled weights."""
    return name.endswith(_PICKLES) and not name.startswith(_STATE_OF_TRAINING)


def check_no_pickles(folder: Path) -> None:
    """Raise CheckpointError if a folder without safetensors has pickled weights."""
    names = pickled_weights(folder)
    if names and not list(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} has pickled weights ({names[0]}), which are not read: a pickle may run code;"
            f" convert them, which reads only tensors: varlen convert-pickle {folder}"
        )


def _canonical_name(name: str, prefix: str) -> str:
    name = name.removeprefix(prefix)
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
