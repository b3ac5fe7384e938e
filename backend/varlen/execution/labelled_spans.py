"""Runs a model that extracts spans, also with a second encoder, for labels.

Labels are no tokens of a text for the scheduler, so a batch may have more than memory holds, and then runs in parts.
The result for a label depends on no text: it is kept by the label's tokens, and the ones that were used longest ago
make room. Labels that are not kept are packed as texts are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from varlen.execution.one_shot import OneShot, ProgramRunner
from varlen.execution.packing import Arrays
from varlen.memory.usage import Dims
from varlen.models.blocks.inputs import LABEL_PART
from varlen.program.program import Value
from varlen.request.request import (
    DEFAULT_OPTIONS,
    ApartLabels,
    Float32Array,
    Int32Array,
    Prompt,
    RequestOptions,
)

# Memory of the results that a worker keeps, in bytes.
KEPT_BYTES = 32 << 20


class SpansInParts(OneShot):
    """Texts with labels as a whole, as many of them as memory holds."""

    def __init__(self, device: ProgramRunner, *, largest: Dims, **settings: Any) -> None:
        """Use the program of texts.

        Args:
            largest: largest dimensions of a batch.
        """
        super().__init__(device, "extract", **settings)
        self._largest = largest

    def _launch(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> Callable[[], list[Float32Array]]:
        parts = list(self._parts(prompts))
        if len(parts) > 1:
            return self._launch_parts(prompts, options, parts)
        return super()._launch(prompts, options)

    def _parts(self, prompts: Sequence[Prompt]) -> Iterator[Sequence[int]]:
        most = self._largest["labels"], self._largest["pairs"]
        part: list[int] = []
        labels = pairs = 0
        for place, prompt in enumerate(prompts):
            own = prompt.num_labels, prompt.num_labels * prompt.num_words
            labels, pairs = labels + own[0], pairs + own[1]
            if part and (labels > most[0] or pairs > most[1]):
                yield part
                part = []
                labels, pairs = own
            part.append(place)
        yield part


class LabelledSpans(SpansInParts):
    """Texts with labels as a whole; labels that are not known run first."""

    def __init__(
        self,
        device: ProgramRunner,
        labels: ProgramRunner,
        *,
        inputs: Sequence[Value],
        most_tokens: int,
        **settings: Any,
    ) -> None:
        """Use the programs of texts and of labels.

        Args:
            inputs: inputs of the program of texts.
            most_tokens: tokens of the largest batch of several labels.
        """
        device.input_names = [
            name for name in device.input_names if not name.startswith(LABEL_PART)
        ]
        super().__init__(device, **settings)
        self._labels, self._most_tokens = OneShot(labels), most_tokens
        parts = [each for each in inputs if each.name.startswith(LABEL_PART)]
        sizes = [each.at({"labels": 0})[1] for each in parts]
        # columns of each input in a result
        self._columns: Mapping[str, slice] = {
            each.name: slice(*bounds)
            for each, bounds in zip(parts, pairwise(accumulate(sizes, initial=0)), strict=True)
        }
        self._size = sum(sizes)
        self._most_kept = KEPT_BYTES // (self._size * np.dtype(np.float32).itemsize)
        # by the label's tokens, the one used longest ago first
        self._kept: OrderedDict[bytes, Float32Array] = OrderedDict()

    def _inputs(
        self, packed: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> tuple[Arrays, Dims]:
        arrays, dims = super()._inputs(packed, options)
        payloads = [prompt.payload for prompt in packed]
        rows = self._results(
            [label for each in payloads if isinstance(each, ApartLabels) for label in each.labels]
        )
        of_labels = {
            name: np.ascontiguousarray(rows[:, columns]) for name, columns in self._columns.items()
        }
        return {**arrays, **of_labels}, dims

    def _results(self, labels: Sequence[Int32Array]) -> Float32Array:
        """Return the result for each label, `[labels, size]`."""
        keys = [label.tobytes() for label in labels]
        found: dict[bytes, Float32Array] = {}
        new: dict[bytes, Int32Array] = {}
        for key, label in zip(keys, labels, strict=True):
            kept = self._kept.get(key)
            if kept is None:
                new[key] = label
            else:
                found[key] = kept
                self._kept.move_to_end(key)
        for batch in _batches(sorted(new, key=len), self._most_tokens):
            prompts = [Prompt(new[key]) for key in batch]
            for key, row in zip(
                batch, self._labels.run(prompts, [DEFAULT_OPTIONS] * len(batch)), strict=True
            ):
                # not a view of the whole batch
                found[key] = self._kept[key] = row.copy()
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
        rows = np.empty((len(keys), self._size), np.float32)
        for row, key in zip(rows, keys, strict=True):
            row[:] = found[key]
        return rows


def _batches(keys: Sequence[bytes], most_tokens: int) -> Iterator[Sequence[bytes]]:
    """Yield labels that run together, by their tokens; one of them may be longer."""
    batch: list[bytes] = []
    tokens = 0
    for key in keys:
        count = len(key) // np.dtype(np.int32).itemsize
        tokens += count
        if batch and tokens > most_tokens:
            yield batch
            batch, tokens = [], count
        batch.append(key)
    if batch:
        yield batch
