"""Folders of adapters that peft has saved, checked without their weights.

A folder has adapter_config.json and adapter_model.safetensors. The names of its tensors say which layers it changes, so
`target_modules`, `exclude_modules` and `layers_to_transform` need no reading in any of their forms. What would change
an answer and is not served is refused by name.
Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732 (the scale alpha / sqrt(rank)); the
fields of `LoraConfig`, and the names that `save_pretrained` writes, in peft 0.21.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import (
    Json,
    check_no_pointers,
    describe_damage,
    has_file,
    is_off,
    read_int,
    read_object,
    show,
)
from varlen.models.checkpoint.weights import locate_weights

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS, _PICKLE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
# Where a checkpoint's folder has its adapters, if no setting names others.
FOLDER = "adapters"
# Names of adapters: they are in names of models, labels of metrics and messages.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_ADAPTERS, MAX_RANK = 256, 256
_DTYPES = ("F64", "F32", "F16", "BF16")
_PREFIX = "base_model.model."
_FACTORS = (".lora_A.weight", ".lora_B.weight")
# Beginnings of other tensors of an adapter's layer, by what they belong to.
_OTHERS: Mapping[str, str] = {
    "lora_magnitude_vector": "DoRA (use_dora)",
    "lora_embedding_": "an adapter of embeddings",
    "lora_B.bias": "a bias of its factors (lora_bias)",
}
# Fields that decide what is computed, and what is allowed beside null, false and nothing.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
# Fields that are read, and fields that change no answer once an adapter is trained.
_READ = frozenset("r lora_alpha use_rslora rank_pattern alpha_pattern modules_to_save".split())
_HARMLESS = frozenset(
    "auto_mapping base_model_name_or_path ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode"
    " layers_pattern layers_to_transform loftq_config lora_dropout megatron_core peft_version qalora_group_size"
    " revision runtime_config target_modules task_type".split()
)
# What a key of rank_pattern or alpha_pattern may be: the end of a layer's name, of whole words.
_PATTERN = re.compile(r"\^?((?:[\w-]|\\?\.)+)\$?")
_REMEDY = "merge the adapter into its model with merge_and_unload of peft, and serve that model"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the file of an adapter.

    Attributes:
        begin: its first byte in the file.
    """

    begin: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Factors:
    """The two factors of one layer.

    Attributes:
        first: `[rank, inputs]`.
        second: `[outputs, rank]`.
        scale: multiplies their product.
    """

    first: StoredTensor
    second: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        """Features between them."""
        return self.first.shape[0]


@dataclass(frozen=True, slots=True)
class LoraFolder:
    """An adapter in its file, which stays open.

    So a later change of the folder changes no answer.

    Attributes:
        saved: other tensors, of layers that the adapter brings whole, by their names.
    """

    factors: Mapping[str, Factors]
    saved: Mapping[str, StoredTensor]
    descriptor: int
    changed_at: int

    def read(self, stored: StoredTensor) -> Tensor:
        """Return a tensor in fp32.

        Raises:
            CheckpointError: the file was changed since it was opened, or cannot be read.
        """
        import torch

        dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
        dtype = dtypes.get(stored.dtype, torch.bfloat16)
        size = math.prod(stored.shape) * dtype.itemsize
        try:
            content = os.pread(self.descriptor, size, stored.begin)
            is_same = os.fstat(self.descriptor).st_mtime_ns == self.changed_at
        except OSError as error:
            raise CheckpointError(f"{WEIGHTS} cannot be read: {error.strerror}") from None
        if len(content) != size or not is_same:
            raise CheckpointError(f"{WEIGHTS} was changed after it was loaded; reload the model")
        return torch.frombuffer(bytearray(content), dtype=dtype).view(stored.shape).float()

    def close(self) -> None:
        with suppress(OSError):
            os.close(self.descriptor)


def adapter_folders(folder: Path, setting: str) -> dict[str, Path]:
    """Return the folders of a checkpoint's adapters by name, in the order of the names.

    Args:
        setting: "auto" for each folder in its `adapters`, "none", or `NAME=FOLDER` separated by commas. A relative
            folder is in the checkpoint's.

    Raises:
        CheckpointError: there are too many, or a name is not allowed.
    """
    if setting == "none":
        return {}
    if setting == "auto":
        with suppress(FileNotFoundError, NotADirectoryError):
            children = [each for each in (folder / FOLDER).iterdir() if has_file(each, CONFIG)]
            return _checked({each.name: each for each in children})
        return {}
    pairs = [each.strip().partition("=") for each in setting.split(",")]
    return _checked({name: folder / path for name, _, path in pairs})


def _checked(folders: Mapping[str, Path]) -> dict[str, Path]:
    if len(folders) > MAX_ADAPTERS:
        raise CheckpointError(
            f"there are {len(folders)} adapters; allowed: at most {MAX_ADAPTERS} for one model"
        )
    for name in folders:
        if not NAME.fullmatch(name):
            raise CheckpointError(
                f"an adapter has the name {show(name)}; allowed: up to 64 letters, digits and . _ -, a letter or digit"
                " first"
            )
    return dict(sorted(folders.items()))


