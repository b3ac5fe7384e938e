"""OpenAI's `/v1/files` and `/v1/batches`, and the requests of a file that `varlen batch` answers too.

A file is its content, by its id, and a JSON with what clients see. The JSON comes last and at once: a content without
one is a part, which the next start removes. Ids are random, and no path has a text of a client. Jobs write each answer
as it comes, so that the next gateway with the folder goes on.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from errno import ENOSPC
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple, TypeAlias

from fastapi import FastAPI, HTTPException, Request
from pydantic import Field, StrictStr
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import Fields
from varlen_client.gateway.errors import bug_response
from varlen_client.gateway.forms import FILES_PATH, MAX_FORM_BYTES, read_form
from varlen_client.gateway.json_io import MAX_IDS, MAX_VALUES, json_response, size_of
from varlen_client.gateway.models import IN_PROCESS, TENANT, Gateway, tenant_of
from varlen_client.gateway.routes import ROUTES
from varlen_client.waits import cancel_all

_LOG = logging.getLogger("varlen.gateway")

# As many as OpenAI allows in a file.
MAX_REQUESTS = 50_000
# Most files of an API key; the outputs of batches count, but are never refused.
MAX_FILES = 1000
# Most batches of an API key that have not ended, and that have.
MAX_OPEN, MAX_KEPT = 100, 1000
# Requests in flight for an API key.
CONCURRENCY = 16
# Most entries of a list; without a `limit`, it has 100.
_MOST_SHOWN = 10_000
# Free bytes of the disk that uploads and answers leave.
MIN_FREE_BYTES = 256 << 20
# Time between two tries of a job whose files cannot be written.
_RETRY_SECONDS = 30.0
# Most characters of a text of a client that is kept or shown.
_MAX_NAME = 255
_OURS = re.compile(r"(file-|batch_)[0-9a-f]{32}(\.json)?")
_ENDED = ("completed", "failed", "cancelled")

# OpenAI's object of a file or a batch. Keys that begin with _ are not shown: `_owner` is the tenant of an API key,
# `_files` are the ids of the files that get the answers and the failures of a batch.
Record: TypeAlias = dict[str, Any]
Kind: TypeAlias = Literal["file", "batch"]
# All files are one tenant of the server, so that they do not take the share of others.
BATCH_TENANT = tenant_of("varlen batch")
# Paths that a line may have.
BATCH_PATHS = frozenset(route.path for route in ROUTES if "{" not in route.path)

# Statuses of requests that may succeed later: the server is full, does not answer, or was too slow.
_TRANSIENT = (408, 429, 502, 503, 504)
# Statuses of a server that is full or does not answer.
_BUSY = (429, 503)
_ATTEMPTS = 8
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
# Beginnings of the lines of an output.
_BEGINNING = b'{"id": "batch_req_'
_ANSWER = re.compile(
    rb'\{"id": "batch_req_[0-9a-f]{32}", "custom_id": ("(?:[^"\\]|\\.)*"), '
    rb'"response": \{"status_code": (\d{3}), '
)
# Most characters of the name of a request, and of one that an error shows.
_MAX_NAME = 1024
_SHOWN = 64


class BatchFileError(ValueError):
    """A file has another form; arguments are the reason and the line, or None."""


class BatchRequest(NamedTuple):
    """A line of a file of requests."""

    custom_id: str
    path: str
    body: bytes


def read_requests(
    file: Path, max_body_bytes: int, *, endpoint: str | None = None, most: int | None = None
) -> Iterator[BatchRequest]:
    """Yield the requests of a file.

    Args:
        endpoint: the only path that a line may have; None is each of BATCH_PATHS.
        most: most requests of the file; None is any number.

    Raises:
        BatchFileError: a line is no request, or the file has none or too many.
        OSError: the file cannot be read.
    """
    paths = BATCH_PATHS if endpoint is None else frozenset((endpoint,))
    seen: set[str] = set()
    with file.open("rb") as lines:
        # a line that is too long comes in parts, and the first part is refused
        numbered = enumerate(iter(lambda: lines.readline(2 * max_body_bytes), b""), start=1)
        for number, line in numbered:
            if not line.strip():
                continue
            try:
                request = _request(line, paths, max_body_bytes)
                name = request.custom_id
                _check(f"the custom_id {name[:_SHOWN]!r} is there twice", holds=name not in seen)
                is_allowed = most is None or len(seen) < most
                _check(f"the file has more than {most} requests; send several", holds=is_allowed)
            except (ValueError, InvalidRequest) as error:
                raise BatchFileError(str(error), number) from None
            seen.add(name)
            yield request
    if not seen:
        raise BatchFileError("the file has no request", None)


def _request(line: bytes, paths: Collection[str], max_body_bytes: int) -> BatchRequest:
    """Return the request of a line.

    Raises:
        ValueError, InvalidRequest: it is none, or none that a route answers.
    """
    size_of(line).check(MAX_VALUES + MAX_IDS)
    try:
        read = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not a JSON object in UTF-8, on one line") from None
    _check("not a JSON object", holds=isinstance(read, dict))
    custom_id, method, path, body = map(read.get, ("custom_id", "method", "url", "body"))
    is_named = isinstance(custom_id, str) and 0 < len(custom_id) <= _MAX_NAME
    needed = f"each request needs a text of its own, up to {_MAX_NAME} characters"
    _check(f"no custom_id; {needed}", holds=is_named)
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


async def answer_requests(
    app: ASGIApp,
    requests: Iterator[BatchRequest],
    write: Callable[[int, bytes], None],
    *,
    concurrency: int,
    goes_on: Callable[[], bool] = lambda: False,
) -> None:
    """Pass the status and the line of each answer to `write` as it comes.

    Args:
        goes_on: whether a request is sent again until the server takes it; else up to 8 times.
    """
    reading = asyncio.Lock()

    async def work() -> None:
        while True:
            # the workers share one iterator: what is read of the file is what is in flight
            async with reading:
                request = await asyncio.to_thread(next, requests, None)
            if request is None:
                return
            status, body = await _answer(app, request, goes_on)
            write(status, _line(request.custom_id, status, body))

    workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _answer(
    app: ASGIApp, request: BatchRequest, goes_on: Callable[[], bool]
) -> tuple[int, bytes]:
    """Return status and body of an answer; ask again while the server is busy."""
    pause, attempts = _FIRST_PAUSE_SECONDS, 1
    while True:
        status, body = await _post(app, request)
        is_last = attempts >= _ATTEMPTS and not (status in _BUSY and goes_on())
        if status not in _TRANSIENT or is_last:
            return status, body
        await asyncio.sleep(pause)
        pause, attempts = min(2 * pause, _LONGEST_PAUSE_SECONDS), attempts + 1


async def _post(app: ASGIApp, request: BatchRequest) -> tuple[int, bytes]:
    """Send a request to an application in this process; return status and body."""
    status, parts = 0, list[bytes]()
    sent = [{"type": "http.request", "body": request.body}]

    async def receive() -> Any:
        return sent.pop() if sent else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "method": "POST",
        "path": request.path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        IN_PROCESS: BATCH_TENANT,
    }
    try:
        await app(scope, receive, send)
    except Exception:
        # of this request alone; what was sent may be a part of an answer
        _LOG.exception("a request of a batch failed")
        return 500, bytes(bug_response().body)
    return status, b"".join(parts)


def _line(custom_id: str, status: int, body: bytes) -> bytes:
    """Return a line of an output, in ASCII: names may hold half characters."""
    if not body.isascii() or b"\n" in body:
        body = json.dumps(json.loads(body)).encode()
    number, name = secrets.token_hex(16), json.dumps(custom_id)
    head = (
        f'{{"id": "batch_req_{number}", "custom_id": {name}, "response": '
        f'{{"status_code": {status}, "request_id": "{number}", "body": '
    )
    return head.encode() + body + b'}, "error": null}\n'


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a stream; what is written replaces a file at once, or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def keep_final(output: Path, names: Collection[str]) -> dict[str, int]:
    """Keep the final answers of an output; return the status of each, by its name.

    A last line that was written in part, and a failure that may succeed now, leave the file.

    Args:
        names: names of the requests that the output answers.

    Raises:
        BatchFileError: the file is no output, or answers other requests.
        OSError: the file cannot be written.
    """
    if not output.exists():
        return {}
    done: dict[str, int] = {}
    with output.open("rb") as lines, _replacing(output) as kept:
        for line in lines:
            is_ours = line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
            if is_ours and not line.endswith(b"\n"):
                continue
            found = _ANSWER.match(line)
            if found is None:
                raise BatchFileError("the file is no output of a batch; give another name", None)
            name = json.loads(found[1])
            if name not in names:
                shown = repr(name[:_SHOWN])
                raise BatchFileError(f"the file answers {shown}, which the input has not", None)
            status = int(found[2])
            if status not in _TRANSIENT and name not in done:
                done[name] = status
                kept.write(line)
    return done


class BatchBody(Fields):
    """A request to `/v1/batches`."""

    input_file_id: StrictStr
    """Id of a file of requests."""
    endpoint: StrictStr
    """The path of each request."""
    completion_window: Literal["24h"] = "24h"
    """Ignored: a batch does not expire."""
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
        Field(max_length=16),
    ] = Field(default_factory=dict)


class Folder:
    """The files and batches of one gateway, which has the folder for itself.

    Raises:
        OSError: the folder cannot be used, or another gateway has it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise OSError(error.errno, "another gateway has it") from None
        # nothing else is read or removed
        ours = [each for each in path.iterdir() if _OURS.fullmatch(each.name)]
        found = [json.loads(each.read_bytes()) for each in ours if each.suffix]
        found.sort(key=lambda each: each["created_at"])
        self._records: dict[str, Record] = {each["id"]: each for each in found}
        kept = {name for job in self.open_jobs() for name in job["_files"]} | self._records.keys()
        for each in ours:
            if each.stem not in kept:
                each.unlink()

    def close(self) -> None:
        """Leave the folder to others."""
        os.close(self._lock)

    def content(self, file_id: str) -> Path:
        """Return the path of a content by an id that this gateway has made."""
        return self._path / file_id

    def get(self, kind: Kind, name: str) -> Record:
        """Return a record of the caller.

        Raises:
            HTTPException: there is none.
        """
        found = self._records.get(name)
        if found is None or (found["object"], found["_owner"]) != (kind, _owner()):
            raise HTTPException(404, f"there is no {kind} {name[:_MAX_NAME]!r}")
        return found

    def own(self, kind: Kind) -> list[Record]:
        """Return the records of the caller, the newest first."""
        wanted = kind, _owner()
        found = reversed(self._records.values())
        return [each for each in found if (each["object"], each["_owner"]) == wanted]

    def open_jobs(self, owner: str | None = None) -> list[Record]:
        """Return the batches of an owner, or all, that have not ended; the oldest first."""
        return [
            each
            for each in self._records.values()
            if each["object"] == "batch"
            and each["status"] not in _ENDED
            and owner in (None, each["_owner"])
        ]

    def save(self, record: Record) -> None:
        """Write a record at once: no reader and no kill sees a part."""
        with _replacing(self._path / f"{record['id']}.json") as stream:
            stream.write(json.dumps(record).encode())
        self._records[record["id"]] = record

    def remove(self, file_id: str) -> None:
        """Remove a record, and the content of a file."""
        del self._records[file_id]
        (self._path / f"{file_id}.json").unlink()
        self.content(file_id).unlink(missing_ok=True)

    def has_room(self, wanted: int = 0) -> bool:
        """Return whether the disk has free space for `wanted` bytes more."""
        return shutil.disk_usage(self._path).free - wanted >= MIN_FREE_BYTES

    async def publish(self, file_id: str, owner: str, filename: str, purpose: str) -> Record:
        """Show a content that is complete as a file of its owner."""
        with self.content(file_id).open("rb") as stream:
            await asyncio.to_thread(os.fsync, stream.fileno())
            size = os.fstat(stream.fileno()).st_size
        made = {
            "id": file_id,
            "object": "file",
            "_owner": owner,
            "created_at": int(time.time()),
            "filename": filename[:_MAX_NAME],
            "purpose": purpose,
            "bytes": size,
            "status": "processed",
        }
        self.save(made)
        return made


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def _owner() -> str:
    return TENANT.get() or ""


