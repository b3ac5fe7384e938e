"""A sentence encoder behind the server's python backend, as people write it: padded.

The benchmark copies this file into a model repository as model.py; only the server imports it. The dynamic batcher
joins requests of different lengths (`allow_ragged_batch`); the engine pads them to the longest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from varlen_bench.peers import engines


class TritonPythonModel:
    """The class that the server creates."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model; its parameters are `engine`, `checkpoint`, `precision` and `threads`."""
        parameters = json.loads(args["model_config"])["parameters"]
        values = {name: parameter["string_value"] for name, parameter in parameters.items()}
        self._embed = engines.load(
            values["engine"],
            Path(values["checkpoint"]),
            values["precision"],
            cores=engines.Cores(1, int(values["threads"])),
        )

    def execute(
        self, requests: list[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        """Return `sentence_embedding` [rows, hidden] for each `input_ids` [rows, tokens]."""
        tensors = [request.inputs()[0].as_numpy() for request in requests]
        ends = np.cumsum([len(tensor) for tensor in tensors])
        vectors = self._embed([row for tensor in tensors for row in tensor])
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("sentence_embedding", part)])
            for part in np.split(vectors, ends[:-1])
        ]
