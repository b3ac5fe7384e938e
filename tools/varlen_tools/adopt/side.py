"""How each side runs: dtype, threads, instances, and the tokens of the texts."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from varlen.config import DType, EngineConfig
from varlen.execution.device import choose_device, choose_dtype, usable_cores
from varlen_tools.adopt.view import ONNX_BACKEND, is_onnx_model
from varlen_tools.doctor.comparison import short_dtype

# The setting of the ONNX and of the PyTorch backend, in any case.
_THREADS = "intra_op_thread_count"
# The part of onnx.proto that names the dtype of each weight; the package onnx may be absent.
_ONNX = """
name: "onnx_weights.proto" package: "onnx_weights"
message_type { name: "Model"
  field { name: "graph" number: 7 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Graph" } }
message_type { name: "Graph"
  field { name: "initializer" number: 5 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Tensor" } }
message_type { name: "Tensor"
  field { name: "dims" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
  field { name: "data_type" number: 2 label: LABEL_OPTIONAL type: TYPE_INT32 } }
"""
_ONNX_DTYPES: Mapping[int, DType] = {
    1: "fp32",
    2: "int8",
    3: "int8",
    10: "fp16",
    16: "bf16",
    21: "int4",
    22: "int4",
}


@dataclass(frozen=True, slots=True)
class ModelSide:
    """How one model of the server runs.

    Attributes:
        dtype: dtype of its weights; None if only its own code knows.
        threads: its threads for one batch; None if only its own code knows.
        lengths: tokens that each text has in it; empty for another step of an ensemble, or if only its own code knows.
    """

    name: str
    backend: str
    dtype: DType | None
    threads: int | None
    instances: int
    lengths: Sequence[int] = ()


def existing_side(folder: Path, config: Mapping[str, Any], lengths: Sequence[int]) -> ModelSide:
    """Return how a model that exists runs.

    Args:
        config: its configuration as JSON, completed by the server.
        lengths: tokens that each text has in it.
    """
    # config names the python backend if Python's onnxruntime runs it
    is_onnx = is_onnx_model(folder)
    parameters = {
        key.lower(): value["string_value"] for key, value in config.get("parameters", {}).items()
    }
    # onnxruntime takes all cores if 0, whatever the limit of a container
    threads = int(parameters.get(_THREADS, 0)) or (
        len(os.sched_getaffinity(0)) if is_onnx else None
    )
    groups = config.get("instance_group", ())
    return ModelSide(
        folder.name,
        ONNX_BACKEND if is_onnx else config.get("backend", ""),
        _onnx_dtype(folder) if is_onnx else None,
        threads,
        sum(int(group.get("count", 1)) for group in groups),
        lengths,
    )


def our_side(name: str, config: EngineConfig, lengths: Sequence[int]) -> ModelSide:
    """Return how a varlen model runs."""
    threads = config.threads or usable_cores()
    return ModelSide(name, "varlen", our_dtype(config), threads, 1, lengths)


def our_dtype(config: EngineConfig) -> DType:
    """Return the dtype in which a model runs on this machine."""
    if config.dtype != "auto":
        return config.dtype
    return short_dtype(str(choose_dtype("auto", choose_device(config.device))).split(".")[-1])


def _onnx_dtype(model: Path) -> DType | None:
    """Return the dtype of most weights of an ONNX model, if it has weights."""
    files = sorted(model.glob("[0-9]*/*.onnx"))
    return weights_dtype(files[-1].read_bytes()) if files else None


def weights_dtype(file: bytes) -> DType | None:
    """Return the dtype of most weights of an ONNX file; None if it has none."""
    pool = DescriptorPool()
    pool.Add(text_format.Parse(_ONNX, FileDescriptorProto()))
    model = GetMessageClass(pool.FindMessageTypeByName("onnx_weights.Model")).FromString(file)
    counts: Counter[DType] = Counter()
    for tensor in model.graph.initializer:
        # other types are of shapes and indices
        if dtype := _ONNX_DTYPES.get(tensor.data_type):
            counts[dtype] += math.prod(tensor.dims)
    return counts.most_common(1)[0][0] if counts else None
