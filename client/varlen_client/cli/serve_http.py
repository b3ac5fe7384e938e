"""The commands of the gateway: `varlen serve-http`, and `varlen batch` for the requests of a file.

The routes answer a file in this process, so what `serve-http` takes as a body is what a line may have.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from varlen_client import gateway
from varlen_client.aio import DEFAULT_CONCURRENCY, DEFAULT_WATCH_SECONDS
from varlen_client.cli.options import (
    DEFAULT_URLS,
    Model,
    check_output,
    fail,
    print_message,
    usage_error,
)
from varlen_client.cli.progress import show_progress
from varlen_client.errors import InvalidUrl
from varlen_client.gateway.tool_calls import TOOL_FORMS
from varlen_client.transport.endpoint import Endpoint

if TYPE_CHECKING:
    from varlen_client.gateway.batches import BatchRequest

API_KEYS = "VARLEN_API_KEYS"
LOOPBACK = ("127.0.0.1", "::1", "localhost")

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar=API_KEYS,
        help="Key that requests must have; may be repeated. Prefer the variable: arguments are visible to others.",
    ),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        help="Origin of browser pages that may send requests; may be repeated; * is all.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse unknown fields of requests; default: they are ignored, and counted in the metrics.",
    ),
]
ToolCalls = Annotated[
    str,
    typer.Option(
        help="Form in which models call tools; auto: what the chat template writes, none: tools are ignored,"
        f" or one of {', '.join(TOOL_FORMS)}.",
    ),
]
Reasoning = Annotated[
    str,
    typer.Option(
        help="auto: the reasoning of a model is the reasoning_content of its answer; none: it stays text."
    ),
]
BatchFolder = Annotated[
    Path | None,
    typer.Option(
        help="Serve /v1/files and /v1/batches, with files in this folder; one gateway has it at a time.",
    ),
]
DEFAULT_PORT = 8080
Urls = Annotated[
    list[str],
    typer.Option(
        "--url",
        envvar="VARLEN_URL",
        help="grpc://host:port, or grpcs with TLS; may be repeated for replicas, in the variable with spaces between;"
        " dns+grpc://name:port is all addresses of a name.",
    ),
]


def check_access(host: str, api_keys: Sequence[str] | None) -> None:
    """Warn of an open address without keys.

    The command exits if the variable of keys is set and has none.
    """
    if not api_keys and API_KEYS in os.environ:
        usage_error(f"{API_KEYS} is set and has no key; unset it to serve without keys")
    if api_keys and not all(api_keys):
        usage_error("an API key is empty")
    if host not in LOOPBACK and not api_keys:
        print_message(
            f"warning: {host} may be reached from other machines, and requests need no key"
        )


def checked_settings(command: str, **settings: Any) -> gateway.GatewaySettings:
    """Return the settings of a gateway; exit if they are wrong or it is missing."""
    try:
        import varlen_client.gateway.http_server  # noqa: F401
    except ModuleNotFoundError as error:
        usage_error(f"{command} needs {error.name}; pip install 'varlen-client[http]'")
    try:
        found = gateway.GatewaySettings(**settings)
        for url, endpoint in zip(found.url, Endpoint.parse_all(found.url), strict=True):
            if endpoint.protocol != "grpc":
                # the server does not notice HTTP clients that leave
                usage_error(f"url {url!r} must be gRPC: grpc://host:port or grpcs://host:port")
    except (InvalidUrl, ValueError) as error:
        usage_error(str(error))
    return found


def serve_http(
    *,
    host: Host = LOOPBACK[0],
    port: Port = DEFAULT_PORT,
    urls: Urls = DEFAULT_URLS,
    model: Annotated[
        str | None,
        typer.Option(
            envvar="VARLEN_MODEL",
            help="For requests that name none; default: the only ready model.",
        ),
    ] = None,
    api_key: ApiKeys = None,
    cors_origin: CorsOrigins = None,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Largest body of a request.")
    ] = gateway.DEFAULT_MAX_BODY_BYTES,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Most requests at a time; others get status 503.")
    ] = gateway.DEFAULT_MAX_REQUESTS,
    max_connections_per_address: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most connections of one address, or of one IPv6 network of 64 bits; default: half of all."
            " A proxy is one address.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds for each request.")
    ] = gateway.DEFAULT_TIMEOUT_SECONDS,
    watch_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds without any answer of a model after which requests ask whether its process still runs;"
            " they fail once it has ended. 0 never asks.",
        ),
    ] = DEFAULT_WATCH_SECONDS,
    chat_max_tokens: Annotated[
        int, typer.Option(min=1, help="Longest answer of a chat that sets no limit, in tokens.")
    ] = gateway.DEFAULT_CHAT_MAX_TOKENS,
    auto_truncate: Annotated[
        bool,
        typer.Option(
            "--auto-truncate",
            help="Cut texts that are too long, unless the request says otherwise; default: they are errors.",
        ),
    ] = False,
    strict: Strict = False,
    tool_calls: ToolCalls = "auto",
    reasoning: Reasoning = "auto",
    batch_folder: BatchFolder = None,
) -> None:
    """Serve a server's models to OpenAI, TEI and Cohere clients."""
    checked = checked_settings(
        "serve-http",
        url=tuple(urls),
        model=model,
        api_keys=tuple(api_key or ()),
        cors_origins=tuple(cors_origin or ()),
        max_body_bytes=max_body_bytes,
        max_requests=max_requests,
        max_connections_per_address=max_connections_per_address,
        timeout_seconds=timeout,
        watch_seconds=watch_seconds,
        chat_max_tokens=chat_max_tokens,
        auto_truncate=auto_truncate,
        strict=strict,
        tool_calls=tool_calls,
        reasoning=reasoning,
        batch_folder=batch_folder,
    )
    from varlen_client.gateway.app import create_app
    from varlen_client.gateway.http_server import GatewayServer

    check_access(host, api_key)
    try:
        app = create_app(checked)
    except OSError as error:
        usage_error(f"cannot use the folder {batch_folder}: {error.strerror}")
    server = GatewayServer(app, checked, host=host, port=port)
    with suppress(KeyboardInterrupt):
        server.run_alone()
    if not server.started:
        # uvicorn has logged the reason
        raise typer.Exit(1)


