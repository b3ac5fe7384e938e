"""The gateway passes the trace context of a request on, over gRPC and HTTP."""

import asyncio

import pytest

from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.app import create_app
from varlen_client.transport.transport import trace_headers

from .conftest import http_client

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
STATE = "vendor=a b,other=2"
ROUTES = {
    "embed": ("/v1/embeddings", {"input": [f"text {row}" for row in range(20)]}),
    "generate": ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}),
    "stream": ("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}),
}


@pytest.fixture
def received(server):
    """Return a function that posts, and returns the headers that reach the server."""

    def received(route, headers):
        server.model.task = "embed" if route == "embed" else "generate"
        path, body = ROUTES[route]
        app = create_app(GatewaySettings(url=server.url, model="fake"))

        async def post():
            async with app.router.lifespan_context(app), http_client(app) as client:
                return await client.post(path, json=body, headers=headers)

        response = asyncio.run(post())
        assert response.status_code == 200, response.text
        return [
            {name: value for name, value in each.headers.items() if name.startswith("trace")}
            for each in server.model.requests
        ]

    return received


@pytest.mark.parametrize("route", ROUTES)
def test_every_request_of_a_call_has_the_context(received, route):
    found = received(route, {"traceparent": PARENT, "tracestate": STATE})

    assert len(found) == {"embed": 3, "generate": 2, "stream": 1}[route]
    assert all(each == {"traceparent": PARENT, "tracestate": STATE} for each in found)
    assert trace_headers() == {}


@pytest.mark.parametrize(
    "headers, expected",
    [
        ([], {}),
        ([("traceparent", PARENT)], {"traceparent": PARENT}),
        (
            [("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")],
            {"traceparent": PARENT, "tracestate": "a=1,b=2"},
        ),
        ([("traceparent", PARENT), ("tracestate", "a" * 513)], {"traceparent": PARENT}),
        ([("traceparent", PARENT), ("tracestate", "ä=1")], {"traceparent": PARENT}),
        ([("traceparent", PARENT.upper()), ("tracestate", STATE)], {}),
        ([("traceparent", PARENT.replace("4736", "473g"))], {}),
        ([("traceparent", f"00-{'0' * 32}-00f067aa0ba902b7-01")], {}),
        ([("traceparent", PARENT), ("traceparent", PARENT)], {}),
        ([("tracestate", STATE)], {}),
    ],
    ids="none parent lists long letters capitals digits zeros two alone".split(),
)
def test_headers_that_are_not_valid_are_left_out(received, headers, expected):
    # a header of bytes passes as it is
    raw = [(name.encode(), value.encode()) for name, value in headers]

    assert received("stream", raw) == [expected]
