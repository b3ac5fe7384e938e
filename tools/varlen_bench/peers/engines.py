"""Six engines behind one function: a batch of token ids in, normalized vectors out.

A process imports only the libraries of its engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen_bench.harness.accuracy import Vectors
from varlen_bench.peers.checkpoints import load_encoder
from varlen_bench.peers.pooling import PoolingMode, pool_padded, pool_rows

if TYPE_CHECKING:
    from varlen import Encoder

EngineName = Literal[
    "varlen",
    "transformers",
    "zentorch",
    "onnxruntime",
    "ctranslate2",
    "openvino",
    "openvino-genai",
    "onnxruntime-genai",
    "vllm",
    "llamacpp",
]
# int8-blocks: 8-bit weights with a scale for each block of them, and int8 products.
Precision = Literal["fp32", "bf16", "int8", "int8-blocks", "int4"]
# Longest measurement of our costs and linear layers.
_WARMUP_SECONDS = 10
# Longest sequence of the workloads, in tokens.
_LONGEST = 512
_ROOT = Path(__file__).parents[3]
# The benchmark's make target makes each from the requirements of this name, beside this file.
_ENVIRONMENTS: dict[EngineName, str] = {
    "openvino-genai": "openvino",
    "onnxruntime-genai": "onnxruntime",
    "vllm": "vllm",
    "llamacpp": "llamacpp",
    "zentorch": "zentorch",
}
# Embeds one batch: token ids in, [sequences, hidden] out. Called by as many threads as there are instances.
Embed: TypeAlias = Callable[[list[list[int]]], Vectors]


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of an engine: batches at the same time, and the threads of each."""

    instances: int
    threads: int

    @property
    def total(self) -> int:
        """Threads of all instances."""
        return self.instances * self.threads


def load(
    engine: EngineName,
    checkpoint: Path,
    precision: Precision,
    *,
    cores: Cores,
    pooling: PoolingMode = "mean",
) -> Embed:
    """Return a function that embeds one batch; `checkpoint` is from `exports.exported`."""
    loaders = {
        "varlen": _varlen,
        "transformers": _transformers,
        "zentorch": _zentorch,
        "onnxruntime": _onnxruntime,
        "ctranslate2": _ctranslate2,
        "openvino": _openvino,
    }
    return loaders[engine](checkpoint, precision, cores, pooling)


def ctranslate2_options(precision: Precision, cores: Cores) -> dict[str, Any]:
    """Return the arguments of CTranslate2's engines on a CPU."""
    return {
        "device": "cpu",
        "compute_type": "int8" if precision == "int8" else "float32",
        "inter_threads": cores.instances,
        "intra_threads": cores.threads,
    }


