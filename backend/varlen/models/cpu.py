"""Runs batches on a CPU: shared out over lanes of one core each, or by all cores together."""

from collections.abc import Callable
from collections.abc import Sequence as AnySequence

import torch

from varlen.memory.workspace import Workspace
from varlen.models.batch import fill_inputs, input_bytes, input_views, split_answers
from varlen.models.lanes import Lanes
from varlen.models.program import Batch, Program
from varlen.models.shares import share_out
from varlen.request import Float32Array, Sequence


class CpuExecutor:
    """Runs a program on the cores that torch may use."""

    def __init__(self, program: Program, kernels: object, hidden_size: int) -> None:
        self._program = program
        self._kernels = kernels
        self._hidden_size = hidden_size
        self._cores = torch.get_num_threads()
        self._lanes = Lanes(self._cores if self._cores > 1 else 0)
        # one per lane, and the last for a batch that all cores run together
        self.workspaces = [Workspace(program.usages()) for _ in range(self._cores + 1)]

    def run(
        self, sequences: AnySequence[Sequence], normalize: AnySequence[bool]
    ) -> list[Float32Array]:
        """Return the answer of each sequence; see `Runner.run`."""
        lengths = [sequence.num_tokens for sequence in sequences]
        shares = [
            # by length, since neighbours of one length share an attention call
            sorted(share, key=lengths.__getitem__)
            for share in share_out(lengths, self._cores, self._hidden_size)
        ]

        def task(share: list[int], workspace: Workspace) -> Callable[[], list[Float32Array]]:
            chosen = [sequences[i] for i in share], [normalize[i] for i in share]
            return lambda: self._run_share(*chosen, workspace)

        if len(shares) == 1:
            answers = [task(shares[0], self.workspaces[-1])()]
        else:
            answers = self._lanes.run(list(map(task, shares, self.workspaces)))
        placed = {
            index: row
            for share, rows in zip(shares, answers, strict=True)
            for index, row in zip(share, rows, strict=True)
        }
        return [placed[index] for index in range(len(sequences))]

    def close(self) -> None:
        """Stop the threads."""
        self._lanes.close()

    @torch.inference_mode()
    def _run_share(
        self,
        sequences: AnySequence[Sequence],
        normalize: AnySequence[bool],
        workspace: Workspace,
    ) -> list[Float32Array]:
        lengths = [sequence.num_tokens for sequence in sequences]
        tokens, count = sum(lengths), len(lengths)
        buffer = torch.empty(input_bytes(tokens, count), dtype=torch.uint8)
        inputs = input_views(buffer, tokens, count)
        fill_inputs(inputs, sequences, normalize)
        output = self._program.run(Batch(inputs, tokens, count), self._kernels, workspace)
        return split_answers(output.numpy(), lengths, per_token=self._program.is_per_token)
