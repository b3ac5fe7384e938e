"""A model that generates, as the engine sees it.

It runs in this process or in one of its own.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from varlen.execution.executor import WaitingLauncher
from varlen.execution.model_info import GraphUse, StepInfo
from varlen.memory.memory_use import MemoryUse
from varlen.scheduling.choices import BeamStep, Draws, SampledToken
from varlen.scheduling.sequence import GeneratedSequence

# Chooses the token or search step of each row of logits, `[sequences, vocabulary]` fp32, given the sequences and the
# lengths of their answers. It may overwrite the logits.
Choose: TypeAlias = Callable[
    [Tensor, Sequence[GeneratedSequence], Sequence[int]], Sequence[SampledToken | BeamStep]
]


# Returns what the tokens of such rows are drawn with; None if only `Choose` can choose them.
ChooseDraws: TypeAlias = Callable[[Sequence[GeneratedSequence], Sequence[int]], Draws | None]


class StepModel(WaitingLauncher, Protocol):
    """A loaded model that generates.

    Attributes:
        graph_use: cost of its CUDA graphs.
    """

    graph_use: GraphUse

    @property
    def info(self) -> StepInfo:
        """Model facts for the engine."""

    def use(self) -> MemoryUse:
        """Return the memory use. From any thread."""

    def close(self) -> None:
        """Release memory and end processes. Nothing may run."""
