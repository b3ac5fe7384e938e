"""Names of the embedding tables and the output matrix of encoder-decoder checkpoints.

A checkpoint may hold the tables of encoder and decoder and the output matrix once, several times, or as
different tensors. As in transformers 5, each is the tensor of its own name if the checkpoint has it; otherwise it is
one of the tensors that config.json ties it to.
"""

from collections.abc import Collection, Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableNames:
    """Names of the tensors that hold the tables.

    Attributes:
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
