"""The small request that shows whether the process of a model takes requests.

It tokenizes one letter, which no batch and no queue of the model delays. Short texts pass long ones before the
tokenizer. A model without a tokenizer, or one that holds its most requests, refuses it at once.
"""

from __future__ import annotations

import numpy as np

from varlen_client.generation import OperationRequest
from varlen_client.wire import InferRequest, ModelInfo, Rows

_PARAMETERS = {"operation": "tokenize"}
_TEXT = "a"
# The server passes on only inputs that the model has.
_TOKEN_ID = 0


def probe_prompt(info: ModelInfo) -> OperationRequest:
    """Return the small request for a model that generates."""
    if "text_input" in info.inputs:
        return OperationRequest(("text_input", _TEXT), _PARAMETERS, stream=False)
    return OperationRequest(("input_ids", [_TOKEN_ID]), _PARAMETERS, stream=False)


def probe_rows(info: ModelInfo) -> InferRequest:
    """Return the small request for a model of any other task."""
    text = (_TEXT.encode(), b"") if info.requires_pairs else (_TEXT.encode(),)
    ids = np.full(1, _TOKEN_ID, dtype=np.int64)
    rows = Rows(texts=(text,)) if "text" in info.inputs else Rows(ids=(ids,))
    row = range(1)
    return InferRequest(row, rows.tensors(row), (next(iter(info.outputs)),), _PARAMETERS)
