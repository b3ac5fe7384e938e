"""The gateway as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.batches import add_batch_routes
from varlen_client.gateway.edge import Edge
from varlen_client.gateway.errors import add_error_handlers
from varlen_client.gateway.front import add_front_routes
from varlen_client.gateway.json_io import BodyRoute
from varlen_client.gateway.metrics import path_names
from varlen_client.gateway.models import Connect, Gateway, read_query_model
from varlen_client.gateway.routes import ROUTES


def create_app(settings: GatewaySettings, connect: Connect | None = None) -> FastAPI:
    """Return the application; `connect` replaces the gRPC clients of models in tests.

    Raises:
        OSError: the folder of batches cannot be used.
    """
    gateway = Gateway.of(settings, connect)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        if jobs is not None:
            jobs.start()
        yield
        if jobs is not None:
            await jobs.stop()
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
    for each in ROUTES:
        each.add_to(app, gateway)
    jobs = add_batch_routes(app, gateway)
    add_front_routes(app, gateway)
    names = path_names([route for route in app.routes if isinstance(route, Route)])
    app.add_middleware(Edge, settings=settings, metrics=gateway.metrics, name_path=names)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    return app
