"""Runs batches on a CPU: shared out over lanes of one core each, or by all cores together."""

import os
from collections.abc import Callable, Sequence

import torch

from varlen.execution.packing import fill_inputs, input_bytes, input_views, split_answers
from varlen.execution.split import share_out
from varlen.execution.workers import Lanes
from varlen.memory.arena import Arena, Region, Shape
from varlen.program.program import Batch, Program
from varlen.request import Float32Array, Prompt, RequestOptions

# oneDNN keeps what it compiled for each shape of GELU, and of bf16 products: 1,024 unless told otherwise, of 32 and
# 556 KiB. Shapes hardly repeat where lengths are random, so a few are as good; a core needs five at a time.
_KEPT_PRIMITIVES_PER_CORE = 16
_LEAST_KEPT_PRIMITIVES = 64


class CpuExecutor:
    """Runs a program on the cores that torch may use."""

    def __init__(self, program: Program, kernels: object, arena: Arena, hidden_size: int) -> None:
        self._program = program
        self._kernels = kernels
        self._arena = arena
        self._hidden_size = hidden_size
        self._cores = torch.get_num_threads()
        kept = max(_LEAST_KEPT_PRIMITIVES, _KEPT_PRIMITIVES_PER_CORE * self._cores)
        # read when torch first asks oneDNN for anything
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(kept))
        self._lanes = Lanes(self._cores if self._cores > 1 else 0)

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the answer of each sequence; see `Runner.run`."""
        lengths = [prompt.num_tokens for prompt in prompts]
        shares, regions = self._share_out(lengths)

        def task(share: list[int], region: Region) -> Callable[[], list[Float32Array]]:
            chosen = [prompts[i] for i in share], [options[i] for i in share]
            return lambda: self._run_share(*chosen, region)

        if len(shares) == 1:
            answers = [task(shares[0], regions[0])()]
        else:
            answers = self._lanes.run(list(map(task, shares, regions)))
        placed = {
            index: row
            for share, rows in zip(shares, answers, strict=True)
            for index, row in zip(share, rows, strict=True)
        }
        return [placed[index] for index in range(len(prompts))]

    def close(self) -> None:
        """Stop the threads."""
        self._lanes.close()

    def _share_out(self, lengths: list[int]) -> tuple[list[list[int]], list[Region]]:
        """Return the sequences of each share, by length, and where it runs."""
        shares = share_out(lengths, self._cores, self._hidden_size)
        regions = self._arena.carve([_shape(share, lengths) for share in shares])
        if regions is None:
            shares = [list(range(len(lengths)))]
            regions = [self._arena.carve_whole(*_shape(shares[0], lengths))]
        # neighbours of one length share an attention call
        return [sorted(share, key=lengths.__getitem__) for share in shares], regions

    @torch.inference_mode()
    def _run_share(
        self,
        prompts: Sequence[Prompt],
        options: Sequence[RequestOptions],
        region: Region,
    ) -> list[Float32Array]:
        lengths = [prompt.num_tokens for prompt in prompts]
        tokens, count = sum(lengths), len(lengths)
        buffer = torch.empty(input_bytes(tokens, count), dtype=torch.uint8)
        inputs = input_views(buffer, tokens, count)
        fill_inputs(inputs, prompts, options)
        output = self._program.run(Batch(inputs, tokens, count), self._kernels, region)
        return split_answers(output.numpy(), lengths, per_token=self._program.is_per_token)


def _shape(share: list[int], lengths: list[int]) -> Shape:
    return sum(lengths[i] for i in share), len(share)
