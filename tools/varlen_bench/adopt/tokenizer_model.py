"""The first step of a stock ensemble: texts to token ids and their mask.

It pads the texts of a batch to the longest one.
`stock_ensemble` copies this file into a model repository as model.py; only the server imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    """The class that the server creates."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer, which cuts texts as its file says."""
        folder = Path(args["model_repository"], args["model_version"])
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_padding()

    def execute(
        self, requests: list[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        """Tokenize the texts of all requests that the dynamic batcher has joined."""
        rows = [request.inputs()[0].as_numpy()[:, 0] for request in requests]
        found = self._tokenizer.encode_batch([text.decode() for row in rows for text in row])
        ends = np.cumsum([len(row) for row in rows])[:-1]
        ids = np.split(np.array([each.ids for each in found]), ends)
        masks = np.split(np.array([each.attention_mask for each in found]), ends)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("input_ids", part), pb_utils.Tensor("attention_mask", mask)]
            )
            for part, mask in zip(ids, masks, strict=True)
        ]
