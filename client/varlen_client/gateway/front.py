"""Pages for browsers, `/info`, lists of models, health and metrics.

The page `/` tries each model, and `/docs` is the reference of routes. Both are one file, `page.html`, which loads
nothing but answers of this gateway. Its `Content-Security-Policy` lets the browser run no other script, send nothing to
other hosts, and show the page in no frame. It is the same for all requests, and holds no name of a model: its script
asks `/` for JSON, which needs a key as other paths do.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from varlen_client.errors import ModelNotFound
from varlen_client.gateway.bodies import MAX_INPUTS
from varlen_client.gateway.errors import error_response
from varlen_client.gateway.json_io import json_response
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.routes import EXAMPLES_BY_TASK
from varlen_client.wire import ModelInfo, ModelState

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8", "int4": "int4"}
_VECTORS = ("sentence_embedding", "token_embeddings", "last_hidden_state")
# Other pages of the gateway.
_PAGES = ("/docs", "/openapi.json", "/v1/models", "/health", "/metrics")
# Answers of `/` that caches keep apart.
_BY_ACCEPT = {"Vary": "Accept"}
_QUALITY = re.compile(r"\s*q\s*=\s*(0(\.\d{0,3})?|1(\.0{0,3})?)\s*")


def add_front_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the routes that answer `GET`."""

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

    @app.head("/", include_in_schema=False)
    @app.get("/", tags=["Status"])
    async def root(request: Request) -> Response:
        """Name, version and models, ready or not; a browser gets a page to try them."""
        if shows_page(request.scope):
            return _page(_BY_ACCEPT)
        response = json_response(await _overview(gateway))
        response.headers.update(_BY_ACCEPT)
        return response

    async def docs(_: Request) -> Response:
        return _page({})

    app.add_route("/docs", docs, include_in_schema=False)

    @app.get("/health", tags=["Status"])
    async def health() -> Response:
        """Answer 200 if the server answers and a model is ready, else 503."""
        if await gateway.models.is_healthy():
            return json_response({"status": "ok"})
        message = "the server does not answer, or its model is not ready"
        return error_response(503, message, "server_error", code="unavailable")

    @app.get("/metrics", tags=["Status"])
    async def metrics() -> Response:
        """The gateway's own metrics, as Prometheus text."""
        return Response(gateway.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """The models that are ready, each with its adapters."""
        data = [_listed(*each) for each in await gateway.models.listed()]
        return json_response({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def model(name: str) -> Response:
        """One of the models that are ready, or of their adapters."""
        found = (_listed(*each) for each in await gateway.models.listed())
        entry = next((each for each in found if name in (each["id"], each["root"])), None)
        if entry is None:
            raise ModelNotFound(f"the server has no ready model {name!r}")
        return json_response(entry)


def _listed(model: str, adapter: str) -> dict[str, object]:
    """Return vLLM's object of a model, or of one of its adapters."""
    named = {"id": f"{model}:{adapter}" if adapter else model, "object": "model", "created": 0}
    parent = model if adapter else None
    return {**named, "owned_by": "varlen", "root": adapter or model, "parent": parent}


async def _overview(gateway: Gateway) -> Mapping[str, Any]:
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


def shows_page(scope: Scope) -> bool:
    """Return whether a request gets the page of `/`: it accepts HTML before JSON."""
    if scope["path"] != "/" or scope["method"] not in ("GET", "HEAD"):
        return False
    accept = ",".join(Headers(scope=scope).getlist("accept"))
    return _quality(accept, "text/html") > _quality(accept, "application/json")


def _quality(accept: str, media_type: str) -> float:
    """Return the quality of a media type, from 0 to 1; RFC 9110, 12.5.1."""
    general = media_type.partition("/")[0] + "/*"
    # the most specific range decides
    ranks = {"*/*": 0, general: 1, media_type: 2}
    found = [(ranks[name], quality) for name, quality in _ranges(accept) if name in ranks]
    return max(found)[1] if found else 0.0


def _ranges(accept: str) -> Iterator[tuple[str, float]]:
    for part in accept.split(","):
        name, *parameters = part.split(";")
        given = next((each for each in parameters if each.strip()[:1] in ("q", "Q")), "q=1")
        quality = _QUALITY.fullmatch(given.lower())
        yield name.strip().lower(), float(quality[1]) if quality else 0.0


def _page(headers: dict[str, str]) -> Response:
    html, policy = _page_and_policy()
    return HTMLResponse(
        html,
        headers={
            "Content-Security-Policy": policy,
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cache-Control": "no-cache",
            **headers,
        },
    )


@cache
def _page_and_policy() -> tuple[str, str]:
    html = files("varlen_client.gateway").joinpath("page.html").read_text("utf-8")
    html = html.replace("{version}", version("varlen-client"))
    examples = {task: asdict(example) for task, example in EXAMPLES_BY_TASK.items()}
    html = html.replace("{examples}", json.dumps(examples, indent=2))
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of(html, "script"),
        "style-src": _hash_of(html, "style"),
        "connect-src": "'self'",
        # the icon
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        # no text becomes HTML
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return html, "; ".join(f"{name} {value}" for name, value in policy.items())


def _hash_of(html: str, element: str) -> str:
    """Return the only content of this kind of element as a source of a policy."""
    (content,) = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(sha256(content.encode()).digest()).decode()}'"
