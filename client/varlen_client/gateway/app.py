"""The gateway as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import Depends, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from varlen_client.errors import ModelNotFound
from varlen_client.gateway.body_route import BodyRoute
from varlen_client.gateway.chat import add_chat_route
from varlen_client.gateway.cohere import add_cohere_routes
from varlen_client.gateway.completions import add_completion_route
from varlen_client.gateway.edge import Edge
from varlen_client.gateway.embeddings import add_embedding_routes
from varlen_client.gateway.errors import add_error_handlers, error_response
from varlen_client.gateway.examples import add_examples
from varlen_client.gateway.front import add_front_routes
from varlen_client.gateway.info import add_info_route
from varlen_client.gateway.json_writing import json_response
from varlen_client.gateway.kserve import add_kserve_route
from varlen_client.gateway.metrics import PathNames
from varlen_client.gateway.models import Connect, Gateway, read_query_model
from varlen_client.gateway.pooling import add_pooling_routes
from varlen_client.gateway.rerank import add_rerank_routes
from varlen_client.gateway.scores import add_score_routes
from varlen_client.gateway.settings import GatewaySettings
from varlen_client.gateway.tei import add_tei_routes
from varlen_client.gateway.tokens import add_token_routes


def create_app(settings: GatewaySettings, connect: Connect | None = None) -> FastAPI:
    """Return the application; `connect` replaces the gRPC clients of models in tests."""
    gateway = Gateway.of(settings, connect)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        await gateway.models.close()

    app = FastAPI(
        title="varlen gateway",
        summary="OpenAI, Text Embeddings Inference, Cohere and rerank for models of a Triton Inference Server",
        version=version("varlen-client"),
        lifespan=lifespan,
        dependencies=[Depends(read_query_model)],
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = BodyRoute
    app.state.ignore_fields = gateway.ignore_fields
    add_error_handlers(app, gateway.models.is_healthy)
    for add in (
        add_embedding_routes,
        add_cohere_routes,
        add_rerank_routes,
        add_score_routes,
        add_pooling_routes,
        add_tei_routes,
        add_kserve_route,
        add_completion_route,
        add_chat_route,
        add_token_routes,
        add_info_route,
        add_front_routes,
    ):
        add(app, gateway)
    _add_status_routes(app, gateway)
    add_examples(app)
    names = PathNames([route for route in app.routes if isinstance(route, Route)])
    app.add_middleware(Edge, settings=settings, metrics=gateway.metrics, name_path=names.of)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


def _add_status_routes(app: FastAPI, gateway: Gateway) -> None:
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
        """The models that are ready."""
        names = await gateway.models.ready()
        return json_response({"object": "list", "data": [_model(name) for name in names]})

    @app.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def model(name: str) -> Response:
        """One of the models that are ready."""
        if name not in await gateway.models.ready():
            raise ModelNotFound(f"the server has no ready model {name!r}")
        return json_response(_model(name))


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "varlen"}
