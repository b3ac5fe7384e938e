"""Embedding tables and output matrix of encoder-decoder models, which may be one tensor.

A checkpoint may hold the tables of encoder and decoder and the output matrix once, several times, or as different
tensors. As in transformers 5, each is the tensor of its own name if the checkpoint has it; otherwise it is one of the
tensors that config.json ties it to.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.checkpoint.layers import LayerReader, TokenTable


@dataclass(frozen=True, slots=True)
class TableNames:
    """Names of the tensors that hold the tables.

    Attributes:
        output: the output matrix, `[vocabulary, hidden]`.
    """

    source: str
    target: str
    output: str

    def find(self, tied: Collection[str], present: Container[str]) -> TableNames:
        """Return the names of the tensors to read.

        `self` has the names of tables that are not tied.

        Args:
            tied: names that config.json ties to each other.
            present: names of all tensors of the checkpoint.
        """

        def find(name: str) -> str:
            names = [name, *tied] if name in tied else [name]
            # a missing tensor is reported by its own name
            return next((each for each in names if each in present), name)

        return TableNames(find(self.source), find(self.target), find(self.output))


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a model; equal ones share memory."""

    source: TokenTable
    target: TokenTable
    output: TokenTable

    @property
    def output_weight(self) -> Tensor:
        """The output matrix as `[hidden, vocabulary]`: a view if it is an embedding table too."""
        rows, shared = self.output.rows, (self.source, self.target)
        return rows.t() if any(self.output is each for each in shared) else rows.t().contiguous()


def read_tables(
    read: LayerReader, names: TableNames, hidden: int, *, sources: int, targets: int
) -> Tables:
    """Return the tables of a checkpoint.

    Args:
        sources, targets: sizes of the vocabularies.

    Raises:
        CheckpointError: see `LayerReader`.
    """
    tables: dict[str, TokenTable] = {}

    def table(name: str, rows: int) -> TokenTable:
        if name not in tables:
            found = read.token_table(name, rows, hidden)
            known = list(tables.values())
            tables[name] = read.computed(
                lambda: next((each for each in known if each.is_equal(found)), found)
            )
        return tables[name]

    return Tables(
        table(names.source, sources), table(names.target, targets), table(names.output, targets)
    )


def check_tied(read: LayerReader, name: str, table: TokenTable, *shape: int) -> None:
    """Raise CheckpointError if a matrix that config.json ties to the embedding table is another one.

    Args:
        name: name of the matrix, which the checkpoint may lack.
    """
    if name not in read:
        return
    stored = read.token_table(name, *shape)
    if read.computed(lambda: not stored.is_equal(table)):
        raise CheckpointError(
            f'config.json has tie_word_embeddings true, but the tensor "{name}" is not the embedding table;'
            " set tie_word_embeddings to false"
        )
