"""A sentence encoder behind the server's python backend, as people write it: transformers or onnxruntime, padded.

The benchmark copies this file into a model repository as model.py; only the server imports it. The dynamic batcher
joins requests of different lengths (`allow_ragged_batch`); they are padded to the longest here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

# Embeds padded token ids with their mask, each [rows, tokens]; returns vectors of length 1, [rows, hidden].
Embed = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.float32]]


class TritonPythonModel:
    """The class that the server creates."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model; its parameters are `engine`, `checkpoint`, `dtype` and `threads`."""
        parameters = json.loads(args["model_config"])["parameters"]
        values = {name: parameter["string_value"] for name, parameter in parameters.items()}
        load = _onnxruntime if values["engine"] == "onnxruntime" else _transformers
        self._embed = load(values)

    def execute(
        self, requests: list[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        """Return responses: `input_ids` [rows, tokens] in, `sentence_embedding` [rows, hidden] out."""
        tensors = [request.inputs()[0].as_numpy() for request in requests]
        rows = [row for tensor in tensors for row in tensor]
        ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        mask = np.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
            mask[number, : len(row)] = 1
        ends = np.cumsum([len(tensor) for tensor in tensors])
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("sentence_embedding", vectors)])
            for vectors in np.split(self._embed(ids, mask), ends[:-1])
        ]


def _transformers(parameters: Mapping[str, str]) -> Embed:
    import torch
    from transformers import AutoModel

    torch.set_num_threads(int(parameters["threads"]))
    dtype = torch.bfloat16 if parameters["dtype"] == "bf16" else torch.float32
    encoder = AutoModel.from_pretrained(
        parameters["checkpoint"], dtype=dtype, attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def embed(ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        input_ids, attention_mask = torch.from_numpy(ids), torch.from_numpy(mask)
        hidden = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask.unsqueeze(-1).float()
        pooled = (hidden.float() * kept).sum(1) / kept.sum(1)
        vectors: npt.NDArray[np.float32] = torch.nn.functional.normalize(pooled, dim=-1).numpy()
        return vectors

    return embed


def _onnxruntime(parameters: Mapping[str, str]) -> Embed:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(parameters["threads"])
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    path = parameters["checkpoint"] + "/model.onnx"
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    # the graph pools and normalises
    return lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
