"""A view of a model repository: links, and stand-ins of ONNX models.

The stand-ins run where the server has no ONNX backend.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from varlen_tools.adopt.wish import AdoptError
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
    """Return the config.pbtxt of a model, which it may do without."""
    has_config = (model / "config.pbtxt").is_file()
    return read_model_config(model) if has_config else model_config_pb2.ModelConfig()


def _write_stand_in(model: Path, target: Path, config: model_config_pb2.ModelConfig) -> None:
    """Write the same model with Python's onnxruntime."""
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
