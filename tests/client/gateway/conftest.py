"""Fixtures: a gateway over fake models, called without a port."""

import asyncio
from dataclasses import fields
from unittest import mock

import httpx2
import openai
import pytest

from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.app import create_app
from varlen_client.gateway.models import Gateway

from .fake_models import Calls, FakeClient
from .tool_templates import FAMILIES, renderer


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture(scope="session")
def gateways():
    """Applications and their gateways by settings: FastAPI needs 70 ms for the routes of one."""
    return {}


@pytest.fixture
def make_app(calls, gateways):
    """Return a function that makes the application of a gateway with these settings.

    Its gateway knows nothing of earlier requests, though another test may have had the same routes.
    """

    def make(**given):
        settings = GatewaySettings(url="grpc://127.0.0.1:1", **given)
        fresh = Gateway.of(settings, lambda name: FakeClient(calls, name))
        # the folder of batches has jobs, which are started once
        if settings not in gateways or settings.batch_folder:
            with mock.patch.object(Gateway, "of", return_value=fresh):
                gateways[settings] = create_app(settings), fresh
        made, gateway = gateways[settings]
        for name in {each.name for each in fields(Gateway)} - {"settings"}:
            vars(getattr(gateway, name)).update(vars(getattr(fresh, name)))
        return made

    return make


def http_client(app, **options):
    """Return an HTTP client of an application."""
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://gateway", **options)


@pytest.fixture
def send(make_app):
    """Return a function that sends a request to a gateway, and returns the response."""

    def send(method, path, body=None, *, app=None, **options):
        async def call():
            async with http_client(app or make_app()) as client:
                return await client.request(method, path, json=body, **options)

        return asyncio.run(call())

    return send


@pytest.fixture
def post(send):
    """Return a function that posts a body, and returns the answer to it."""

    def post(path, **body):
        response = send("POST", path, body)
        assert response.status_code == 200, response.text
        return response.json()

    return post


@pytest.fixture
def refusal(send):
    """Return a function that posts a body, and returns the status and the error."""

    def refusal(path, **body):
        response = send("POST", path, body)
        assert response.headers["content-type"] == "application/json"
        return response.status_code, response.json()["error"]

    return refusal


@pytest.fixture
def model(calls):
    """Return a function that makes the model chat by the template of a family."""

    def model(name="qwen3", *texts, template=None, end="stop"):
        family = FAMILIES.get(name)
        calls.render = renderer(family.source if family else name, template)
        calls.special_tokens = family.special if family else ()
        calls.texts, calls.end = texts or ("ok",), end
        return family

    return model


@pytest.fixture
def ask(make_app):
    """Return a function that runs a coroutine function with an openai client."""

    def ask(call):
        async def run():
            async with http_client(make_app()) as transport:
                client = openai.AsyncOpenAI(
                    base_url="http://gateway/v1", http_client=transport, api_key="none"
                )
                return await call(client)

        return asyncio.run(run())

    return ask
