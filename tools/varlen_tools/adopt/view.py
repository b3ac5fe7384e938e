"""How models of a repository run, and a view: links, and stand-ins of ONNX models.

The stand-ins run where the server has no ONNX backend.
"""

import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from varlen.config import DType, EngineConfig
from varlen.execution.device import choose_device, choose_dtype, usable_cores
from varlen_tools.adopt.wish import AdoptError
from varlen_tools.doctor.comparison import short_dtype
from varlen_tools.make_tokenizer import read_message
from varlen_tools.model_source import read_model_config

ONNX_BACKEND = "onnxruntime"
_ONNX_FILE = "model.onnx"
# Parameters of the ONNX backend that the stand-in has too.
_KEPT = ("intra_op_thread_count", "inter_op_thread_count")
_STAND_IN = Path(__file__).with_name("onnx_model.py")


def write_view(repository: Path, view: Path, backends: Path) -> list[str]:
    """Link models into a folder, and return those that Python's onnxruntime runs.

    Args:
        repository: the model repository, which is not changed.
        view: an empty folder.

    Raises:
        AdoptError: a model needs onnxruntime, and it is not installed; or no model is there.
        CheckpointError: a config.pbtxt cannot be read.
    """
    replaced = []
    models = [entry for entry in sorted(repository.iterdir()) if entry.is_dir()]
    for model in models:
        config = _config(model)
        if not is_onnx_model(model) or (backends / ONNX_BACKEND).is_dir():
            (view / model.name).symlink_to(model.resolve())
            continue
        if find_spec("onnxruntime") is None:
            raise AdoptError(
                f"{model.name} is an ONNX model, and this server has no ONNX backend; put a tritonserver that has it on"
                " PATH, or pip install onnxruntime"
            )
        _write_stand_in(model, view / model.name, config)
        replaced.append(model.name)
    if not models:
        raise AdoptError(f"{repository} has no models: folders with numbered versions")
    return replaced


def with_parts(view: Path, models: Sequence[str]) -> list[str]:
    """Return models, and the parts of ensembles among them."""
    found = list(dict.fromkeys(models))
    for model in found:
        steps = _config(view / model).ensemble_scheduling.step
        parts = dict.fromkeys(step.model_name for step in steps)
        found += [part for part in parts if part not in found]
    return found


def is_onnx_model(model: Path) -> bool:
    """Return whether a model is an ONNX file, by its config.pbtxt or its files."""
    config = _config(model)
    if config.backend or config.platform:
        return bool(config.backend == ONNX_BACKEND or config.platform.startswith(ONNX_BACKEND))
    return any(model.glob(f"[0-9]*/{_ONNX_FILE}"))


def _config(model: Path) -> model_config_pb2.ModelConfig:
    has_config = (model / "config.pbtxt").is_file()
    return read_model_config(model) if has_config else model_config_pb2.ModelConfig()


def _write_stand_in(model: Path, target: Path, config: model_config_pb2.ModelConfig) -> None:
    file = config.default_model_filename or _ONNX_FILE
    changed = model_config_pb2.ModelConfig()
    changed.CopyFrom(config)
    changed.backend, changed.platform, changed.default_model_filename = "python", "", ""
    for key in [key for key in changed.parameters if key not in _KEPT]:
        del changed.parameters[key]
    changed.ClearField("optimization")
    changed.parameters["file"].string_value = file
    target.mkdir()
    (target / "config.pbtxt").write_text(text_format.MessageToString(changed), encoding="utf-8")
    for version in (each for each in model.iterdir() if each.name.isdecimal()):
        (target / version.name).mkdir()
        # with the files of external weights
        for entry in version.iterdir():
            (target / version.name / entry.name).symlink_to(entry.resolve())
        shutil.copyfile(_STAND_IN, target / version.name / "model.py")


# The setting of the ONNX and of the PyTorch backend, in any case.
_THREADS = "intra_op_thread_count"
# The part of onnx.proto that names the dtype of each weight; the package onnx may be absent.
_ONNX = """
name: "weights.proto"
message_type { name: "Model"
  field { name: "graph" number: 7 type: TYPE_MESSAGE type_name: "Graph" } }
message_type { name: "Graph"
  field { name: "initializer" number: 5 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Tensor" } }
message_type { name: "Tensor"
  field { name: "dims" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
  field { name: "data_type" number: 2 type: TYPE_INT32 } }
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
    files = sorted(model.glob("[0-9]*/*.onnx"))
    return weights_dtype(files[-1].read_bytes()) if files else None


def weights_dtype(file: bytes) -> DType | None:
    """Return the dtype of most weights of an ONNX file; None if it has none."""
    model = read_message(_ONNX, "Model", file)
    counts: Counter[DType] = Counter()
    for tensor in model.graph.initializer:
        # other types are of shapes and indices
        if dtype := _ONNX_DTYPES.get(tensor.data_type):
            counts[dtype] += math.prod(tensor.dims)
    return counts.most_common(1)[0][0] if counts else None
