"""Four engines behind one function: a batch of token ids in, normalized vectors out.

A process imports only the libraries of its engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen_bench.harness.accuracy import Vectors
from varlen_bench.peers.checkpoints import load_encoder
from varlen_bench.peers.pooling import PoolingMode, pool_padded, pool_rows

EngineName = Literal["varlen", "transformers", "onnxruntime", "ctranslate2"]
Precision = Literal["fp32", "bf16", "int8"]
# Longest measurement of our costs and linear layers.
_WARMUP_SECONDS = 10
# Longest sequence of the workloads, in tokens.
_LONGEST = 512
# Embeds one batch: token ids in, [sequences, hidden] out.
Embed: TypeAlias = Callable[[list[list[int]]], Vectors]


def load(
    engine: EngineName,
    checkpoint: Path,
    precision: Precision,
    *,
    threads: int,
    pooling: PoolingMode = "mean",
) -> Embed:
    """Return a function that embeds one batch; `checkpoint` is from `exports.exported`."""
    loaders = {
        "varlen": _varlen,
        "transformers": _transformers,
        "onnxruntime": _onnxruntime,
        "ctranslate2": _ctranslate2,
    }
    return loaders[engine](checkpoint, precision, threads, pooling)


def ctranslate2_options(precision: Precision, threads: int) -> dict[str, Any]:
    """Return the arguments of CTranslate2's engines for one batch at a time on a CPU."""
    return {
        "device": "cpu",
        "compute_type": "int8" if precision == "int8" else "float32",
        "inter_threads": 1,
        "intra_threads": threads,
    }


def pad(batch: list[list[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ids padded with 0 and the mask of real tokens, each [sequences, longest]."""
    ids = np.zeros((len(batch), max(map(len, batch))), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, sequence in enumerate(batch):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return ids, mask


def _varlen(checkpoint: Path, precision: Precision, threads: int, _: PoolingMode) -> Embed:
    from varlen import Encoder
    from varlen.models.checkpoint_folder import Checkpoint

    encoder = Encoder.from_pretrained(
        str(checkpoint),
        task="embed",
        device="cpu",
        dtype=precision,
        threads=threads,
        max_sequence_tokens=min(Checkpoint.open(checkpoint).position_limit, _LONGEST),
        warmup_seconds=_WARMUP_SECONDS,
    )
    return lambda batch: encoder.embed(batch, normalize=True)


def _transformers(
    checkpoint: Path, precision: Precision, threads: int, pooling: PoolingMode
) -> Embed:
    import torch

    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    encoder = load_encoder(checkpoint, dtype, torch.device("cpu"), "sdpa")

    @torch.inference_mode()
    def embed(batch: list[list[int]]) -> Vectors:
        ids, mask = (torch.from_numpy(array) for array in pad(batch))
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        pooled = pool_padded(hidden, mask, pooling)
        vectors: Vectors = torch.nn.functional.normalize(pooled, dim=-1).numpy()
        return vectors

    return embed


def _onnxruntime(checkpoint: Path, _: Precision, threads: int, __: PoolingMode) -> Embed:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(
        str(checkpoint / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )

    def embed(batch: list[list[int]]) -> Vectors:
        ids, mask = pad(batch)
        vectors: Vectors = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
        return vectors

    return embed


def _ctranslate2(
    checkpoint: Path, precision: Precision, threads: int, pooling: PoolingMode
) -> Embed:
    import ctranslate2

    encoder: Any = ctranslate2.Encoder(str(checkpoint), **ctranslate2_options(precision, threads))

    def embed(batch: list[list[int]]) -> Vectors:
        # [sequences, longest, hidden]; CTranslate2 pads the batch
        hidden = np.array(encoder.forward_batch(batch).last_hidden_state)
        lengths = [len(sequence) for sequence in batch]
        pairs = zip(hidden, lengths, strict=True)
        pooled = np.stack([pool_rows(rows[:n], pooling) for rows, n in pairs])
        vectors: Vectors = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return vectors

    return embed
