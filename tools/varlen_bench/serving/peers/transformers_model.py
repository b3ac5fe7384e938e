"""A sentence encoder behind the server's python backend, as people write it: transformers, padded.

The server's dynamic batcher hands over requests of different lengths (`allow_ragged_batch`); they are filled up to the
longest of them here, which costs less than clients that fill up to the longest there may be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """What the server makes one of."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the checkpoint that the parameter `checkpoint` names, with `threads` threads, in `dtype`."""
        import torch
        from transformers import AutoModel

        settings = json.loads(args["model_config"])["parameters"]
        given = {name: setting["string_value"] for name, setting in settings.items()}
        torch.set_num_threads(int(given["threads"]))
        dtype = torch.bfloat16 if given["dtype"] == "bf16" else torch.float32
        self._encoder = AutoModel.from_pretrained(
            given["checkpoint"], dtype=dtype, attn_implementation="sdpa"
        ).eval()

    def execute(
        self, requests: list[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        """Answer requests: `input_ids` [rows, tokens] in, `sentence_embedding` [rows, hidden] out."""
        tensors = [request.inputs()[0].as_numpy() for request in requests]
        vectors = self._embed([row for tensor in tensors for row in tensor])
        ends = list(accumulate(len(tensor) for tensor in tensors))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("sentence_embedding", vectors[begin:end])])
            for begin, end in zip([0, *ends], ends, strict=False)
        ]

    def _embed(self, rows: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.float32]:
        """Return mean-pooled vectors of length 1."""
        import torch

        ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.from_numpy(row)
            mask[place, : len(row)] = 1
        with torch.inference_mode():
            hidden = self._encoder(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            kept = mask.unsqueeze(-1).float()
            pooled = (hidden * kept).sum(1) / kept.sum(1)
            vectors: npt.NDArray[np.float32] = torch.nn.functional.normalize(pooled, dim=-1).numpy()
        return vectors
