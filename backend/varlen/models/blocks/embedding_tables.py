"""Embedding tables and output matrix of encoder-decoder models, which may be one tensor.

`table_names` chooses the tensors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from varlen.models.checkpoint.layers import LayerReader
from varlen.models.checkpoint.table_names import TableNames


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
