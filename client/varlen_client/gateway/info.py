"""`/info` of Text Embeddings Inference, and the JSON at `/`: what configs say of models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from varlen_client.gateway.bodies import MAX_INPUTS
from varlen_client.gateway.json_writing import json_response
from varlen_client.gateway.models import Gateway
from varlen_client.wire import ModelInfo, ModelState

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8", "int4": "int4"}
_VECTORS = ("sentence_embedding", "token_embeddings", "last_hidden_state")
# Other pages of the gateway.
_PAGES = ("/docs", "/openapi.json", "/v1/models", "/health", "/metrics")


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


async def overview(gateway: Gateway) -> Mapping[str, Any]:
    """Return the gateway's name and version, the models, ready or not, and its other pages."""
    described = await gateway.models.described()
    return {
        "name": "varlen gateway",
        "version": version("varlen-client"),
        "models": [_summary(*each) for each in described],
        "pages": _PAGES,
    }


def _summary(state: ModelState, found: ModelInfo | None) -> dict[str, Any]:
    """Return name, state, task and sizes of a model; what is not known is null."""
    known = (
        {
            "task": found.known_task,
            "max_input_length": _number(found, "max_sequence_tokens"),
            "dimensions": _last_dimension(found, _VECTORS),
            "labels": _last_dimension(found, ("logits",)),
        }
        if found
        else dict.fromkeys(("task", "max_input_length", "dimensions", "labels"))
    )
    return {"name": state.name, "state": state.state or "UNAVAILABLE", **known}


def _last_dimension(model: ModelInfo, outputs: Collection[str]) -> int | None:
    """Return the last dimension of the first of these outputs; None if it is unknown."""
    dims = next((model.outputs[output] for output in outputs if output in model.outputs), ())
    return dims[-1] if dims and dims[-1] > 0 else None


def _number(model: ModelInfo, setting: str) -> int | None:
    value = model.settings.get(setting)
    # models of other backends may have anything
    return int(value) if value is not None and value.isdecimal() else None


def _type_of(model: ModelInfo) -> dict[str, dict[str, Any]] | None:
    """Return the kind of a model in TEI's names; None if it has none."""
    if model.labels_texts:
        return {"reranker": {}} if model.outputs.get("logits") == (1,) else {"classifier": {}}
    if model.known_task == "sparse_embed":
        return {"embedding": {"pooling": "splade"}}
    return {"embedding": {}} if model.known_task == "embed" else None
