"""What a loaded model knows of the other processes that hold it with this one.

They are ranks, which each have a part of every layer, or the stages of a pipeline, which each have some layers. Rank 0
leads, or the last stage: it decides, and says what runs next before it runs that itself. The others follow. Ranks run
the same ops on the same rows, and meet in the collectives of their programs. A stage waits for the one before it, which
leaves what it hands over in memory of both.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from torch import Tensor

from varlen.execution.handoffs import Handoffs
from varlen.program.program import NO_STATES
from varlen.program.rank import ALONE, Rank
from varlen.program.stages import NO_STAGES, Stage

_T = TypeVar("_T")
_Work_contra = TypeVar("_Work_contra", contravariant=True)


class RankLink(Protocol[_Work_contra]):
    """One process's link to the others.

    Attributes:
        rank: the place of this process among the ranks.
        states: states of programs that are memory of all ranks, by name.
        stage: the place of this process in a pipeline.
        handoffs: values that this stage receives and sends; None without stages.
    """

    rank: Rank
    states: Mapping[str, Tensor]
    stage: Stage
    handoffs: Handoffs | None

    def agree(self, decide: Callable[[], _T], meanwhile: Callable[[], None] | None = None, /) -> _T:
        """Return what the leader decides, once all processes have got here.

        Args:
            decide: returns a value that JSON has; the leader calls it.
            meanwhile: the others call it again and again until the leader has decided; None to wait.
        """

    def fault_of_ranks(self, fault: str, /) -> str:
        """Return the fault of one of the ranks, empty if none has one.

        Ranks wait for each other. A stage gets its own: the stage behind it learns of it in its turn.
        """

    def running(self, work: _Work_contra, /) -> AbstractContextManager[object]:
        """Return the context in which this process runs some work, which all of them run."""


class NoOthers:
    """The link of a process that holds a whole model: a `RankLink`."""

    rank = ALONE
    states = NO_STATES
    stage = NO_STAGES
    handoffs: Handoffs | None = None
    running = nullcontext

    def agree(self, decide: Callable[[], _T], _: Callable[[], None] | None = None, /) -> _T:
        return decide()

    def fault_of_ranks(self, fault: str, /) -> str:
        return fault


NO_OTHERS = NoOthers()
