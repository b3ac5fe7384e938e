"""Whole sequences on a device: prompts to inputs of a program, its output to answers.

Nothing here imports torch: a worker of compiled ops has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from varlen.execution.packing import (
    Arrays,
    bounds_of,
    dims_of,
    payload_dims,
    prompt_arrays,
    split_answers,
)
from varlen.memory.planner import Dims
from varlen.program.adapters import is_of_adapters
from varlen.request.request import DEFAULT_OPTIONS, Float32Array, Prompt, RequestOptions, Vectors
from varlen.request.vectors import terms_in_order
from varlen.scheduling.batch import Batch
from varlen.tasks import Task

if TYPE_CHECKING:
    from varlen.execution.adapters import ResidentAdapters
    from varlen.execution.rank_link import RankLink


class ProgramRunner(Protocol):
    """Runs batches of whole sequences on one device.

    Attributes:
        row_dimension: see `Program.row_dimension`.
        longest_first: whether the longest sequence comes first in a batch.
        runs_at_launch: whether a batch has run when `launch` returns.
    """

    input_names: list[str]
    longest_first: bool
    runs_at_launch: bool

    @property
    def row_dimension(self) -> str: ...

    def launch(self, arrays: Arrays, dims: Dims) -> Callable[[], npt.ArrayLike | None]:
        """Start a batch; return a function that waits for the output on the host.

        It is called once. There is no output if it goes to the next stage.

        Raises:
            MemoryError: there is too little memory; the function raises it too.
        """

    def close(self) -> None:
        """Release device memory."""


class OneShot:
    """Sequences that run as a whole, each with one answer.

    Attributes:
        task, unweighted: arguments of the constructor.
    """

    def __init__(
        self,
        device: ProgramRunner,
        task: Task = "hidden",
        unweighted: Sequence[int] | None = None,
        *,
        is_padded: bool = False,
        link: RankLink[Any] | None = None,
        adapters: ResidentAdapters | None = None,
        number: int = 0,
    ) -> None:
        """Use a program.

        Args:
            unweighted: tokens that are no terms, if it is like bge-m3.
            is_padded: whether the program pads sequences to the longest of their batch.
        """
        self.device, self.adapters, self._number = device, adapters, number
        self.task, self.unweighted, self._is_padded, self._link = task, unweighted, is_padded, link
        self._rows = device.row_dimension
        # of adapters the arrays come from them
        self._of_prompts = [name for name in device.input_names if not is_of_adapters(name)]
        self._reads_payloads = not {"mask_rows", "word_rows"}.isdisjoint(device.input_names)
        self._pools_spans = "pooled_rows" in device.input_names

    def launch(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> Callable[[], list[Float32Array]]:
        """Start a batch; return a function that waits for the answer of each sequence.

        On a CPU the batch has run. The function must be called once. See `Runner.run` for the answers.
        """
        if self._link is None:
            return self._launch(prompts, options)
        with self._link.running((prompts, options)):
            answers = self._launch(prompts, options)
            if self.device.runs_at_launch:
                return answers
            # ranks with GPUs fail together
            found = answers()
            return lambda: found

    def launch_batch(self, batch: Batch) -> Callable[[], list[Float32Array]]:
        return self.launch(batch.prompts, batch.options)

    def _launch(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> Callable[[], list[Float32Array]]:
        if self.adapters is not None:
            parts = self.adapters.parts(options)
            if len(parts) > 1:
                return self._launch_parts(prompts, options, parts)
        count = len(prompts)
        lengths = [prompt.num_tokens for prompt in prompts]
        if self._is_padded:
            # each sequence, then its padding
            prompts = [*prompts, *_padding(lengths)]
            options = [*options, *[DEFAULT_OPTIONS] * count]
            order = [place for i in range(count) for place in (i, count + i)]
        else:
            longest_first = self.device.longest_first
            order = sorted(range(count), key=lengths.__getitem__, reverse=longest_first)
        packed = [prompts[i] for i in order]
        wait = self._start(packed, [options[i] for i in order])

        def answers() -> list[Float32Array]:
            found = wait()
            if found is None:
                return []
            by_place = dict(zip(order, found, strict=False))
            return [by_place[place] for place in range(count)]

        return answers

    def _start(
        self, packed: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> Callable[[], list[Float32Array] | None]:
        """Start a batch in this order; return a function that waits for its answers.

        There are none if they go to the next stage.
        """
        arrays, dims = self._inputs(packed, options)
        wait = self.device.launch(arrays, dims)

        def answers() -> list[Float32Array] | None:
            output = wait()
            return None if output is None else self._finished(packed, np.asarray(output))

        return answers

    def _inputs(
        self, packed: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> tuple[Arrays, Dims]:
        payloads = payload_dims(packed) if self._reads_payloads else {}
        lengths = [prompt.num_tokens for prompt in packed]
        arrays = prompt_arrays(self._of_prompts, packed, options)
        if self._pools_spans:
            payloads = {
                "pooled": len(arrays["normalize"]),
                "pooled_tokens": len(arrays["pooled_rows"]),
            }
        if self._is_padded:
            payloads = {**payloads, "scores": sum(lengths) * (lengths[0] + lengths[1])}
        if self.adapters is None:
            return arrays, dims_of(lengths, **payloads)
        numbers = [self.adapters.number(each.adapter) for each in options]
        more, adapted = self.adapters.arrays(numbers, lengths, arrays, self._number)
        return {**arrays, **more}, dims_of(lengths, **payloads, **adapted)

    def _launch_parts(
        self,
        prompts: Sequence[Prompt],
        options: Sequence[RequestOptions],
        parts: Sequence[Sequence[int]],
    ) -> Callable[[], list[Float32Array]]:
        """Run a batch in parts: memory does not hold all of it."""
        found: dict[int, Float32Array] = {}
        for places in parts:
            wait = self._launch([prompts[i] for i in places], [options[i] for i in places])
            # none if they go to the next stage
            found |= zip(places, wait(), strict=False)
        return lambda: [found[place] for place in sorted(found)]

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        return self.launch(prompts, options)()

    def close(self) -> None:
        self.device.close()

    def _finished(self, prompts: Sequence[Prompt], output: Float32Array) -> list[Float32Array]:
        if self.task == "sparse_embed" and self.unweighted is not None and self._rows == "tokens":
            return weighted_terms(prompts, output, self.unweighted)
        answers = split_answers(output, prompts, self._rows)
        if self.task == "sparse_embed":
            return [active_terms(weights) for weights in answers]
        if self.task == "token_embed" and self.unweighted is not None:
            # the first token has no vector
            return [vectors[1:] for vectors in answers]
        if self.task == "token_embed":
            return [_kept_vectors(*each) for each in zip(prompts, answers, strict=False)]
        return answers


def weighted_terms(
    prompts: Sequence[Prompt], weights: Float32Array, unweighted: Sequence[int]
) -> list[Float32Array]:
    """Return the terms of each sequence with the largest weight of their tokens.

    All sequences of a batch are sorted at once: the calls for each one took longer than a head.

    Args:
        prompts: sequences in the order of the batch.
        weights: `[tokens, 1]`, of each token; none is negative. Rows behind are of no sequence.

    Returns:
        `[terms, 2]` fp32 of each sequence, as by `terms_in_order`. Terms of weight 0 are left out.
    """
    bounds = bounds_of([prompt.num_tokens for prompt in prompts])
    ids = np.concatenate([prompt.token_ids for prompt in prompts])
    rows = np.repeat(np.arange(len(prompts)), np.diff(bounds))
    kept = np.flatnonzero((weights[: len(ids), 0] > 0) & ~np.isin(ids, unweighted))
    ids, rows, largest = ids[kept], rows[kept], weights[kept, 0]
    # by sequence; the largest weight first, and of equal weights the lower number
    order = np.lexsort((ids, -largest, rows))
    # of a term's tokens the first has the largest weight
    _, firsts = np.unique((rows[order] << 32) + ids[order], return_index=True)
    order = order[np.sort(firsts)]
    terms = np.stack((ids[order], largest[order]), axis=1, dtype=np.float32, casting="unsafe")
    ends = np.searchsorted(rows[order], np.arange(len(prompts) + 1))
    return [terms[begin:end] for begin, end in pairwise(ends.tolist())]


def active_terms(weights: Float32Array) -> Float32Array:
    """Return the terms of a sequence whose weight is not 0, the largest weight first.

    Args:
        weights: `[vocabulary]`, of each term; none is negative.

    Returns:
        `[terms, 2]` fp32, see `terms_in_order`.
    """
    # numpy finds what is true ten times as fast as what is not 0
    terms = np.flatnonzero(weights != 0)
    return terms_in_order(terms, weights[terms])


def _kept_vectors(prompt: Prompt, vectors: Float32Array) -> Float32Array:
    places = prompt.payload_tokens(Vectors)
    return vectors if places is None else vectors[places]


def _padding(lengths: Sequence[int]) -> list[Prompt]:
    longest = max(lengths)
    return [Prompt(np.zeros(longest - length, dtype=np.int32)) for length in lengths]