def read_lora_folder(folder: Path) -> LoraFolder:
    """Return the adapter of a folder, whose weights are not read yet.

    Raises:
        CheckpointError: it is damaged, or asks for something that is not served.
    """
    config = read_object(folder, CONFIG)
    _check_fields(config)
    if not has_file(folder, WEIGHTS):
        found = (
            f", but {_PICKLE}, a pickle, which may run code" if has_file(folder, _PICKLE) else ""
        )
        raise CheckpointError(
            f"the folder has no {WEIGHTS}{found}: save the adapter with a peft of 2023-12 or later"
        )
    check_no_pointers(folder)
    try:
        path = locate_weights(folder, WEIGHTS)
        # what checks that the tensors lie one after another in the file, to its end
        with safe_open(path, framework="np"):
            pass
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{WEIGHTS} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise CheckpointError(describe_damage(folder / WEIGHTS, error)) from None
    try:
        changed_at = os.fstat(descriptor).st_mtime_ns
        factors, saved = _of_layers(dict(_stored(descriptor)), config)
        return LoraFolder(factors, saved, descriptor, changed_at)
    except BaseException:
        os.close(descriptor)
        raise


def _check_fields(config: Json) -> None:
    for name, value in config.items():
        if name in _FIXED:
            if value not in _FIXED[name] and not (name == "init_lora_weights" and value is False):
                allowed = ", ".join(map(show, _FIXED[name]))
                raise CheckpointError(
                    f"{CONFIG} has {name} {show(value)}; allowed: {allowed}; {_REMEDY}"
                )
        elif name not in _READ and name not in _HARMLESS and not is_off(value):
            raise CheckpointError(
                f"{CONFIG} has {name} {show(value)}, which is not served; {_REMEDY}"
            )
    if config.get("peft_type") is None:
        raise CheckpointError(f"{CONFIG} has no peft_type; allowed: LORA")


def _stored(descriptor: int) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a safetensors file, which safetensors has checked."""
    size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = json.loads(os.pread(descriptor, size, 8))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f'the tensor "{name}" has dtype {entry["dtype"]}; allowed: {", ".join(_DTYPES)}'
            )
        begin = 8 + size + entry["data_offsets"][0]
        yield name, StoredTensor(begin, entry["dtype"], tuple(entry["shape"]))


def _of_layers(
    tensors: Mapping[str, StoredTensor], config: Json
) -> tuple[dict[str, Factors], dict[str, StoredTensor]]:
    firsts: dict[str, StoredTensor] = {}
    seconds: dict[str, StoredTensor] = {}
    saved: dict[str, StoredTensor] = {}
    for stored_name, tensor in tensors.items():
        if not stored_name.startswith(_PREFIX):
            raise CheckpointError(f'the tensor "{stored_name}" does not begin with {_PREFIX}')
        name = stored_name.removeprefix(_PREFIX)
        for mark, meaning in _OTHERS.items():
            if f".{mark}" in name:
                raise CheckpointError(
                    f'the tensor "{stored_name}" is part of {meaning}, which is not served; {_REMEDY}'
                )
        if name.endswith(_FACTORS[0]):
            firsts[name.removesuffix(_FACTORS[0])] = tensor
        elif name.endswith(_FACTORS[1]):
            seconds[name.removesuffix(_FACTORS[1])] = tensor
        else:
            saved[name] = tensor
    if firsts.keys() != seconds.keys():
        lone = min(firsts.keys() ^ seconds.keys())
        raise CheckpointError(f'the layer "{lone}" has one of two factors: the file is incomplete')
    if not firsts and not saved:
        raise CheckpointError(f"{WEIGHTS} has no tensors")
    scales = _Scales(config)
    return {
        name: scales.factors(name, first, seconds[name]) for name, first in firsts.items()
    }, saved


class _Scales:
    def __init__(self, config: Json) -> None:
        self._rank = read_int(config, "r", default=8, name=CONFIG)
        self._alpha = _number(config.get("lora_alpha", 8), "lora_alpha")
        self._ranks = _pattern(config, "rank_pattern")
        self._alphas = _pattern(config, "alpha_pattern")
        self._is_stabilized = config.get("use_rslora") is True

    def factors(self, name: str, first: StoredTensor, second: StoredTensor) -> Factors:
        rank = _found(self._ranks, name, self._rank)
        if rank != int(rank) or not 1 <= rank <= MAX_RANK:
            raise CheckpointError(
                f'{CONFIG} gives the layer "{name}" the rank {rank:g}; allowed: 1 to {MAX_RANK}'
            )
        shapes = first.shape, second.shape
        if any(len(each) != 2 for each in shapes) or not first.shape[0] == second.shape[1] == rank:
            raise CheckpointError(
                f'the factors of the layer "{name}" have the shapes {list(first.shape)} and {list(second.shape)};'
                f" {CONFIG} implies rank {rank:g}"
            )
        divisor = math.sqrt(rank) if self._is_stabilized else rank
        return Factors(first, second, _found(self._alphas, name, self._alpha) / divisor)


def _pattern(config: Json, field: str) -> dict[str, float]:
    found = config.get(field) or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{CONFIG} has {field} {show(found)}; allowed: an object of numbers")
    numbers = {}
    for key, value in found.items():
        match = _PATTERN.fullmatch(key)
        if match is None:
            raise CheckpointError(
                f"{CONFIG} has the key {show(key)} in {field}; allowed: names of layers, or their ends"
            )
        numbers[key] = _number(value, field)
    return numbers


def _found(numbers: Mapping[str, float], name: str, default: float) -> float:
    for key, number in numbers.items():
        plain = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
        # a key with ^ is preceded by nothing, or by whole words as any other
        if name == plain or name.endswith(f".{plain}"):
            return number
    return default


def _number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{CONFIG} has {field} {show(value)}; allowed: numbers")
    return float(value)


def same_layer(name: str, names: Iterable[str]) -> str | None:
    """Return the layer that peft calls by this name, if there is exactly one.

    Models with a head have a prefix before the names of the model without it, so one name may end with the other.
    """
    found = [
        each
        for each in names
        if each == name or each.endswith(f".{name}") or name.endswith(f".{each}")
    ]
    return name if name in found else found[0] if len(found) == 1 else None