def _view(record: Record) -> Record:
    return {name: value for name, value in record.items() if name[0] != "_"}


class Jobs:
    """The batches of a gateway that run.

    Jobs of one API key run one after the other, jobs of different keys side by side.

    Args:
        app: application that answers the requests.
    """

    def __init__(self, folder: Folder, app: ASGIApp, max_body_bytes: int) -> None:
        self._folder, self._app, self._max_body_bytes = folder, app, max_body_bytes
        # by owner
        self._workers: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Go on with the jobs that have not ended."""
        for job in self._folder.open_jobs():
            self._wake(job["_owner"])

    async def stop(self) -> None:
        """Stop until the next start."""
        await cancel_all(list(self._workers.values()))
        self._folder.close()

    def create(self, body: BatchBody) -> Record:
        """Return a new job of the caller, which runs after the caller's others."""
        if body.endpoint not in BATCH_PATHS:
            allowed = ", ".join(sorted(BATCH_PATHS))
            raise InvalidRequest(f"endpoint is {body.endpoint[:64]!r}; allowed: {allowed}")
        purpose = self._folder.get("file", body.input_file_id)["purpose"]
        if purpose != "batch":
            raise InvalidRequest(f"the purpose of the file is {purpose}; allowed: batch")
        if len(self._folder.open_jobs(_owner())) >= MAX_OPEN:
            raise InvalidRequest(f"{MAX_OPEN} batches have not ended; wait, or cancel some")
        for old in self._folder.own("batch")[MAX_KEPT:]:
            if old["status"] in _ENDED:
                self._folder.remove(old["id"])
        job = {
            "id": _new_id("batch_"),
            "object": "batch",
            "_owner": _owner(),
            "_files": [_new_id("file-"), _new_id("file-")],
            "created_at": int(time.time()),
            "status": "validating",
            "request_counts": dict.fromkeys(("total", "completed", "failed"), 0),
            **body.model_dump(),
        }
        self._folder.save(job)
        self._wake(_owner())
        return job

    def cancel(self, job: Record) -> None:
        """Send no more requests of a job; its files have the answers until then."""
        status = job["status"]
        if status in (*_ENDED, "finalizing"):
            raise InvalidRequest(f"the batch is {status}; only one that runs can be cancelled")
        # one that waits for others has no answers
        is_first = job is self._folder.open_jobs(_owner())[0]
        self._move(job, "cancelling" if is_first else "cancelled")

    def _wake(self, owner: str) -> None:
        if owner not in self._workers:
            self._workers[owner] = asyncio.ensure_future(self._work(owner))

    async def _work(self, owner: str) -> None:
        """Run the jobs of an owner in the order of their creation."""
        try:
            while jobs := self._folder.open_jobs(owner):
                try:
                    await self._run_or_fail(jobs[0])
                except OSError as error:
                    _LOG.warning("%s: %s; it goes on later", jobs[0]["id"], error)
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            del self._workers[owner]

    async def _run_or_fail(self, job: Record) -> None:
        """Run a job to its end; raises OSError if its files cannot be written now."""
        try:
            await self._run(job)
        except OSError:
            raise
        except BatchFileError as error:
            self._fail(job, *error.args)
        except Exception:
            _LOG.exception("%s failed", job["id"])
            self._fail(job, "the gateway failed; its log has the reason")

    async def _run(self, job: Record) -> None:
        """Run a job to its end, from where it is."""
        paths = [self._folder.content(each) for each in job["_files"]]

        def goes_on(*_: object) -> bool:
            return bool(job["status"] != "cancelling")

        lines = partial(
            read_requests,
            self._folder.content(job["input_file_id"]),
            self._max_body_bytes,
            endpoint=job["endpoint"],
            most=MAX_REQUESTS,
        )

        def read() -> tuple[int, list[dict[str, int]]]:
            names = {request.custom_id for request in lines()}
            return len(names), [keep_final(path, names) for path in paths]

        total, (completed, failed) = await asyncio.to_thread(read)
        counts = {"total": total, "completed": len(completed), "failed": len(failed)}
        job["request_counts"] = counts
        if job["status"] == "validating":
            self._move(job, "in_progress")
        with paths[0].open("ab") as output, paths[1].open("ab") as failures:

            def write(status: int, line: bytes) -> None:
                if not self._folder.has_room():
                    raise OSError(ENOSPC, "the disk of --batch-folder is full")
                stream = output if status == 200 else failures
                stream.write(line)
                # it outlives a kill of this process
                stream.flush()
                counts["completed" if status == 200 else "failed"] += 1

            done = completed.keys() | failed
            left = (each for each in lines() if each.custom_id not in done)
            await answer_requests(
                self._app,
                takewhile(goes_on, left),
                write,
                concurrency=CONCURRENCY,
                goes_on=goes_on,
            )
        end = "completed" if goes_on() else "cancelled"
        if goes_on():
            self._move(job, "finalizing")
        for name, file_id, path in zip(("output", "error"), job["_files"], paths, strict=True):
            if path.stat().st_size:
                shown = f"{job['id']}_{name}.jsonl"
                await self._folder.publish(file_id, job["_owner"], shown, "batch_output")
                job[f"{name}_file_id"] = file_id
            else:
                path.unlink()
        self._move(job, end)
        _LOG.info("%s is %s: %s", job["id"], end, counts)

    def _fail(self, job: Record, message: str, line: int | None = None) -> None:
        error = {"code": "invalid_request", "message": message, "line": line, "param": None}
        job["errors"] = {"object": "list", "data": [error]}
        self._move(job, "failed")

    def _move(self, job: Record, status: str) -> None:
        job |= {"status": status, f"{status}_at": int(time.time())}
        self._folder.save(job)