def pad(batch: list[list[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ids padded with 0 and the mask of real tokens, each [sequences, longest]."""
    ids = np.zeros((len(batch), max(map(len, batch))), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, sequence in enumerate(batch):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return ids, mask


def varlen_encoder(
    checkpoint: Path, precision: Precision, cores: Cores, *, outputs: str = "none"
) -> Encoder:
    """Return varlen's encoder of vectors, perhaps with further outputs."""
    from varlen import Encoder
    from varlen.models.checkpoint_folder import Checkpoint

    assert precision != "int8-blocks"  # which is onnxruntime's
    return Encoder.from_pretrained(
        str(checkpoint),
        task="embed",
        device="cpu",
        dtype=precision,
        threads=cores.total,
        max_sequence_tokens=min(Checkpoint.open(checkpoint).position_limit, _LONGEST),
        warmup_seconds=_WARMUP_SECONDS,
        outputs=outputs,
    )


def _varlen(checkpoint: Path, precision: Precision, cores: Cores, _: PoolingMode) -> Embed:
    encoder = varlen_encoder(checkpoint, precision, cores)
    return lambda batch: encoder.embed(batch, normalize=True)


def _transformers(
    checkpoint: Path, precision: Precision, cores: Cores, pooling: PoolingMode
) -> Embed:
    return _torch_embed(_torch_encoder(checkpoint, precision), cores, pooling)


def _zentorch(checkpoint: Path, precision: Precision, cores: Cores, pooling: PoolingMode) -> Embed:
    """Return transformers' encoder, compiled by AMD's backend of torch.compile."""
    import torch
    import zentorch  # noqa: F401  # which adds the backend

    # weights become constants, which its products prepack
    torch._inductor.config.freezing = True
    encoder = torch.compile(_torch_encoder(checkpoint, precision), backend="zentorch", dynamic=True)
    return _torch_embed(encoder, cores, pooling)


def _torch_encoder(checkpoint: Path, precision: Precision) -> Any:
    import torch

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return load_encoder(checkpoint, dtype, torch.device("cpu"), "sdpa")


def _torch_embed(encoder: Any, cores: Cores, pooling: PoolingMode) -> Embed:
    import torch

    # of each thread that calls the model
    torch.set_num_threads(cores.threads)

    @torch.inference_mode()
    def embed(batch: list[list[int]]) -> Vectors:
        ids, mask = (torch.from_numpy(array) for array in pad(batch))
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        pooled = pool_padded(hidden, mask, pooling)
        vectors: Vectors = torch.nn.functional.normalize(pooled, dim=-1).numpy()
        return vectors

    return embed


def _onnxruntime(checkpoint: Path, _: Precision, cores: Cores, __: PoolingMode) -> Embed:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # with one thread, a batch runs on the thread that calls the session
    options.intra_op_num_threads = cores.threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(
        str(checkpoint / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )

    def embed(batch: list[list[int]]) -> Vectors:
        ids, mask = pad(batch)
        vectors: Vectors = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
        return vectors

    return embed


def _openvino(checkpoint: Path, precision: Precision, cores: Cores, __: PoolingMode) -> Embed:
    import openvino

    options: dict[str, Any] = {"NUM_STREAMS": cores.instances, "INFERENCE_NUM_THREADS": cores.total}
    # in int8 what is not quantized runs in bf16 where the CPU has it, which is the default
    if precision != "int8":
        options["INFERENCE_PRECISION_HINT"] = "bf16" if precision == "bf16" else "f32"
    model: Any = openvino.Core().compile_model(str(checkpoint / "model.xml"), "CPU", options)
    thread = threading.local()

    def embed(batch: list[list[int]]) -> Vectors:
        if not hasattr(thread, "request"):
            thread.request = model.create_infer_request()
        ids, mask = pad(batch)
        found = thread.request.infer({"input_ids": ids, "attention_mask": mask})
        # the request keeps its tensors and writes the next batch into them
        vectors: Vectors = next(iter(found.values())).copy()
        return vectors

    return embed


def _ctranslate2(
    checkpoint: Path, precision: Precision, cores: Cores, pooling: PoolingMode
) -> Embed:
    import ctranslate2

    encoder: Any = ctranslate2.Encoder(str(checkpoint), **ctranslate2_options(precision, cores))

    def embed(batch: list[list[int]]) -> Vectors:
        # [sequences, longest, hidden]; CTranslate2 pads the batch
        hidden = np.array(encoder.forward_batch(batch).last_hidden_state)
        lengths = [len(sequence) for sequence in batch]
        pairs = zip(hidden, lengths, strict=True)
        pooled = np.stack([pool_rows(rows[:n], pooling) for rows, n in pairs])
        vectors: Vectors = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return vectors

    return embed


def interpreter(engine: EngineName) -> Path | None:
    """Return the Python of an engine's environment; None if it runs in this one.

    Raises:
        RuntimeError: the environment does not exist.
    """
    name = _ENVIRONMENTS.get(engine)
    return None if name is None else peer_python(name)


def peer_python(name: str) -> Path:
    """Return the Python of the environment of a file of requirements beside this one.

    Raises:
        RuntimeError: the environment does not exist.
    """
    python = _ROOT / ".venv" / f"peers-{name}" / "bin/python"
    if not python.exists():
        raise RuntimeError(f"its environment is missing: make .venv/peers-{name}/stamp")
    return python
