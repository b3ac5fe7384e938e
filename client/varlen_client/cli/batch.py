"""The command `varlen batch`: the requests of a file, in the form of OpenAI's Batch API.

The routes of the gateway answer in this process, so what `varlen serve-http` takes as a body is what a line may have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from varlen_client.gateway.batches import BatchRequest


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
        if not left:
            return
        with output.open("ab") as stream, show_progress("answering", left) as report:
            asyncio.run(answer(stream, report))
    except BatchFileError as error:
        usage_error(f"{output}: {error.args[0]}")
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror}")
    except KeyboardInterrupt:
        fail(f"interrupted; what was answered is in {output}: run the same command to go on")
    failed = left - statuses.count(200)
    print_message(f"answered {left - failed} of {left} requests in {output}")
    if failed:
        fail(f"{failed} requests failed; their lines in {output} have the reasons")