def batch(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSON Lines in the form of OpenAI's Batch API: custom_id, method, url, body."
        ),
    ],
    *,
    output: Annotated[
        Path, typer.Option(help="Append a line per answer here; answers that it has are kept.")
    ],
    urls: Urls = DEFAULT_URLS,
    model: Model = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Maximum requests in flight.")
    ] = DEFAULT_CONCURRENCY,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds for each request.")
    ] = gateway.DEFAULT_TIMEOUT_SECONDS,
) -> None:
    """Answer the requests of a file; a later run goes on.

    The output has the lines of OpenAI's Batch API in the order of the answers. A request that failed for a while (busy,
    too late) is sent up to 8 times; one that still fails, and one that is refused, has its error in its line. A
    later run of the same command sends only what has no final answer. All jobs are one tenant of the server.
    """
    settings = checked_settings(
        "batch", url=tuple(urls), model=model, timeout_seconds=timeout, max_requests=concurrency
    )
    from varlen_client.gateway.app import create_app
    from varlen_client.gateway.batches import (
        BatchFileError,
        answer_requests,
        keep_final,
        read_requests,
    )

    def read() -> Iterator[BatchRequest]:
        try:
            yield from read_requests(file, settings.max_body_bytes)
        except BatchFileError as error:
            reason, line = error.args
            usage_error(f"{file}, line {line}: {reason}" if line else f"{file}: {reason}")
        except OSError as error:
            usage_error(f"cannot read {file}: {error.strerror}")

    async def answer(stream: IO[bytes], report: Callable[[int], None]) -> None:
        def write(status: int, line: bytes) -> None:
            stream.write(line)
            # it outlives a kill of this process
            stream.flush()
            statuses.append(status)
            report(len(statuses))

        app, wanted = create_app(settings), (each for each in read() if each.custom_id not in done)
        async with app.router.lifespan_context(app):
            await answer_requests(app, wanted, write, concurrency=concurrency)

    names, statuses = {request.custom_id for request in read()}, list[int]()
    check_output(output, force=True)
    try:
        done = keep_final(output, names)
        left = len(names) - len(done)
        if done:
            print_message(f"{len(done)} of {len(names)} requests are answered in {output}")
        if left:
            with output.open("ab") as stream, show_progress("answering", left) as report:
                asyncio.run(answer(stream, report))
    except BatchFileError as error:
        usage_error(f"{output}: {error.args[0]}")
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror}")
    except KeyboardInterrupt:
        fail(f"interrupted; what was answered is in {output}: run the same command to go on")
    if left:
        print_message(f"answered {statuses.count(200)} of {left} requests in {output}")
    failed = len(names) - [*done.values(), *statuses].count(200)
    if failed:
        fail(f"{failed} requests failed; their lines in {output} have the reasons")
