"""What a loaded model knows of the other ranks that hold it with this process.

Rank 0 leads: it decides, and says what runs next before it runs that itself. The others follow. All of them run the
same ops on the same rows, and meet in the collectives of their programs.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from torch import Tensor

from varlen.program.program import NO_STATES
from varlen.program.rank import ALONE, Rank

_T = TypeVar("_T")
_Work_contra = TypeVar("_Work_contra", contravariant=True)


class RankLink(Protocol[_Work_contra]):
    """One rank's link to the others.

    Attributes:
        rank: the place of this process among them.
        states: states of programs that are memory of all ranks, by name.
    """

    rank: Rank
    states: Mapping[str, Tensor]

    def agree(self, decide: Callable[[], _T], meanwhile: Callable[[], None] | None = None) -> _T:
        """Return what rank 0 decides, once all ranks have got here.

        Args:
            decide: returns a value that JSON has; rank 0 calls it.
            meanwhile: the other ranks call it again and again until rank 0 has decided; None to wait.
        """

    def running(self, work: _Work_contra) -> AbstractContextManager[None]:
        """Return the context in which this rank runs some work, which all ranks run."""


class NoOthers:
    """The link of a process that holds a whole model: a `RankLink`."""

    rank = ALONE
    states = NO_STATES

    def agree(
        self,
        decide: Callable[[], _T],
        meanwhile: Callable[[], None] | None = None,  # noqa: ARG002  # of every link
    ) -> _T:
        """Return what this process decides."""
        return decide()

    def running(self, work: object) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context that does nothing."""
        return nullcontext()


NO_OTHERS = NoOthers()
