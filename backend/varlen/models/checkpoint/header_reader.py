"""The reader that checks a checkpoint: it reads only headers, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from varlen.models.checkpoint.layers import LayerReader, Linear, TokenTable
from varlen.models.checkpoint.weights import (
    TensorHeader,
    check_indices,
    check_tensor,
    check_unused,
)

# Stands for a tensor that is not read.
NOTHING: Any = None


class HeaderReader(LayerReader):
    """Checks each tensor that a family's `load` asks for, and returns None for it."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self._headers = headers
        self._read: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._headers

    @property
    def fp32(self) -> LayerReader:
        """This reader: dtypes come from the files."""
        return self

    @property
    def last(self) -> LayerReader:
        """This reader: dtypes come from the files."""
        return self

    def tensor(self, name: str, *shape: int) -> Any:
        """Check a tensor."""
        check_tensor(self._headers, name, shape)
        self._read.add(name)

    def rows(self, name: str, *shape: int, of: Sequence[int]) -> Any:  # noqa: ARG002  # no row is read
        """Check a tensor."""
        self.tensor(name, *shape)

    def indices(self, name: str, count: int, *, below: int) -> Any:  # noqa: ARG002  # no number is read
        """Check a tensor of row numbers."""
        check_indices(self._headers, name, count)
        self._read.add(name)

    def head_columns(self, name: str, rows: int, heads: int) -> Any:
        """Check a tensor."""
        self.tensor(name, rows, heads)

    def token_table(self, name: str, *shape: int) -> TokenTable:
        """Check a tensor."""
        self.tensor(name, *shape)
        return TokenTable(NOTHING, shape[0])

    def vocabulary_bias(self, name: str, *shape: int) -> Any:
        """Check a tensor."""
        self.tensor(name, *shape)

    def output(self, name: str, hidden: int, vocabulary: int) -> Linear:
        """Check the tensor of an output layer."""
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
        """Check the tensors of linear layers."""
        for name, fan_out in zip(names, fan_outs, strict=True):
            shape = (fan_in, fan_out) if is_saved_by_input else (fan_out, fan_in)
            self.tensor(f"{name}.weight", *shape)
            if bias:
                self.tensor(f"{name}.bias", fan_out)
        return Linear(NOTHING, NOTHING)

    def computed(self, compute: Callable[[], Any]) -> Any:
        """Compute nothing."""

    def check_unread(self, is_harmless: Callable[[str], bool]) -> None:
        """Raise CheckpointError unless all tensors that were not asked for are harmless."""
        check_unused(self._headers, self._read, is_harmless)
