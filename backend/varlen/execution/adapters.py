"""Adapters of a model: which are in memory, and which rows have one.

A load reads the names and shapes of every adapter, so a damaged one is known and refused by name. Weights are read into
a slot when a batch first needs them; the adapter that was used longest ago makes room.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from varlen.config import EngineConfig
from varlen.errors import AdapterFaultError, CheckpointError, ConfigError
from varlen.execution.device import memory_of
from varlen.execution.packing import Arrays, bounds_of
from varlen.memory.memory_use import Swap
from varlen.models.checkpoint.lora_folder import (
    MAX_ADAPTERS,
    Factors,
    LoraFolder,
    StoredTensor,
    adapter_folders,
    read_lora_folder,
    same_layer,
)
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.adapters import AdaptedLayer, AdaptedRows, AdapterTables
from varlen.program.program import Program
from varlen.request.request import Int32Array, RequestOptions

_log = logging.getLogger(__name__)

# Inputs and outputs of linear layers, by their names in the checkpoint.
Layers: TypeAlias = Mapping[str, tuple[int, int]]
# The number of an adapter, for rows without one.
NO_ADAPTER = -1
# The output layer of models that generate.
_OUTPUT = "lm_head"
# Characters of a reason that clients get; the log has all of it.
_REASON_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Replaced:
    """A layer that an adapter brings whole: weight `[outputs, inputs]`, and bias `[outputs]`."""

    weight: StoredTensor
    bias: StoredTensor | None


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter, with the names that the checkpoint has for its layers."""

    folder: LoraFolder
    factors: Mapping[str, Factors]
    replaced: Mapping[str, Replaced]


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model, in the order of their names.

    Attributes:
        names: their names; the place of a name is the number of the adapter.
        found: each of them; of a damaged one the reason why it is refused.
        slots: number of adapters that a worker holds at once.
    """

    names: tuple[str, ...]
    found: tuple[Adapter | str, ...]
    slots: int

    @property
    def num_served(self) -> int:
        return sum(isinstance(each, Adapter) for each in self.found)

    @property
    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @property
    def reasons(self) -> tuple[tuple[str, str], ...]:
        """Names, and why each is refused; empty for those that are served."""
        pairs = zip(self.names, self.found, strict=True)
        return tuple((name, each if isinstance(each, str) else "") for name, each in pairs)

    def new_tables(self) -> AdapterTables:
        """Return what a program records for them."""
        ranks: dict[str, int] = {}
        replaced: set[str] = set()
        for each in self.found:
            if isinstance(each, Adapter):
                replaced |= each.replaced.keys()
                for name, factors in each.factors.items():
                    ranks[name] = max(factors.rank, ranks.get(name, 0))
        return AdapterTables(self.slots, ranks, replaced)


def find_adapters(
    checkpoint: Checkpoint,
    config: EngineConfig,
    record: Callable[[AdapterTables], object],
    device: torch.device,
    workers: int,
) -> Adapters | None:
    """Return the adapters of a checkpoint; None if there is none.

    Args:
        workers: workers that share `adapter_bytes`.

    Raises:
        CheckpointError: see `adapter_folders`.
        ConfigError: the device serves none, or `adapter_bytes` holds none.
    """
    folders = adapter_folders(checkpoint.folder, config.adapters)
    if not folders:
        return None
    recorded = AdapterTables(1, {})
    record(recorded)
    found = tuple(_read(name, each, recorded, checkpoint) for name, each in folders.items())
    adapters = Adapters(tuple(folders), found, 1)
    of_one = adapters.new_tables()
    record(of_one)
    needed = of_one.nbytes
    allowed = config.adapter_limit(memory_of(device)) // workers
    served = adapters.num_served
    if served and allowed < needed:
        raise ConfigError(
            f"adapter_bytes allows {allowed} bytes for each of {workers} workers; an adapter of the ranks of this"
            f" model's adapters needs {needed}"
        )
    slots = max(1, min(served, allowed // max(1, needed)))
    _log.info(
        "%d adapters, %d of them damaged; each worker holds %d of them in %.1f MB",
        len(found),
        len(found) - served,
        slots,
        slots * needed / 1e6,
    )
    return Adapters(adapters.names, found, slots)


def _read(
    name: str, folder: Path, recorded: AdapterTables, checkpoint: Checkpoint
) -> Adapter | str:
    """Return the adapter of a folder, or why it is refused."""
    try:
        stored = read_lora_folder(folder)
        try:
            return _bound(stored, recorded, checkpoint)
        except BaseException:
            stored.close()
            raise
    except CheckpointError as error:
        # messages of files name folders of this machine
        reason = str(error).replace(str(folder), "the folder")
        _log.warning('the adapter "%s" is not served: %s', name, reason)
        return reason[:_REASON_CHARACTERS]


def _bound(stored: LoraFolder, recorded: AdapterTables, checkpoint: Checkpoint) -> Adapter:
    """Return an adapter whose layers have the checkpoint's names."""
    layers = recorded.seen
    factors: dict[str, Factors] = {}
    for name, each in stored.factors.items():
        own = _layer_of(name, layers, checkpoint)
        if own is None:
            continue
        fan_in, fan_out = layers[own]
        if (each.first.shape[1], each.second.shape[0]) != (fan_in, fan_out):
            raise CheckpointError(
                f'its factors of "{name}" are for {each.first.shape[1]} inputs and {each.second.shape[0]} outputs; the'
                f" model has {fan_in} and {fan_out}: it belongs to another model"
            )
        factors[own] = each
    weights: dict[str, StoredTensor] = {}
    biases: dict[str, StoredTensor] = {}
    for name, tensor in stored.saved.items():
        stem, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            raise CheckpointError(f'it has the tensor "{name}", which is not served')
        own = _layer_of(stem, layers, checkpoint)
        if own is None:
            continue
        fan_in, fan_out = layers[own]
        shape = (fan_out, fan_in) if kind == "weight" else (fan_out,)
        if tensor.shape != shape:
            raise CheckpointError(
                f'its tensor "{name}" has shape {list(tensor.shape)}; the model implies {list(shape)}'
            )
        (weights if kind == "weight" else biases)[own] = tensor
    if biases.keys() - weights.keys() or factors.keys() & weights.keys():
        raise CheckpointError("a layer that it brings whole has no weight, or factors too")
    for name in weights:
        if name in recorded.cut:
            raise CheckpointError(
                f'it brings the layer "{name}" whole, which ranks divide or which stays in 4 or 8 bits; serve it in one'
                " process, with dtype: fp32"
            )
        if (name in biases) != (name in recorded.biased):
            raise CheckpointError(
                f'its layer "{name}" has a bias where the model has none, or none'
            )
    whole = {name: Replaced(weight, biases.get(name)) for name, weight in weights.items()}
    return Adapter(stored, factors, whole)


