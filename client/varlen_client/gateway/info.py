"""`/info` of Text Embeddings Inference: what the server's config says of a model."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from varlen_client.gateway.bodies import MAX_INPUTS
from varlen_client.gateway.json_writing import json_response
from varlen_client.gateway.models import Gateway
from varlen_client.wire import ModelInfo

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8", "int4": "int4"}


def add_info_route(app: FastAPI, gateway: Gateway) -> None:
    """Add the route."""

    @app.get("/info", tags=["Text Embeddings Inference"])
    async def info() -> Response:
        """Describe the model of `?model=`; fields that its config.pbtxt leaves to the checkpoint are null."""
        found = await gateway.info(None)
        return json_response(
            {
                "model_id": found.name,
                "model_dtype": _DTYPES.get(found.settings.get("dtype", "auto")),
                "model_type": _type_of(found),
                "max_concurrent_requests": gateway.settings.max_requests,
                "max_input_length": _number(found, "max_sequence_tokens"),
                "max_batch_tokens": _number(found, "max_batch_tokens"),
                "max_batch_requests": _number(found, "max_batch_sequences"),
                "max_client_batch_size": MAX_INPUTS,
                # of paths of TEI
                "auto_truncate": True,
                "version": version("varlen-client"),
            }
        )


def _number(model: ModelInfo, setting: str) -> int | None:
    value = model.settings.get(setting)
    return None if value is None else int(value)


def _type_of(model: ModelInfo) -> dict[str, dict[str, Any]] | None:
    """Return the kind of a model in TEI's names; None if it has none."""
    if "sentence_embedding" in model.outputs:
        return {"embedding": {}}
    if "indices" in model.outputs:
        return {"embedding": {"pooling": "splade"}}
    if classifies_texts(model):
        return {"reranker": {}} if model.outputs["logits"] == (1,) else {"classifier": {}}
    return None


def classifies_texts(model: ModelInfo) -> bool:
    """Return whether a model has logits of whole texts, and not of each token."""
    return len(model.outputs.get("logits", ())) == 1
