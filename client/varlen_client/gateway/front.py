"""The pages for browsers: `/`, which tries each model, and `/docs`, the reference of routes.

Both are one file, `page.html`, which loads nothing but answers of this gateway. Its `Content-Security-Policy` lets the
browser run no other script, send nothing to other hosts, and show the page in no frame. It is the same for all
requests, and holds no name of a model: its script asks `/` for JSON, which needs a key as other paths do.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from varlen_client.gateway.examples import EXAMPLES_BY_TASK
from varlen_client.gateway.info import overview
from varlen_client.gateway.json_writing import json_response
from varlen_client.gateway.models import Gateway

# Answers of `/` that caches keep apart.
_BY_ACCEPT = {"Vary": "Accept"}
_QUALITY = re.compile(r"\s*q\s*=\s*(0(\.\d{0,3})?|1(\.0{0,3})?)\s*")


def add_front_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the routes."""

    async def root(request: Request) -> Response:
        """Name, version and models, ready or not; a browser gets a page to try them."""
        if shows_page(request.scope):
            return _page(_BY_ACCEPT)
        response = json_response(await overview(gateway))
        response.headers.update(_BY_ACCEPT)
        return response

    async def docs(_: Request) -> Response:
        return _page({})

    tags: list[Any] = ["Status"]
    app.get("/", tags=tags)(root)
    app.head("/", include_in_schema=False)(root)
    app.add_route("/docs", docs, include_in_schema=False)


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