def _layer_of(name: str, layers: Layers, checkpoint: Checkpoint) -> str | None:
    """Return the checkpoint's name of a layer; None if no answer needs it."""
    own = same_layer(name, layers)
    if own is not None:
        if not layers[own][1]:
            raise CheckpointError(
                f'it changes the layer "{name}", whose weights this model changes when it is loaded;'
                " merge the adapter into its model"
            )
        return own
    is_output = name.rpartition(".")[2] == _OUTPUT and checkpoint.runs_output
    if is_output or not checkpoint.may_leave_out(name):
        raise CheckpointError(
            f'it changes the layer "{name}"; allowed are linear layers that this model runs, without its output layer'
        )
    return None


class ResidentAdapters:
    """The adapters that one worker has in memory. Not for two threads at once."""

    def __init__(
        self,
        adapters: Adapters,
        tables: AdapterTables,
        programs: Sequence[Program],
        fault_of_ranks: Callable[[str], str] = str,
    ) -> None:
        """Reserve the tables.

        Args:
            tables: tables that its programs have recorded.
        """
        self._fault_of_ranks = fault_of_ranks
        self._adapters, self._tables, self._numbers = adapters, tables, adapters.numbers
        # a stage has some of the layers
        own = {state.name for program in programs for state in program.states}
        self._layers = [each for each in tables.layers.values() if each.first.name in own]
        # on a CPU, memory is taken when a slot is first written
        self.states: dict[str, Tensor] = {
            state.name: torch.zeros(state.shape, dtype=state.dtype)
            for layer in self._layers
            for state in layer.states
        }
        self._dimensions = [_dimensions_of(program) for program in programs]
        # adapter to slot, the one that was used longest ago first
        self._slots: OrderedDict[int, int] = OrderedDict()
        # in process they are not read; a batch has no more
        self._swaps: deque[Swap] = deque(maxlen=2 * MAX_ADAPTERS)

    @property
    def slots(self) -> int:
        """Number of adapters that it holds at once."""
        return self._tables.slots

    def close(self) -> None:
        for each in self._adapters.found:
            if isinstance(each, Adapter):
                each.folder.close()

    def new_swaps(self) -> Sequence[Swap]:
        """Return the adapters that were exchanged since the last call."""
        found = tuple(self._swaps)
        self._swaps.clear()
        return found

    def number(self, name: str) -> int:
        """Return the number of an adapter; `NO_ADAPTER` for no name."""
        return self._numbers[name] if name else NO_ADAPTER

    def parts(self, options: Sequence[RequestOptions]) -> list[list[int]]:
        """Return the places of sequences in parts whose adapters are in memory at once."""
        numbers = [self.number(each.adapter) for each in options]
        if len(set(numbers) - {NO_ADAPTER}) <= self.slots:
            return [[*range(len(numbers))]]
        parts: list[list[int]] = []
        held: set[int] = set()
        # those without one come first
        for number, place in sorted(zip(numbers, range(len(numbers)), strict=True)):
            if not parts or (number not in held and len(held) == self.slots):
                held = set()
                parts.append([])
            if number != NO_ADAPTER:
                held.add(number)
            parts[-1].append(place)
        return parts

    def arrays(
        self,
        numbers: Sequence[int] | Int32Array,
        lengths: Sequence[int] | Int32Array,
        given: Arrays,
        program: int = 0,
    ) -> tuple[Arrays, dict[str, int]]:
        """Return the inputs for rows that have an adapter, and their dimensions.

        Adapters that are not in memory are read.

        Raises:
            AdapterFaultError: an adapter cannot be read any more.
        """
        of_sequences = self._slots_of(numbers)
        of_tokens = np.repeat(of_sequences, lengths)
        arrays: dict[str, Int32Array] = {}
        # an arena has the dimensions of all programs
        dims = {AdaptedRows(each).rows: 0 for each in chain(*self._dimensions)}
        for dimension in self._dimensions[program]:
            match dimension:
                case "sequences":
                    slots = of_sequences
                case "tokens":
                    slots = of_tokens
                case _:
                    slots = of_tokens[given[_ROWS[dimension]]]
            names = AdaptedRows(dimension)
            rows = np.flatnonzero(slots >= 0)
            rows = rows[np.argsort(slots[rows], kind="stable")].astype(np.int32)
            counts = np.bincount(slots[rows], minlength=self.slots)
            arrays[names.rows] = rows
            arrays[names.bounds] = bounds_of(counts)
            dims[names.rows] = len(rows)
        return arrays, dims

    def _slots_of(self, numbers: Sequence[int] | Int32Array) -> Int32Array:
        """Return the slot of each sequence's adapter, once all of them are in memory."""
        needed = {int(number) for number in numbers} - {NO_ADAPTER}
        assert len(needed) <= self.slots
        for number in needed & self._slots.keys():
            self._slots.move_to_end(number)
        for number in sorted(needed - self._slots.keys()):
            self._load(number)
        return np.array(
            [NO_ADAPTER if each == NO_ADAPTER else self._slots[int(each)] for each in numbers],
            np.int32,
        )

    def _load(self, number: int) -> None:
        """Read an adapter into a free slot, or the one that was used longest ago.

        All ranks have it then, or none.
        """
        evicted, slot = NO_ADAPTER, len(self._slots)
        if slot == self.slots:
            evicted, slot = self._slots.popitem(last=False)
        # until it is whole
        self._slots[_BROKEN - slot] = slot
        self._slots.move_to_end(_BROKEN - slot, last=False)
        if fault := self._fault_of_ranks(self._fault_of_read(number, slot)):
            self._swaps.append((NO_ADAPTER, evicted))
            name = self._adapters.names[number]
            raise AdapterFaultError(name, f'the adapter "{name}": {fault}')
        del self._slots[_BROKEN - slot]
        self._slots[number] = slot
        self._swaps.append((number, evicted))

    def _fault_of_read(self, number: int, slot: int) -> str:
        """Read an adapter into a slot; return why it cannot be read, if so."""
        adapter = self._adapters.found[number]
        if isinstance(adapter, str):
            return adapter
        try:
            for layer in self._layers:
                _write(layer, self._tables.columns(layer.parts), adapter, slot, self.states)
        except CheckpointError as error:
            return str(error)
        return ""


