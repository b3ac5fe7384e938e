"""A loaded model: sequences in, one fp32 array per sequence out."""

from collections.abc import Callable
from collections.abc import Sequence as AnySequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.config import DType, EngineConfig, Task
from varlen.errors import ConfigError
from varlen.memory.workspace import Workspace
from varlen.models.checkpoint import Checkpoint
from varlen.models.encoder import EncoderInputs, encode
from varlen.models.families import load_encoder
from varlen.models.heads import PER_TOKEN_TASKS, apply_head
from varlen.models.lanes import Lanes
from varlen.models.program import Batch, Program, Recorder
from varlen.models.shares import share_out
from varlen.request import Float32Array, Int32Array, Sequence
from varlen_kernels import reference


class Runner:
    """Runs batches of one model on one device. Not for two threads at once.

    Attributes:
        task: what it answers.
        dtype: of its weights and activations.
        vocab_size, type_vocab_size: ids below these are valid.
        max_sequence_tokens: the longest sequence it takes.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        """Load the weights and record the forward pass.

        Raises:
            CheckpointError: the checkpoint is incomplete, or lacks the head of the task.
            ConfigError: a limit does not fit the checkpoint.
        """
        self.task: Task = config.task or checkpoint.task
        checkpoint.check_task(self.task)
        self.max_sequence_tokens = sequence_limit(checkpoint, config)
        self.dtype = choose_dtype(config.dtype)
        weights = load_encoder(checkpoint, self.dtype)
        self.vocab_size = weights.token_table.shape[0]
        self.type_vocab_size = weights.type_table.shape[0]
        recorder, inputs = Recorder(), EncoderInputs()
        hidden = encode(recorder, weights, inputs)
        output = apply_head(recorder, self.task, weights, inputs, hidden, checkpoint.pooling)
        self.program: Program = recorder.finish(output)
        self._hidden_size = checkpoint.hidden_size
        self._cores = torch.get_num_threads()
        self._lanes = Lanes(self._cores if self._cores > 1 else 0)
        # one per lane, and the last for a batch that all cores run together
        self._workspaces = [Workspace(self.program.usages()) for _ in range(self._cores + 1)]

    def run(
        self,
        sequences: AnySequence[Sequence],
        normalize: AnySequence[bool],
        *,
        kernels: object = reference,
    ) -> list[Float32Array]:
        """Return the answer of each sequence, in the order given.

        Args:
            sequences: checked, at least one.
            normalize: per sequence, whether an embedding is divided by its length.
            kernels: has the functions that the program's ops name.

        Returns:
            Per sequence: embed `[hidden]`, classify and rerank `[labels]`, hidden `[tokens, hidden]`,
            token_classify `[tokens, labels]`. Views of arrays made for this call.
        """
        lengths = [sequence.num_tokens for sequence in sequences]
        shares = [
            # by length, since neighbours of one length share an attention call
            sorted(share, key=lengths.__getitem__)
            for share in share_out(lengths, self._cores, self._hidden_size)
        ]

        def task(share: list[int], workspace: Workspace) -> Callable[[], list[Float32Array]]:
            chosen = [sequences[i] for i in share], [normalize[i] for i in share]
            return lambda: self._run_share(*chosen, kernels, workspace)

        if len(shares) == 1:
            answers = [task(shares[0], self._workspaces[-1])()]
        else:
            answers = self._lanes.run(list(map(task, shares, self._workspaces)))
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
        kernels: object,
        workspace: Workspace,
    ) -> list[Float32Array]:
        batch, bounds = _pack(sequences, np.array(normalize, dtype=np.bool_))
        output: Float32Array = self.program.run(batch, kernels, workspace).numpy()
        if self.task not in PER_TOKEN_TASKS:
            return list(output)
        return [output[begin:end] for begin, end in pairwise(bounds.tolist())]


def sequence_limit(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Return the longest sequence that is served, in tokens.

    Raises:
        ConfigError: the configured one is longer than the checkpoint or a batch can hold.
    """
    limit = config.max_sequence_tokens or checkpoint.max_sequence_tokens
    if limit > checkpoint.position_limit:
        raise ConfigError(
            f"max_sequence_tokens is {limit}; this checkpoint has position embeddings for {checkpoint.position_limit}"
        )
    for name in ("max_batch_tokens", "max_queued_tokens"):
        if limit > getattr(config, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)}; it must hold the longest sequence, {limit} tokens"
            )
    return limit


def choose_dtype(name: DType) -> torch.dtype:
    """Return the torch dtype of a configured one; `auto` is bf16 where the CPU multiplies it natively, else fp32."""
    if name == "auto":
        capabilities = torch.cpu.get_capabilities()
        native = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16 if name == "bf16" else torch.float32


def _pack(
    sequences: AnySequence[Sequence], normalize: npt.NDArray[np.bool_]
) -> tuple[Batch, Int32Array]:
    """Return the batch of these sequences, one after the other, and where each begins, `[batch + 1]`."""
    lengths = [sequence.num_tokens for sequence in sequences]
    bounds = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=bounds[1:])
    tokens = int(bounds[-1])
    positions = np.arange(tokens, dtype=np.int32) - np.repeat(bounds[:-1], lengths)
    type_ids = np.zeros(tokens, dtype=np.int32)
    for begin, sequence in zip(bounds.tolist(), sequences, strict=False):
        if sequence.type_ids is not None:
            type_ids[begin : begin + sequence.num_tokens] = sequence.type_ids
    inputs: dict[str, Tensor | int] = {
        "token_ids": torch.from_numpy(np.concatenate([s.token_ids for s in sequences])),
        "position_ids": torch.from_numpy(positions),
        "type_ids": torch.from_numpy(type_ids),
        "cu_seqlens": torch.from_numpy(bounds),
        "max_seqlen": max(lengths),
        "normalize": torch.from_numpy(normalize),
    }
    return Batch(inputs, tokens=tokens, sequences=len(lengths)), bounds
