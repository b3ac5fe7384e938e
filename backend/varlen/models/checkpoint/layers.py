"""The layers that families are made of: how each is read and recorded.

Several ranks may hold a model. Then each linear layer of a transformer layer is divided by its outputs, or by its
inputs, whose partial sums all ranks add up; so two layers, one after the other, need one sum. Source: Shoeybi et al.
2019, arXiv:1909.08053.

Every stage of a pipeline reads the whole model, but of other stages' layers only the shapes: their weights are tensors
of the device `meta`, which have no memory. So each one records the same ops, and all find the same cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar
from weakref import ReferenceType, ref

from varlen.errors import CheckpointError, ConfigError
from varlen.models.checkpoint.quantized_tensors import BLOCK_STEP
from varlen.program.adapters import LayerCut, LayerPart, LayerParts
from varlen.program.rank import ALONE, Rank

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from varlen.models.checkpoint.weights import CheckpointWeights
    from varlen.program.program import Value
    from varlen.program.rank import AttentionHeads
    from varlen.program.recorder import Recorder
    from varlen_kernels import Activation
    from varlen_kernels.cpu.bodies.panel_layout import BlockWeight

_T = TypeVar("_T")

# How ranks divide a linear layer: each has all of it, some outputs, or the weights of some inputs.
Split: TypeAlias = Literal["none", "outputs", "inputs"]


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer, or a rank's part of it.

    Attributes:
        weight: `[in, out]`, contiguous, or the transpose of a contiguous one; see `LayerReader`.
        bias: `[out]`, if it has one.
        is_partial: whether it has some of the inputs, so that all ranks together have the result.
        parts: layers of the checkpoint that it has side by side.
        stored: the weight as it was read, if it still exists. An adapter of a layer whose weight is another one, such
            as a scaled one, would be added to the wrong layer.
        blocks: the weight as codes; then `weight` has no memory.
    """

    weight: Tensor
    bias: Tensor | None
    is_partial: bool = False
    parts: LayerParts = ()
    stored: ReferenceType[Tensor] | None = None
    blocks: BlockWeight | None = None

    def scaled(self, factor: float) -> Linear:
        """Return the layer with its weight and bias times a factor."""
        bias = None if self.bias is None else self.bias * factor
        blocks = self.blocks
        if blocks is not None:
            blocks = blocks._replace(scales=blocks.scales * factor)
        return replace(self, weight=self.weight * factor, bias=bias, blocks=blocks)

    @property
    def adaptable(self) -> LayerParts:
        """Its layers with their outputs; 0 outputs where no adapter can change them."""
        if self.stored is not None and self.stored() is self.weight:
            return self.parts
        return tuple(LayerPart(each.name, 0) for each in self.parts)

    def record(self, ops: Recorder, x: Value) -> Value:
        """Record x @ weight + bias, `[rows, out]`, and what adapters add."""
        y = ops.linear(x, self.weight if self.blocks is None else self.blocks, self.bias)
        y = ops.add_adapters(y, x, self.adaptable, self.weight, self.bias)
        return ops.all_reduce(y) if self.is_partial else y

    def record_activated(self, ops: Recorder, x: Value, kind: Activation) -> Value:
        """Record the activation of x @ weight + bias, `[rows, out]`."""
        assert not self.is_partial
        if self.blocks is not None or ops.adapts(self.adaptable, self.weight, self.bias):
            return ops.activate(self.record(ops, x), kind=kind)
        return ops.linear_activate(x, self.weight, self.bias, kind=kind)