def add_batch_routes(app: FastAPI, gateway: Gateway) -> Jobs | None:
    """Add the routes of files and batches; return the jobs, or None without a folder.

    Raises:
        OSError: the folder cannot be used.
    """
    if gateway.settings.batch_folder is None:
        return None
    folder = Folder(gateway.settings.batch_folder)
    jobs = Jobs(folder, app, gateway.settings.max_body_bytes)
    _add_file_routes(app, folder)

    @app.post("/v1/batches", tags=["OpenAI"])
    async def create_batch(body: BatchBody) -> Response:
        """Answer the requests of a file, at the lowest priority."""
        return json_response(_view(jobs.create(body)))

    @app.get("/v1/batches", tags=["OpenAI"])
    async def list_batches(request: Request) -> Response:
        """The batches of the API key: `limit`, `after` of the query."""
        return _page(folder.own("batch"), request)

    @app.get("/v1/batches/{batch_id}", tags=["OpenAI"])
    async def retrieve_batch(batch_id: str) -> Response:
        """One batch, with the counts of its requests."""
        return json_response(_view(folder.get("batch", batch_id)))

    @app.post("/v1/batches/{batch_id}/cancel", tags=["OpenAI"])
    async def cancel_batch(batch_id: str) -> Response:
        """Cancel a batch; what is answered stays."""
        job = folder.get("batch", batch_id)
        jobs.cancel(job)
        return json_response(_view(job))

    return jobs


