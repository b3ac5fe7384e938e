"""The reader that checks a checkpoint: it reads only headers, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from varlen.models.checkpoint.layers import GroupLinear, LayerReader, Linear, Split, TokenTable
from varlen.models.checkpoint.lora_folder import same_layer
from varlen.models.checkpoint.weights import (
    TensorHeader,
    check_indices,
    check_tensor,
    check_unused,
    is_quantized,
)

# Stands for a tensor that is not read.
NOTHING: Any = None


class HeaderReader(LayerReader):
    """Checks each tensor that a family's `load` asks for, and returns None for it."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self._headers = headers
        self._read: set[str] = set()
        self._linears: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._headers

    @property
    def fp32(self) -> LayerReader:
        """This reader: dtypes come from the files."""
        return self

    @property
    def last(self) -> LayerReader:
        return self

    @property
    def floats(self) -> LayerReader:
        return self

    def tensor(self, name: str, *shape: int) -> Any:
        check_tensor(self._headers, name, shape)
        self._read.add(name)

    def rows(self, name: str, *shape: int, of: Sequence[int]) -> Any:  # noqa: ARG002  # no row is read
        self.tensor(name, *shape)

    def indices(self, name: str, count: int, *, below: int) -> Any:  # noqa: ARG002  # no number is read
        check_indices(self._headers, name, count)
        self._read.add(name)

    def head_columns(self, name: str, rows: int, heads: int) -> Any:
        self.tensor(name, rows, heads)

    def token_table(self, name: str, *shape: int) -> TokenTable:
        self.tensor(name, *shape)
        return TokenTable(NOTHING, shape[0])

    def vocabulary_bias(self, name: str, *shape: int) -> Any:
        self.tensor(name, *shape)

    def output(self, name: str, hidden: int, vocabulary: int) -> Linear:
        self.tensor(f"{name}.weight", vocabulary, hidden)
        return Linear(NOTHING, NOTHING)

    def linear(
        self,
        names: Sequence[str],
        fan_in: int,
        fan_outs: Sequence[int],
        *,
        bias: bool = True,
        is_saved_by_input: bool = False,
        **_: object,
    ) -> Linear:
        for name, fan_out in zip(names, fan_outs, strict=True):
            weight, shape = f"{name}.weight", (fan_out, fan_in)
            if is_saved_by_input and not is_quantized(self._headers, weight):
                shape = fan_in, fan_out
            self.tensor(weight, *shape)
            self._linears.add(name)
            if bias:
                self.tensor(f"{name}.bias", fan_out)
        return Linear(NOTHING, NOTHING)

    def group_linear(
        self,
        names: Sequence[Sequence[str]],
        fan_in: int,
        fan_out: int,
        **_: object,
    ) -> GroupLinear:
        for name in (name for layers in names for name in layers):
            self.tensor(f"{name}.weight", fan_out, fan_in)
        return GroupLinear(NOTHING)

    def stacked_group_linear(
        self, name: str, groups: int, fan_in: int, fan_out: int, *, split: Split
    ) -> GroupLinear:
        size, width = (fan_out, fan_in) if split == "outputs" else (fan_in, fan_out)
        self.tensor(name, groups * size, width)
        return GroupLinear(NOTHING)

    def computed(self, compute: Callable[[], Any]) -> Any:
        """Compute nothing."""

    def may_be_left_out(self, layer: str, is_unused: Callable[[str], bool]) -> bool:
        """Return whether a layer that a program does not run changes no result of it.

        It is a linear layer of a head of another task, or none that was asked for. A layer of a stack never is: it may
        run in another form.

        Args:
            layer: name of the layer, perhaps with or without a prefix that the checkpoint has.
            is_unused: whether a tensor that was not asked for changes no result.
        """
        layers = [each.removesuffix(".weight") for each in self._headers]
        own = same_layer(layer, layers) or layer
        if any(each.isdigit() for each in own.split(".")):
            return False
        return own in self._linears or is_unused(f"{own}.weight")

    def check_unread(self, is_harmless: Callable[[str], bool]) -> None:
        """Raise CheckpointError unless all tensors that were not asked for are harmless."""
        check_unused(self._headers, self._read, is_harmless)
