"""What a loaded model knows of the other processes that hold it with this one.

They are ranks, which each have a part of every layer, or the stages of a pipeline, which each have some layers. Rank 0
leads, or the last stage: it says what runs next. Ranks run the same ops on the same rows, and meet in the collectives
of their programs. A stage waits for the one before it, which leaves its results in memory of both, with a slot for
each batch that may be in flight.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from varlen.memory.planner import Dims, Size, map_shared
from varlen.program.program import NO_STATES, Value
from varlen.program.rank import ALONE, Rank
from varlen.program.stages import NO_STAGES, Stage, StageProgram

# Alignment of a value: two stages share no line of a cache.
_ALIGNMENT = 64
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


@dataclass(frozen=True, slots=True)
class _Cut:
    """The values of one cut, for one slot after another.

    Attributes:
        memory: `[slots, bytes]` uint8.
        offsets: first byte of each value in a slot, by program and name.
    """

    memory: Tensor
    offsets: Mapping[tuple[int, str], int]

    def tensors(
        self, program: int, values: Sequence[Value], slot: int, dims: Dims
    ) -> dict[str, Tensor]:
        """Return values of a batch by name."""
        found = {}
        for value in values:
            begin, shape = self.offsets[program, value.name], value.at(dims)
            size = torch.Size(shape).numel() * value.dtype.itemsize
            found[value.name] = (
                self.memory[slot, begin : begin + size].view(value.dtype).view(shape)
            )
        return found


class Handoffs:
    """The values that one stage receives and sends.

    Attributes:
        slot: the slot of the batch that runs.
    """

    def __init__(self, received: int | None, sent: int | None, *, slots: int) -> None:
        """Take memory whose size is not known yet.

        Args:
            received: file descriptor of the memory that the stage before writes, if there is one.
            sent: file descriptor of the memory that this stage writes, unless it is the last.
        """
        self.slot = 0
        self._files = received, sent
        self._slots = slots
        self._parts: Sequence[StageProgram] = ()
        self._received: _Cut | None = None
        self._sent: _Cut | None = None

    def map(self, parts: Sequence[StageProgram], largest: Sequence[Dims]) -> None:
        """Map the memory.

        Args:
            parts: this stage's part of each program.
            largest: dimensions of the largest batch of each program.
        """
        self._parts = parts
        received, sent = self._files
        self._received = self._map(received, [part.received for part in parts], largest)
        self._sent = self._map(sent, [part.sent for part in parts], largest)

    def next(self) -> None:
        """Go on to the slot of the next batch."""
        self.slot = (self.slot + 1) % self._slots

    def received_names(self, program: int) -> set[str]:
        """Return the names of what the stage before writes for a program, given its number."""
        return {value.name for value in self._parts[program].received}

    def received(self, program: int, dims: Dims) -> dict[str, Tensor]:
        """Return what the stage before has written for a batch of these dimensions."""
        if self._received is None:
            return {}
        return self._received.tensors(program, self._parts[program].received, self.slot, dims)

    def sent(self, program: int, dims: Dims) -> dict[str, Tensor]:
        if self._sent is None:
            return {}
        return self._sent.tensors(program, self._parts[program].sent, self.slot, dims)

    def pass_on(
        self, program: int, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]
    ) -> None:
        """Copy what the next stage gets as this one has received it."""
        for value in self._parts[program].passed_on:
            sent[value.name].copy_(received[value.name])

    def _map(
        self, file: int | None, groups: Sequence[Sequence[Value]], largest: Sequence[Dims]
    ) -> _Cut | None:
        if file is None:
            return None
        offsets, end = {}, 0
        for program, (values, dims) in enumerate(zip(groups, largest, strict=True)):
            for value in values:
                # stages may have unused rows, more or fewer than the next one
                assert not any(isinstance(axis, Size) for axis in value.shape[1:])
                offsets[program, value.name] = end
                end += -(-value.nbytes.at(dims) // _ALIGNMENT) * _ALIGNMENT
        # the other stage maps as much
        os.ftruncate(file, max(mmap.PAGESIZE, self._slots * end))
        memory = torch.frombuffer(map_shared(file), dtype=torch.uint8)
        os.close(file)
        return _Cut(memory[: self._slots * end].view(self._slots, end), offsets)
