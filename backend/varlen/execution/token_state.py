"""The choice of tokens, and its state on a device: searches and edit lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from varlen.execution.packing import Arrays
from varlen.request.request import Int32Array
from varlen.scheduling.batch import Batch
from varlen.scheduling.device_plan import (
    BeamStep,
    Chosen,
    ChosenBeams,
    DevicePlan,
    EditLimits,
    SampledToken,
)
from varlen_kernels.functions import NOT_GIVEN
from varlen_kernels.reference.beam import BeamEdits
from varlen_kernels.reference.beam_search import SearchResults, SearchState
from varlen_kernels.reference.logit_edits import EditLists, EditState


class Chooser(Protocol):
    """Chooses tokens and steps of searches, and says what the device can choose by itself."""

    def plan(self, step: Batch) -> DevicePlan:
        """Return what the device chooses in a step.

        The tokens of the step before it are perhaps not known yet.
        """

    def given(self, step: Batch) -> Int32Array:
        """Return what the host has chosen for the beams of a step, `[beams, 2]`.

        That is the beam that each one continues, and the token; NOT_GIVEN where the device has chosen them.
        """

    def forget(self) -> None:
        """Forget what the device keeps of sequences: it has lost it."""

    def outputs(
        self, step: Batch, plan: DevicePlan, chosen: Chosen, logits: Tensor | None
    ) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of a step, chunk by chunk.

        Args:
            logits: `[logit rows, vocabulary]` fp32, may be overwritten; None if nothing is left to choose.
        """


class NoChooser:
    """A `Chooser` without outputs, for a process that only runs steps."""

    def plan(self, step: Batch) -> DevicePlan:  # noqa: ARG002  # of every chooser
        return DevicePlan()

    def given(self, step: Batch) -> Int32Array:
        return np.full((sum(chunk.beams for chunk in step.chunks), 2), NOT_GIVEN, np.int32)

    def forget(self) -> None:
        """Do nothing."""

    def outputs(
        self,
        step: Batch,  # noqa: ARG002
        plan: DevicePlan,  # noqa: ARG002
        chosen: Chosen,  # noqa: ARG002
        logits: Tensor | None,  # noqa: ARG002
    ) -> Sequence[SampledToken | BeamStep]:
        return ()


class DeviceSearches:
    """The searches of one model.

    Attributes:
        state: memory of their beams from step to step.
    """

    def __init__(
        self,
        kernels: Any,
        device: torch.device,
        *,
        rows: int,
        blocks: int,
        block_size: int,
    ) -> None:
        """Start without a search.

        Args:
            rows: most rows of logits, which is the most beams at the same time.
        """
        self._kernels = kernels
        self._block_size = block_size
        self.state = SearchState.new(rows, blocks, device)
        # scores of beams before the step, which `advance_searches` adds
        self._zeros = torch.zeros(rows, 1, device=device)

    def follow(self, beams: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        """Give beams their tokens and block tables; return blocks to copy, `[copies, 2]` int32.

        Args:
            beams: `PackedStep.beams` on the device.
            inputs: inputs of the step; changed.
        """
        copies = torch.empty_like(beams["given"])
        self._kernels.follow_beams(
            self.state,
            beams["searches"],
            beams["beam_slots"],
            beams["given"],
            inputs["token_ids"],
            # every program that reads KV blocks has them; not all have positions
            inputs["context_lens"],
            inputs["cu_blocks"],
            inputs["block_ids"],
            inputs["slots"],
            copies,
            block_size=self._block_size,
        )
        return copies

    def advance(self, logits: Tensor, arrays: Arrays, on_device: Mapping[str, Tensor]) -> Tensor:
        """Return what searches choose, the numbers of `SearchResults`.

        Args:
            logits: `[logit rows, vocabulary]` fp32 of the step; may be overwritten.
            arrays, on_device: `PackedStep.searches`, on the host and on the device.
        """
        width, num_beams, renormalizes = arrays["sizes"].tolist()
        num_searches, device = len(arrays["searches"]), logits.device
        if len(arrays["rows"]) < len(logits):
            logits = logits[on_device["rows"].long()]
        rows, tokens = on_device["banned_rows"], on_device["banned_tokens"]
        edits = None
        if len(rows) and renormalizes:
            logits[rows.long(), tokens.long()] = -torch.inf
        elif len(rows):
            edits = BeamEdits(rows, tokens, torch.full(rows.shape, torch.inf, device=device))
        width = min(width, logits.shape[1])
        found = self._kernels.beam_step(
            logits, self._zeros[: len(logits)], width=width, edits=edits
        )
        numbers = SearchResults.numbers(num_searches, num_beams, device)
        self._kernels.advance_searches(
            found,
            on_device["searches"],
            on_device["beam_slots"],
            on_device["divisors"],
            on_device["ends"],
            self.state,
            SearchResults.views(numbers, num_searches),
        )
        return numbers


def choices_of(numbers: Int32Array, count: int) -> ChosenBeams:
    """Return what searches have chosen, given `SearchResults.numbers` of each step."""
    beams = (numbers.shape[1] - 2 * count) // 6
    ends, of_beams, scores = np.split(numbers, [2 * count, 2 * count + 5 * beams], 1)
    ends, of_beams = ends.reshape(-1, count, 2), of_beams.reshape(-1, beams, 5)
    return ChosenBeams(ends, of_beams, scores.view(np.float32))


class DeviceEdits:
    """The edit lists of one model on its device."""

    def __init__(self, kernels: Any, device: torch.device, limits: EditLimits) -> None:
        """Start without a list.

        Args:
            kernels: module with the op.
        """
        self._kernels = kernels
        self._state = EditState.new(*limits, device)
        ids = torch.empty(0, dtype=torch.int32, device=device)
        self._none_begun = EditLists(ids, ids, torch.empty(0, device=device))

    def apply(
        self,
        logits: Tensor,
        token_ids: Tensor,
        logit_rows: Tensor,
        rows: Tensor,
        penalties: Tensor,
        **begun: Tensor,
    ) -> None:
        """Edit the logits of a step.

        Args:
            begun: arrays of `EditLists`, if lists begin.
        """
        lists = EditLists(**begun) if begun else self._none_begun
        self._kernels.edit_logits(
            logits, token_ids, logit_rows, rows, penalties, lists, self._state
        )