@dataclass(frozen=True, slots=True)
class GroupLinear:
    """Linear layers of groups, such as experts, or a rank's part of each.

    Attributes:
        weight: `[groups, out, in]`, contiguous; see `varlen_kernels.reference.linear_groups`.
        is_partial: whether it has some of the inputs, so that all ranks together have the result.
    """

    weight: Tensor
    is_partial: bool = False

    def record(self, ops: Recorder, x: Value, cu_groups: Value) -> Value:
        """Record x @ weightᵀ of the group of each row, `[rows, out]`, without a sum over ranks."""
        return ops.linear_groups(x, self.weight, cu_groups)


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The embeddings of tokens, or a rank's part of them.

    Attributes:
        weight: `[tokens, features]`; of a part, a row of zeros follows, which stands for all other tokens.
        vocab_size: tokens of all ranks.
    """

    weight: Tensor
    vocab_size: int
    rank: Rank = ALONE

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def rows(self) -> Tensor:
        """The embeddings of the tokens that it has, `[tokens, features]`."""
        first, last = self.rank.bounds(self.vocab_size)
        return self.weight[: last - first]

    def is_equal(self, other: TokenTable) -> bool:
        """Return whether it is the same part of an equal table."""
        return self.vocab_size == other.vocab_size and self.weight.equal(other.weight)

    def record(
        self,
        ops: Recorder,
        token_ids: Value,
        position_ids: Value | None = None,
        position_table: Tensor | None = None,
        *,
        scale: float = 1.0,
    ) -> Value:
        """Record the embeddings of tokens, times `scale`, plus embeddings of positions."""
        if self.rank.number:
            # one rank adds them
            position_ids = position_table = None
        first, last = self.rank.bounds(self.vocab_size)
        rows = ops.local_ids(token_ids, first=first, count=last - first)
        return ops.all_reduce(
            ops.embed(rows, self.weight, position_ids, position_table, scale=scale)
        )


@dataclass(frozen=True, slots=True)
class Norm:
    """The scale and shift of a norm over hidden features.

    Attributes:
        weight: `[hidden]`.
        bias: `[hidden]`, if it has one.
    """

    weight: Tensor
    bias: Tensor | None


class LayerReader(Container[str]):
    """Reads layers by their names in a checkpoint, in one dtype; nothing stays mapped.

    A family's `load` runs with it, and as the check of a checkpoint with a `HeaderReader`, which reads no weight.
    Either raises CheckpointError for a tensor that is missing, has another shape, or is quantized.
    """

    rank = ALONE
    _stage: StageLayers | None = None
    # whether the inputs of an output of a linear layer lie side by side, as decode kernels of a GPU read them
    by_output = False
    # whether linear layers keep codes of blocks, which products of a CPU read
    keeps_codes = False

    def __init__(
        self,
        weights: CheckpointWeights,
        dtype: torch.dtype,
        device: torch.device,
        last_dtype: torch.dtype | None = None,
        rank: Rank = ALONE,
        stage: StageLayers | None = None,
    ) -> None:
        """Read from mapped files.

        Args:
            last_dtype: dtype of the layers that `last` reads; None for `dtype`.
            stage: the stage whose layers it reads; None for all layers.
        """
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._last_dtype = last_dtype or dtype
        self.rank = rank
        self._stage = stage

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    @property
    def fp32(self) -> LayerReader:
        """A reader of it in fp32."""
        import torch

        return LayerReader(self._weights, torch.float32, self._device, rank=self.rank)

    @property
    def last(self) -> LayerReader:
        """A reader of it in the dtype of the last norm and of the head."""
        return LayerReader(self._weights, self._last_dtype, self._device, rank=self.rank)

    @property
    def floats(self) -> LayerReader:
        """A reader of it for weights that a family changes: it keeps no codes."""
        reader = copy(self)
        reader.keeps_codes = False
        return reader

    def layers(
        self,
        count: int,
        read: Callable[[LayerReader, int], _T],
        *,
        is_for_first_stage: bool = False,
    ) -> tuple[_T, ...]:
        """Return the layers of a stack.

        Layers of other stages have weights without memory.

        Args:
            read: reads one of them, given its number.
            is_for_first_stage: whether the first stage has the whole stack, as it has the encoder of a decoder.
        """
        stage = self._stage
        if stage is None:
            return tuple(read(self, number) for number in range(count))
        import torch

        outside = self.floats
        outside._device = torch.device("meta")
        if is_for_first_stage:
            reader = self if stage.is_first else outside
            return tuple(read(reader, number) for number in range(count))
        layers = tuple(
            read(self if stage.has(number) else outside, number) for number in range(count)
        )
        stage.add(layers)
        return layers

    def heads(self, heads: AttentionHeads) -> AttentionHeads:
        """Return the heads that this rank has of an attention layer.

        Raises:
            ConfigError: the ranks cannot divide them.
        """
        size = self.rank.size
        if heads.queries % size or (heads.keys % size and size % heads.keys):
            raise ConfigError(
                f"tensor_parallel is {size}; this model has {heads.queries} query heads and {heads.keys} key heads:"
                f" allowed are numbers that divide {heads.queries}, and divide {heads.keys} or are multiples of it"
            )
        return replace(heads, queries=heads.queries // size, keys=max(1, heads.keys // size))

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the layout of its file."""
        # a view would keep the whole file mapped, and be read page by page while requests wait
        return self._weights.read(name, *shape).to(self._device, self._dtype, copy=True)

    def rows(self, name: str, *shape: int, of: Sequence[int]) -> Tensor:
        """Return some rows of a tensor, `[len(of), ...]`."""
        # not the whole tensor in another dtype; a list of rows makes a copy
        return self._weights.read(name, *shape)[list(of)].to(self._device, self._dtype)

    def indices(self, name: str, count: int, *, below: int) -> Tensor:
        """Return a tensor of row numbers, `[count]`, each at least 0 and less than `below`.

        Raises:
            CheckpointError: a number is out of range.
        """
        numbers = self._weights.read_indices(name, count).to(self._device, copy=True)
        least, most = int(numbers.min()), int(numbers.max())
        if least < 0 or most >= below:
            raise CheckpointError(
                f'the tensor "{name}" names rows from {least} to {most}; allowed: 0 to {below - 1}'
            )
        return numbers

    def as_read(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the dtype of this reader, contiguous."""
        return tensor.to(self._dtype).contiguous()

    def head_columns(self, name: str, rows: int, heads: int) -> Tensor:
        """Return this rank's columns of a tensor with one for each head, `[rows, heads]`."""
        return self._part(name, rows, heads, axis=1, bounds=[self.rank.share(heads)])

    def token_table(self, name: str, *shape: int) -> TokenTable:
        """Return the embeddings of tokens, `shape`, or this rank's part of them."""
        if self.rank == ALONE:
            return TokenTable(self.tensor(name, *shape), shape[0])
        import torch

        stored = self._stored(name, shape, 0, [self._vocabulary(shape[0])])
        table = torch.zeros(len(stored) + 1, shape[1], dtype=self._dtype, device=self._device)
        table[:-1] = stored
        return TokenTable(table, shape[0], self.rank)

    def vocabulary_bias(self, name: str, *shape: int) -> Tensor:
        """Return this rank's part of a bias for each token, `[tokens]`."""
        # the other axes are 1
        axis = max(range(len(shape)), key=shape.__getitem__)
        bounds = [self.rank.bounds(shape[axis])]
        return self._part(name, *shape, axis=axis, bounds=bounds).flatten()

    def norm(self, name: str, size: int, *, bias: bool = True) -> Norm:
        """Return a norm of `size` features."""
        return Norm(
            self.tensor(f"{name}.weight", size),
            self.tensor(f"{name}.bias", size) if bias else None,
        )

    def output(self, name: str, hidden: int, vocabulary: int) -> Linear:
        """Return a layer that gives a logit for each of this rank's tokens."""
        bounds = self._vocabulary(vocabulary)
        stored = self._stored(f"{name}.weight", (vocabulary, hidden), 0, [bounds])
        weight = self._new_weight(hidden, len(stored), stored.device)
        # transposes and converts at once
        return Linear(weight.copy_(stored.t()), None)

    def linear(
        self,
        names: Sequence[str],
        fan_in: int,
        fan_outs: Sequence[int],
        *,
        bias: bool = True,
        split: Split = "none",
        units: Sequence[int] | None = None,
        parts: int = 1,
        is_saved_by_input: bool = False,
    ) -> Linear:
        """Return linear layers that read one input as one layer, their outputs side by side.

        Args:
            names: names of the layers, whose files have weights `[out, in]`.
            bias: whether they have one.
            split: the axis along which ranks divide the layer.
            units: numbers of heads whose features each output consists of; None where any feature may be apart.
            parts: equal parts of the outputs of one layer that mean different things, such as queries, keys, values.
            is_saved_by_input: whether their files have weights `[in, out]`, unless these are quantized.

        Raises:
            ConfigError: the ranks cannot divide the layer.
        """
        import torch

        split = "none" if self.rank == ALONE else split
        is_saved_by_input &= not self._weights.is_quantized(f"{names[0]}.weight")
        inputs = [(0, fan_in)]
        if split == "inputs":
            self._check(names[0], fan_in)
            inputs = [self.rank.bounds(fan_in)]
        outputs = [
            self._outputs(name, fan_out, parts, None if units is None else units[i])
            if split == "outputs"
            else [(0, fan_out)]
            for i, (name, fan_out) in enumerate(zip(names, fan_outs, strict=True))
        ]
        widths = [sum(last - first for first, last in bounds) for bounds in outputs]
        rows = inputs[0][1] - inputs[0][0]
        blocks = None
        if self.keeps_codes and not is_saved_by_input:
            blocks = self._blocks(names, fan_in, fan_outs, inputs[0], outputs)
        weight = self._new_weight(
            rows, sum(widths), self._device if blocks is None else torch.device("meta")
        )
        places = torch.split(weight, widths, dim=1)
        for name, fan_out, bounds, place in zip(names, fan_outs, outputs, places, strict=True):
            if blocks is not None:
                break
            stored = self._stored(
                f"{name}.weight",
                (fan_in, fan_out) if is_saved_by_input else (fan_out, fan_in),
                int(is_saved_by_input) ^ int(split == "inputs"),
                inputs if split == "inputs" else bounds,
            )
            # transposes and converts at once, on the device
            place.copy_(stored if is_saved_by_input else stored.t())
        is_partial = split == "inputs"
        made = tuple(
            LayerPart(
                name,
                width,
                None
                if split == "none" and blocks is None
                else LayerCut((fan_in, fan_out), inputs[0], tuple(bounds)),
            )
            for name, fan_out, width, bounds in zip(names, fan_outs, widths, outputs, strict=True)
        )
        if not bias or (is_partial and self.rank.number):
            return Linear(weight, None, is_partial, made, ref(weight), blocks)
        # torch.cat would import a second of Python for layers of other stages
        joined = torch.empty(sum(widths), dtype=self._dtype, device=self._device)
        places = torch.split(joined, widths)
        for name, fan_out, bounds, place in zip(names, fan_outs, outputs, places, strict=True):
            place.copy_(self._part(f"{name}.bias", fan_out, axis=0, bounds=bounds))
        return Linear(weight, joined, is_partial, made, ref(weight), blocks)

    def _blocks(
        self,
        names: Sequence[str],
        fan_in: int,
        fan_outs: Sequence[int],
        inputs: tuple[int, int],
        outputs: Sequence[Sequence[tuple[int, int]]],
    ) -> BlockWeight | None:
        """Return layers side by side as codes; None if they cannot stay."""
        import torch

        from varlen_kernels.cpu.bodies.panel_layout import HAS_TABLES, pack_blocks

        layers = zip(names, fan_outs, strict=True)
        read = (self._weights.read_blocks(f"{name}.weight", out, fan_in) for name, out in layers)
        found = [each for each in read if each is not None]
        size = gcd(*inputs, *(fan_in // each.scale.shape[1] for each in found))
        if len(found) < len(names) or size % BLOCK_STEP:
            return None
        bits, table, order = found[0][3:]
        if any(each.kind != found[0].kind for each in found):
            return None
        # some inputs in an order of their own are parts of groups
        if (table is not None and not HAS_TABLES) or (order is not None and inputs != (0, fan_in)):
            return None
        parts = [
            each.part(bounds, inputs, size) for each, bounds in zip(found, outputs, strict=True)
        ]
        codes, scale = (torch.cat(each) for each in list(zip(*parts, strict=True))[:2])
        offset = None
        if any(each.offset is not None for each in parts):
            offset = torch.cat(
                [each.scale * 0 if each.offset is None else each.offset for each in parts]
            )
        return pack_blocks(codes, scale, offset, bits, table, order)

    def _new_weight(self, fan_in: int, fan_out: int, device: torch.device) -> Tensor:
        import torch

        shape = (fan_out, fan_in) if self.by_output else (fan_in, fan_out)
        weight = torch.empty(shape, dtype=self._dtype, device=device)
        return weight.t() if self.by_output else weight

    def group_linear(
        self, names: Sequence[Sequence[str]], fan_in: int, fan_out: int, *, split: Split
    ) -> GroupLinear:
        """Return the linear layers of groups, without biases.

        Args:
            names: names of the layers of each group, whose outputs are side by side; files have weights `[out, in]`.
            fan_out: outputs of each layer.
            split: the axis along which ranks divide each layer.

        Raises:
            ConfigError: the ranks cannot divide the layers.
        """
        import torch

        axis, size = (0, fan_out) if split == "outputs" else (1, fan_in)
        bounds = [self._split_bounds(names[0][0], size, split)]
        part = bounds[0][1] - bounds[0][0]
        rows, columns = (part, fan_in) if axis == 0 else (fan_out, part)
        weight = torch.empty(
            (len(names), len(names[0]), rows, columns), dtype=self._dtype, device=self._device
        )
        for group, layers in zip(weight, names, strict=True):
            for place, name in zip(group, layers, strict=True):
                place.copy_(self._stored(f"{name}.weight", (fan_out, fan_in), axis, bounds))
        return GroupLinear(weight.flatten(1, 2), self._is_partial(split))

    def stacked_group_linear(
        self, name: str, groups: int, fan_in: int, fan_out: int, *, split: Split
    ) -> GroupLinear:
        """Return the linear layers of groups of one tensor, without biases.

        The tensor has the features that ranks divide as rows, group after group: `[groups · out, in]` with the split
        "outputs", `[groups · in, out]` with "inputs".

        Raises:
            ConfigError: the ranks cannot divide the layers.
        """
        size, width = (fan_out, fan_in) if split == "outputs" else (fan_in, fan_out)
        first, last = self._split_bounds(name, size, split)
        bounds = [(group * size + first, group * size + last) for group in range(groups)]
        if last - first == size:
            bounds = [(0, groups * size)]
        stored = self._stored(name, (groups * size, width), 0, bounds)
        weight = stored.view(groups, last - first, width)
        weight = weight if split == "outputs" else weight.transpose(1, 2)
        copied = weight.new_empty(weight.shape, dtype=self._dtype).copy_(weight)
        return GroupLinear(copied, self._is_partial(split))

    def _split_bounds(self, name: str, size: int, split: Split) -> tuple[int, int]:
        if split == "none" or self.rank == ALONE:
            return 0, size
        self._check(name, size)
        return self.rank.bounds(size)

    def _is_partial(self, split: Split) -> bool:
        return split == "inputs" and self.rank != ALONE

    def computed(self, compute: Callable[[], _T]) -> _T:
        """Return what is computed of tensors that were read.

        A `HeaderReader` computes nothing.
        """
        return compute()

    def _outputs(
        self, name: str, fan_out: int, parts: int, units: int | None
    ) -> list[tuple[int, int]]:
        width = fan_out // parts
        if units is None:
            self._check(name, width)
            units = width
        first, last = (each * (width // units) for each in self.rank.share(units))
        return [(part * width + first, part * width + last) for part in range(parts)]

    def _check(self, name: str, features: int) -> None:
        if features % self.rank.size:
            raise ConfigError(
                f'tensor_parallel is {self.rank.size}; the layer "{name}" has {features} features to divide:'
                f" allowed are divisors of {features}"
            )

    def _vocabulary(self, tokens: int) -> tuple[int, int]:
        first, last = self.rank.bounds(tokens)
        if first == last:
            raise ConfigError(
                f"tensor_parallel is {self.rank.size}; {tokens} tokens leave none for rank {self.rank.number}"
            )
        return first, last

    def _part(self, name: str, *shape: int, axis: int, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """Return parts of a tensor, one after another, in the layout of its file."""
        if list(bounds) == [(0, shape[axis])]:
            return self.tensor(name, *shape)
        return self._stored(name, shape, axis, bounds).to(self._dtype)

    def _stored(
        self, name: str, shape: tuple[int, ...], axis: int, bounds: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Return parts of a tensor as its file has them, perhaps as a view."""
        if list(bounds) == [(0, shape[axis])]:
            return self._weights.read(name, *shape).to(self._device)
        parts = self._weights.read_parts(name, *shape, axis=axis, bounds=bounds)
        return parts.to(self._device)


class StageLayers:
    """The layers of one stage."""

    def __init__(self, first: int = 0, last: int = 0, *, is_first: bool = False) -> None:
        """Choose the layers.

        Args:
            first, last: bounds of the layers; equal to read none.
        """
        self.is_first = is_first
        self.count = 0
        self._bounds = first, last
        self.layer_of: dict[int, int] = {}
        # as long as they are kept, no other tensor has their id
        self._weights: list[Tensor] = []

    def has(self, number: int) -> bool:
        first, last = self._bounds
        return first <= number < last

    def add(self, layers: Sequence[object]) -> None:
        """Take notice of all layers, which were read."""
        self.count = len(layers)
        for number, layer in enumerate(layers):
            for weight in _weights(layer):
                self.layer_of[id(weight)] = number
                self._weights.append(weight)


def _weights(part: object) -> Iterator[Tensor]:
    from torch import Tensor

    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _weights(each)
    elif is_dataclass(part):
        for each in fields(part):
            yield from _weights(getattr(part, each.name))
