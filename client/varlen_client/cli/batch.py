"""The command `varlen batch`: the requests of a file, in the form of OpenAI's Batch API.

The routes of the gateway answer in this process, so what `varlen serve-http` takes as a body is what a line may have.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import typer

from varlen_client import gateway
from varlen_client.aio import DEFAULT_CONCURRENCY
from varlen_client.cli.options import (
    DEFAULT_URLS,
    Model,
    check_output,
    fail,
    print_message,
    usage_error,
)
from varlen_client.cli.progress import show_progress
from varlen_client.cli.serve_http import Urls, checked_settings

# Statuses of requests that may succeed later: the server is full, does not answer, or was too slow.
_TRANSIENT = (408, 429, 502, 503, 504)
_ATTEMPTS = 8
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
# All batch jobs are one tenant beside the gateway's, so that a job does not take the share of others.
_KEY = "varlen batch"
# Beginning of each line of the output.
_BEGINNING = b'{"id": "batch_req_'
# Most characters of a name of a request that an error shows.
_SHOWN = 64


class BatchRequest(NamedTuple):
    """A line of the input file."""

    custom_id: str
    path: str
    body: bytes


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
        "batch",
        url=tuple(urls),
        model=model,
        timeout_seconds=timeout,
        api_keys=(_KEY,),
        max_requests=concurrency,
    )
    names = [request.custom_id for request in _requests(file, settings.max_body_bytes)]
    check_output(output, force=True)
    done = _keep_final(output, frozenset(names))
    left = len(names) - len(done)
    if done:
        print_message(f"{len(done)} of {len(names)} requests are answered in {output}")
    if not left:
        return
    failed = 0
    try:
        with output.open("ab") as stream, show_progress("answering", left) as report:
            wanted = (
                r for r in _requests(file, settings.max_body_bytes) if r.custom_id not in done
            )
            failed = asyncio.run(_answer_all(settings, wanted, stream, concurrency, report))
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror}")
    except KeyboardInterrupt:
        fail(f"interrupted; what was answered is in {output}: run the same command to go on")
    print_message(f"answered {left - failed} of {left} requests in {output}")
    if failed:
        fail(f"{failed} requests failed; their lines in {output} have the reasons")


async def _answer_all(
    settings: gateway.GatewaySettings,
    requests: Iterator[BatchRequest],
    stream: IO[bytes],
    concurrency: int,
    report: Callable[[int], None],
) -> int:
    """Write a line for each request as it is answered; return how many failed."""
    from varlen_client.gateway.app import create_app

    app = create_app(settings)
    answered = failed = 0

    async def work() -> None:
        nonlocal answered, failed
        # the workers share one iterator: what is read of the file is what is in flight
        for request in requests:
            status, body = await _answer(app, request)
            stream.write(_line(request.custom_id, status, body))
            # it outlives a kill of this process
            stream.flush()
            answered, failed = answered + 1, failed + (status != 200)
            report(answered)

    async with app.router.lifespan_context(app):
        workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return failed


async def _answer(app: Any, request: BatchRequest) -> tuple[int, bytes]:
    """Return status and body of an answer; ask again while the server is busy."""
    pause = _FIRST_PAUSE_SECONDS
    for _ in range(_ATTEMPTS - 1):
        status, body = await post(app, request.path, request.body)
        if status not in _TRANSIENT:
            return status, body
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return await post(app, request.path, request.body)


async def post(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """Post a body to an ASGI application; return status and body of its answer."""
    status, parts = 0, list[bytes]()
    sent = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        return sent.pop() if sent else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    headers = {"content-type": "application/json", "authorization": f"Bearer {_KEY}"}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return status, b"".join(parts)


def _line(custom_id: str, status: int, body: bytes) -> bytes:
    """Return a line of the output, in the form of OpenAI's Batch API."""
    number = uuid.uuid4().hex
    response = {"status_code": status, "request_id": number, "body": json.loads(body)}
    line = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": response}
    # ASCII: a name may hold half of a character
    return json.dumps({**line, "error": None}).encode() + b"\n"


def _requests(file: Path, max_body_bytes: int) -> Iterator[BatchRequest]:
    """Yield the requests of a file; exit with the number of a wrong line."""
    from varlen_client.gateway.routes import ROUTES

    paths = {route.path for route in ROUTES if "{" not in route.path}
    seen: set[str] = set()
    try:
        with file.open("rb") as lines:
            # a line that is too long comes in parts, and the first part is refused
            numbered = enumerate(iter(lambda: lines.readline(2 * max_body_bytes), b""), start=1)
            for number, line in numbered:
                if not line.strip():
                    continue
                try:
                    request = _request(line, paths, max_body_bytes)
                    if request.custom_id in seen:
                        raise ValueError(
                            f"the custom_id {request.custom_id[:_SHOWN]!r} is there twice"
                        )
                except ValueError as error:
                    usage_error(f"{file}, line {number}: {error}")
                seen.add(request.custom_id)
                yield request
    except OSError as error:
        usage_error(f"cannot read {file}: {error.strerror}")
    if not seen:
        usage_error(f"{file} has no request")


def _request(line: bytes, paths: set[str], max_body_bytes: int) -> BatchRequest:
    """Return the request of a line.

    Raises:
        ValueError: it is none, or none that a route answers.
    """
    try:
        read = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not a JSON object in UTF-8, on one line") from None
    _check("not a JSON object", holds=isinstance(read, dict))
    custom_id, method, path, body = map(read.get, ("custom_id", "method", "url", "body"))
    is_named = isinstance(custom_id, str) and custom_id != ""
    _check("no custom_id; each request needs a text of its own", holds=is_named)
    _check(f"the method is {str(method)[:_SHOWN]!r}; allowed: POST", holds=method == "POST")
    is_served = isinstance(path, str) and path in paths
    allowed = ", ".join(sorted(paths))
    _check(f"the url is {str(path)[:_SHOWN]!r}; allowed: {allowed}", holds=is_served)
    _check("the body is not an object", holds=isinstance(body, dict))
    _check(
        "the body asks for a stream; answers in a file are whole: leave stream out",
        holds=not body.get("stream"),
    )
    try:
        content = json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    _check(
        f"the body has {len(content)} bytes; allowed: {max_body_bytes}",
        holds=len(content) <= max_body_bytes,
    )
    return BatchRequest(custom_id, path, content)


def _check(message: str, *, holds: bool) -> None:
    if not holds:
        raise ValueError(message)


def _keep_final(output: Path, names: frozenset[str]) -> set[str]:
    """Keep the final answers of an output; return the names of their requests.

    A last line that was written in part, and a failure that may succeed now, leave the file. It is replaced at once or
    not at all.
    """
    if not output.exists():
        return set()
    done: set[str] = set()
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with output.open("rb") as lines, part.open("xb") as kept:
            for line in lines:
                is_ours = line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
                if is_ours and not line.endswith(b"\n"):
                    continue
                try:
                    read = json.loads(line)
                    name, status = read["custom_id"], read["response"]["status_code"]
                    is_asked = name in names
                except (ValueError, KeyError, TypeError, RecursionError):
                    usage_error(f"{output} is no output of a batch; give another name")
                if not is_asked:
                    usage_error(f"{output} answers {str(name)[:_SHOWN]!r}, which the input has not")
                if status not in _TRANSIENT and name not in done:
                    done.add(name)
                    kept.write(line)
            kept.flush()
            os.fsync(kept.fileno())
        part.replace(output)
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror}")
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return done
