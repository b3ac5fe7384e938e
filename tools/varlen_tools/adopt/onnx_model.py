"""Runs an ONNX file where the server has no ONNX backend.

`varlen adopt` copies this file into a model repository as model.py; only the server imports it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

_TYPES = {
    "tensor(int64)": "TYPE_INT64",
    "tensor(int32)": "TYPE_INT32",
    "tensor(float)": "TYPE_FP32",
    "tensor(float16)": "TYPE_FP16",
}


def _session(parameters: Mapping[str, Mapping[str, str]]) -> Any:
    given = {key: value["string_value"] for key, value in parameters.items()}
    options = onnxruntime.SessionOptions()
    # 0 is the default of onnxruntime, as in the ONNX backend
    options.intra_op_num_threads = int(given.get("intra_op_thread_count", 0))
    options.inter_op_num_threads = int(given.get("inter_op_thread_count", 0))
    file = str(Path(pb_utils.get_model_dir(), given["file"]))
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


class TritonPythonModel:
    """The class that the server creates."""

    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Add the inputs and outputs that config.pbtxt leaves to the ONNX file."""
        given = config.as_dict()
        session = _session(given["parameters"])
        skipped = 1 if given["max_batch_size"] else 0
        for add, nodes, names in (
            (config.add_input, session.get_inputs(), given["input"]),
            (config.add_output, session.get_outputs(), given["output"]),
        ):
            if not names:
                for node in nodes:
                    dims = [each if isinstance(each, int) else -1 for each in node.shape[skipped:]]
                    add({"name": node.name, "data_type": _TYPES[node.type], "dims": dims})
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the ONNX file."""
        config = json.loads(args["model_config"])
        self._session = _session(config["parameters"])
        self._outputs = [each["name"] for each in config["output"]]

    def execute(
        self, requests: list[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        """Run requests that the dynamic batcher has joined, in one batch if shapes are equal."""
        feeds = [{each.name(): each.as_numpy() for each in one.inputs()} for one in requests]
        shapes = {tuple(array.shape[1:] for array in feed.values()) for feed in feeds}
        if len(shapes) > 1:
            return [self._response(self._session.run(self._outputs, feed)) for feed in feeds]
        joined = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
        ends = np.cumsum([len(next(iter(feed.values()))) for feed in feeds])[:-1]
        results = [np.split(each, ends) for each in self._session.run(self._outputs, joined)]
        return [self._response(parts) for parts in zip(*results, strict=True)]

    def _response(self, arrays: Any) -> pb_utils.InferenceResponse:
        tensors = zip(self._outputs, arrays, strict=True)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, part) for name, part in tensors])