def _add_file_routes(app: FastAPI, folder: Folder) -> None:
    @app.post(FILES_PATH, tags=["OpenAI"])
    async def upload(request: Request) -> Response:
        """Take a file with the purpose `batch`, as a form (multipart/form-data)."""
        if len(folder.own("file")) >= MAX_FILES:
            raise InvalidRequest(f"there are {MAX_FILES} files, and no more are kept; delete some")
        if not folder.has_room(MAX_FORM_BYTES):
            raise HTTPException(507, "the gateway's disk is full; delete files")
        file_id = _new_id("file-")
        path = folder.content(file_id)
        try:
            with path.open("xb") as stream:
                fields = await read_form(request, stream.write)
            name, purpose = fields.pop("file"), fields.pop("purpose", None)
            if purpose != "batch":
                raise InvalidRequest(f"purpose is {purpose!r}; allowed: 'batch'")
            if fields:
                raise InvalidRequest(f"the form has {min(fields)!r}; allowed: file, purpose")
        except BaseException:
            path.unlink()
            raise
        made = await folder.publish(file_id, _owner(), name, purpose)
        return json_response(_view(made))

    @app.get(FILES_PATH, tags=["OpenAI"])
    async def list_files(request: Request) -> Response:
        """The files of the API key: `purpose`, `limit`, `after`, `order` of the query."""
        return _page(folder.own("file"), request)

    @app.get("/v1/files/{file_id}", tags=["OpenAI"])
    async def retrieve_file(file_id: str) -> Response:
        """One file."""
        return json_response(_view(folder.get("file", file_id)))

    @app.get("/v1/files/{file_id}/content", tags=["OpenAI"])
    async def content(file_id: str) -> Response:
        """The content of a file."""
        path = folder.content(folder.get("file", file_id)["id"])
        return FileResponse(path, media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}", tags=["OpenAI"])
    async def delete_file(file_id: str) -> Response:
        """Delete a file that no open batch reads."""
        folder.get("file", file_id)
        for job in folder.open_jobs():
            if job["input_file_id"] == file_id:
                raise InvalidRequest(f"{job['id']} reads the file; wait for it, or cancel it")
        folder.remove(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


def _page(items: list[Record], request: Request) -> Response:
    """Return the part of a list that a query asks for, in OpenAI's form."""
    query = request.query_params
    purpose, after, limit = query.get("purpose"), query.get("after"), query.get("limit", "100")
    # isdecimal accepts the digits of every script, as int() does
    count = int(limit) if limit.isdecimal() and len(limit) < 6 else 0
    if not 1 <= count <= _MOST_SHOWN:
        raise InvalidRequest(f"limit is {limit[:_SHOWN]!r}; allowed: 1 to {_MOST_SHOWN}")
    shown = [_view(each) for each in items if purpose in (None, each.get("purpose"))]
    if query.get("order") == "asc":
        shown.reverse()
    ids = [each["id"] for each in shown]
    begin = ids.index(after) + 1 if after in ids else 0
    end = begin + count
    ends = {"first_id": ids[begin], "last_id": ids[:end][-1]} if ids[begin:end] else {}
    answer = {"object": "list", "data": shown[begin:end], "has_more": len(ids) > end, **ends}
    return json_response(answer)
