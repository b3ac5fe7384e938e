"""A sentence encoder behind the server's python backend: onnxruntime, padded.

Like `transformers_model.py`, with a graph that pools and normalises by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """What the server makes one of."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load model.onnx of the folder that the parameter `checkpoint` names, with `threads` threads."""
        import onnxruntime

        settings = json.loads(args["model_config"])["parameters"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(settings["threads"]["string_value"])
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        self._session = onnxruntime.InferenceSession(
            settings["checkpoint"]["string_value"] + "/model.onnx",
            options,
            providers=["CPUExecutionProvider"],
        )

    def execute(
        self, requests: list[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        """Answer requests: `input_ids` [rows, tokens] in, `sentence_embedding` [rows, hidden] out."""
        tensors = [request.inputs()[0].as_numpy() for request in requests]
        rows = [row for tensor in tensors for row in tensor]
        ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        mask = np.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = row
            mask[place, : len(row)] = 1
        (vectors,) = self._session.run(None, {"input_ids": ids, "attention_mask": mask})
        ends = list(accumulate(len(tensor) for tensor in tensors))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("sentence_embedding", vectors[begin:end])])
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