# Keys of slots that hold nothing whole begin here, and descend.
_BROKEN = -2
# The input that has the tokens of the rows of other dimensions.
_ROWS = {"masks": "mask_rows", "logit_rows": "logit_rows"}


def _dimensions_of(program: Program) -> list[str]:
    names = {value.name for value in program.inputs}
    return [each for each in ("tokens", "sequences", *_ROWS) if AdaptedRows(each).rows in names]


@torch.inference_mode()
def _write(
    layer: AdaptedLayer,
    columns: Sequence[int],
    adapter: Adapter,
    slot: int,
    states: Mapping[str, Tensor],
) -> None:
    """Write what an adapter adds to a layer into a slot of its tables.

    Args:
        columns: the first column of each of its parts in the first factor.
    """
    first, read = states[layer.first.name][slot], adapter.folder.read
    spans = states[layer.spans.name][slot].zero_()
    if layer.second is None:
        _write_replaced(layer, adapter, slot, states)
        return
    second = states[layer.second.name][slot]
    feature = 0
    for (name, width, cut), column, span in zip(layer.parts, columns, spans, strict=False):
        factors = adapter.factors.get(name)
        if factors is not None:
            last = column + factors.rank
            of_inputs, of_outputs = read(factors.first), read(factors.second).mul_(factors.scale)
            if cut is not None:
                of_inputs = of_inputs[:, slice(*cut.inputs)]
                of_outputs = torch.cat([of_outputs[slice(*each)] for each in cut.outputs])
            first[:, column:last] = of_inputs.t()
            second[column:last, :width] = of_outputs.t()
            span[:] = torch.tensor([column, last, feature, feature + width])
        feature += width


def _write_replaced(
    layer: AdaptedLayer, adapter: Adapter, slot: int, states: Mapping[str, Tensor]
) -> None:
    """Write the difference of an adapter's layer and the model's own."""
    ((name, width, _),), read = layer.parts, adapter.folder.read
    first, span = states[layer.first.name][slot], states[layer.spans.name][slot, 0]
    of_bias = None if layer.bias is None else states[layer.bias.name][slot].zero_()
    if name in adapter.factors:
        factors = adapter.factors[name]
        added = (read(factors.second) @ read(factors.first)).mul_(factors.scale)
    elif name in adapter.replaced:
        assert layer.base is not None
        replaced, (weight, bias) = adapter.replaced[name], layer.base
        added = read(replaced.weight) - weight.t().float()
        if of_bias is not None and bias is not None and replaced.bias is not None:
            of_bias.copy_(read(replaced.bias) - bias.float())
    else:
        return
    first[:, :width] = added.t()
    span[:] = torch.tensor([0, width, 0, width])
