"""Embedding tables and output matrix of encoder-decoder models, which may be one tensor.

A checkpoint may hold the table of the encoder, that of the decoder and the output matrix once, several times, or as
different tensors. As in transformers 5, each is the tensor of its own name if the checkpoint has it; otherwise it is
one of the tensors that config.json ties it to.
"""

from collections.abc import Collection, Container
from dataclasses import dataclass

import torch
from torch import Tensor

from varlen.models.layers import LayerReader


@dataclass(frozen=True, slots=True)
class TableNames:
    """Names of the tensors that hold the tables.

    Attributes:
        source: embeddings of the encoder.
        target: embeddings of the decoder.
        output: the output matrix, `[vocabulary, hidden]`.
    """

    source: str
    target: str
    output: str

    def find(self, tied: Collection[str], present: Container[str]) -> "TableNames":
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
    """The tables of a model; equal ones share memory.

    Attributes:
        source, target, output: `[vocabulary, hidden]`.
    """

    source: Tensor
    target: Tensor
    output: Tensor

    @property
    def output_weight(self) -> Tensor:
        """The output matrix as `[hidden, vocabulary]`: a view if it is an embedding table too."""
        is_shared = self.output is self.source or self.output is self.target
        return self.output.t() if is_shared else self.output.t().contiguous()


def read_tables(
    read: LayerReader, names: TableNames, hidden: int, *, sources: int, targets: int
) -> Tables:
    """Return the tables of a checkpoint.

    Args:
        read: of the checkpoint.
        names: of its tensors.
        hidden: features of a token.
        sources, targets: sizes of the vocabularies.

    Raises:
        CheckpointError: see `LayerReader.tensor`.
    """
    tables: dict[str, Tensor] = {}

    def table(name: str, rows: int) -> Tensor:
        if name not in tables:
            read_now = read.tensor(name, rows, hidden)
            equal = (each for each in tables.values() if torch.equal(each, read_now))
            tables[name] = next(equal, read_now)
        return tables[name]

    return Tables(
        table(names.source, sources), table(names.target, targets), table(names.output, targets)
    )
