"""Files and batches of a gateway, as the `openai` client sees them."""

import asyncio
import json
from contextlib import asynccontextmanager

import openai
import pytest

from varlen_client.errors import ServerUnavailable
from varlen_client.gateway import batches, edge, forms
from varlen_client.gateway.models import TENANT, tenant_of

from .asgi import Exchange
from .conftest import http_client
from .fake_models import FakeClient

EMBEDDINGS = "/v1/embeddings"
ENDED = ("completed", "failed", "cancelled")


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Let requests be sent again without a pause, and let no free space be needed."""
    monkeypatch.setattr(batches, "_FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(batches, "MIN_FREE_BYTES", 0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "batches"


@pytest.fixture
def running(make_app, folder):
    """Return a context manager that runs a gateway with the folder, and yields its clients."""

    @asynccontextmanager
    async def running(**settings):
        app = make_app(batch_folder=folder, **settings)
        async with app.router.lifespan_context(app), http_client(app) as transport:
            yield openai.AsyncOpenAI(
                base_url="http://gateway/v1",
                http_client=transport,
                api_key=settings.get("api_keys", ["none"])[0],
                max_retries=0,
            )

    return running


def lines(*names, **body):
    """Return a file that embeds names, or has other bodies."""
    return b"".join(
        json.dumps(
            {
                "custom_id": name,
                "method": "POST",
                "url": EMBEDDINGS,
                "body": {"model": "embedder", "input": name} | body,
            }
        ).encode()
        + b"\n"
        for name in names
    )


async def create(client, content, endpoint=EMBEDDINGS, **options):
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options
    )


async def ended(client, batch):
    while batch.status not in ENDED:
        await asyncio.sleep(0)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def answers(client, file_id):
    """Return the answers of a file by the names of their requests."""
    text = (await client.files.content(file_id)).text
    found = {each["custom_id"]: each for each in map(json.loads, text.splitlines())}
    assert len(found) == len(text.splitlines())
    return found


def refusal(call, *arguments, **options):
    """Return the status and the message of a call that is refused."""

    async def run():
        with pytest.raises(openai.APIStatusError) as caught:
            await call(*arguments, **options)
        return caught.value.status_code, caught.value.message

    return run()


def test_a_batch_is_answered_in_two_files(running, calls):
    async def run():
        async with running() as client:
            content = lines("a", "b") + lines("c", input=[])
            batch = await create(client, content, metadata={"name": "mine"})
            assert (batch.status, batch.metadata) == ("validating", {"name": "mine"})
            batch = await ended(client, batch)
            assert batch.status == "completed"
            counts = batch.request_counts
            assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
            assert batch.created_at <= batch.in_progress_at <= batch.completed_at
            done = await answers(client, batch.output_file_id)
            assert {name: each["response"]["status_code"] for name, each in done.items()} == {
                "a": 200,
                "b": 200,
            }
            assert len(done["a"]["response"]["body"]["data"][0]["embedding"]) == 4
            failed = await answers(client, batch.error_file_id)
            assert failed["c"]["response"]["status_code"] == 400
            assert batch.errors is None

    asyncio.run(run())


def test_files_are_listed_read_and_deleted(running):
    async def run():
        async with running() as client:
            made = [
                await client.files.create(file=(name, b"content"), purpose="batch")
                for name in ("a", "../b", "ü c")
            ]
            assert [each.filename for each in made] == ["a", "../b", "ü c"]
            listed = [each.id async for each in client.files.list(limit=2)]
            assert listed == [each.id for each in reversed(made)]
            oldest = await client.files.list(order="asc", after=made[0].id)
            assert [each.id for each in oldest.data] == [made[1].id, made[2].id]
            assert (await client.files.list(purpose="fine-tune")).data == []
            found = await client.files.retrieve(made[1].id)
            assert (found.bytes, found.purpose, found.status) == (7, "batch", "processed")
            assert (await client.files.content(made[1].id)).text == "content"
            assert (await client.files.delete(made[1].id)).deleted
            for call in (client.files.retrieve, client.files.content, client.files.delete):
                status, message = await refusal(call, made[1].id)
                assert status == 404
                assert "no file" in message

    asyncio.run(run())


@pytest.mark.parametrize(
    "content, line, message",
    [
        (b"", None, "no request"),
        (lines("a") + b"{\n", 2, "not a JSON object"),
        (lines("a", "a"), 2, "twice"),
        (lines("a", "b", "c"), 3, "more than 2 requests"),
        (lines("a").replace(b"embeddings", b"rerank"), 1, "allowed: /v1/embeddings"),
    ],
)
def test_a_wrong_file_is_named_by_its_line_and_nothing_is_sent(
    running, calls, monkeypatch, content, line, message
):
    monkeypatch.setattr(batches, "MAX_REQUESTS", 2)

    async def run():
        async with running() as client:
            return await ended(client, await create(client, content))

    batch = asyncio.run(run())

    assert batch.status == "failed"
    [error] = batch.errors.data
    assert error.line == line
    assert message in error.message
    assert calls.received == []


def test_a_cancelled_batch_keeps_its_answers(running, calls, monkeypatch):
    monkeypatch.setattr(batches, "CONCURRENCY", 1)
    counted, held = FakeClient.counted, asyncio.Event()

    async def second_waits(self, *arguments, **options):
        if calls.received:
            await held.wait()
        return await counted(self, *arguments, **options)

    monkeypatch.setattr(FakeClient, "counted", second_waits)

    async def run():
        async with running() as client:
            batch = await create(client, lines("a", "b", "c"))
            later = await create(client, lines("d"))
            while batch.request_counts.completed < 1:
                await asyncio.sleep(0)
                batch = await client.batches.retrieve(batch.id)
            reading = await refusal(client.files.delete, batch.input_file_id)
            assert batch.id in reading[1]
            # one that waits has nothing to end
            assert (await client.batches.cancel(later.id)).status == "cancelled"
            assert (await client.batches.cancel(batch.id)).status == "cancelling"
            held.set()
            batch = await ended(client, batch)
            assert batch.status == "cancelled"
            # one was in flight
            assert (await answers(client, batch.output_file_id)).keys() == {"a", "b"}
            assert batch.error_file_id is None
            assert (await refusal(client.batches.cancel, batch.id))[0] == 400
            found = [each.id async for each in client.batches.list(limit=1)]
            assert found == [later.id, batch.id]

    asyncio.run(run())


def test_a_gateway_that_starts_again_goes_on(running, calls, folder, monkeypatch):
    counted, held = FakeClient.counted, asyncio.Event()

    async def some_wait(self, *arguments, **options):
        if len(calls.received) >= 2:
            await held.wait()
        return await counted(self, *arguments, **options)

    async def run():
        with monkeypatch.context() as patched:
            patched.setattr(FakeClient, "counted", some_wait)
            patched.setattr(batches, "CONCURRENCY", 1)
            async with running() as client:
                batch = await create(client, lines(*"abcd"))
                while batch.request_counts.completed < 2:
                    await asyncio.sleep(0)
                    batch = await client.batches.retrieve(batch.id)
        # what a kill leaves: a part of an upload, and of a line
        part = folder / f"file-{'0' * 32}"
        part.write_bytes(b"part")
        [output] = [path for path in folder.iterdir() if b"batch_req" in path.read_bytes()]
        with output.open("ab") as stream:
            stream.write(b'{"id": "batch_req_')
        calls.received.clear()
        async with running() as client:
            batch = await ended(client, batch)
            assert batch.status == "completed"
            assert batch.request_counts.completed == 4
            assert (await answers(client, batch.output_file_id)).keys() == set("abcd")
        assert not part.exists()

    asyncio.run(run())

    assert len(calls.received) == 2


def test_requests_wait_for_a_server_that_is_busy(running, monkeypatch):
    times = iter(range(20))
    counted = FakeClient.counted

    async def busy_at_first(self, *arguments, **options):
        if next(times, None) is not None:
            raise ServerUnavailable("the queue is full")
        return await counted(self, *arguments, **options)

    monkeypatch.setattr(FakeClient, "counted", busy_at_first)

    async def run():
        async with running() as client:
            return await ended(client, await create(client, lines("a")))

    assert asyncio.run(run()).request_counts.completed == 1


def test_a_request_that_the_gateway_fails_at_has_an_answer_and_the_others_go_on(
    running, monkeypatch
):
    counted, failed = FakeClient.counted, iter([True])

    async def fails_once(self, *arguments, **options):
        if next(failed, False):
            raise ZeroDivisionError
        return await counted(self, *arguments, **options)

    monkeypatch.setattr(FakeClient, "counted", fails_once)

    async def run():
        async with running() as client:
            batch = await ended(client, await create(client, lines(*"abc")))
            assert batch.status == "completed"
            assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
            return await answers(client, batch.error_file_id)

    [answer] = asyncio.run(run()).values()

    assert answer["response"]["status_code"] == 500
    assert "the gateway failed" in answer["response"]["body"]["error"]["message"]


def test_answers_wait_for_a_disk_that_is_full(running, monkeypatch):
    monkeypatch.setattr(batches, "_RETRY_SECONDS", 0.0)
    free = iter([0] * 3)
    has_room = batches.Folder.has_room

    def full_at_first(self, wanted=0):
        return next(free, None) is None if wanted == 0 else has_room(self)

    monkeypatch.setattr(batches.Folder, "has_room", full_at_first)

    async def run():
        async with running() as client:
            return await ended(client, await create(client, lines("a")))

    assert asyncio.run(run()).request_counts.completed == 1
    assert next(free, None) is None


def test_a_failure_that_cannot_be_written_stops_no_later_batch(running, monkeypatch):
    monkeypatch.setattr(batches, "_RETRY_SECONDS", 0.0)
    save, start, both_are_there = batches.Folder.save, batches.Jobs._run, asyncio.Event()

    async def waits(self, job):
        await both_are_there.wait()
        await start(self, job)

    def without_failures(self, record):
        if record.get("status") == "failed":
            raise OSError("the disk is full")
        save(self, record)

    monkeypatch.setattr(batches.Jobs, "_run", waits)
    monkeypatch.setattr(batches.Folder, "save", without_failures)

    async def run():
        async with running() as client:
            wrong, later = await create(client, b"{"), await create(client, lines("a"))
            both_are_there.set()
            return await ended(client, wrong), await ended(client, later)

    wrong, later = asyncio.run(asyncio.wait_for(run(), 60))

    assert (wrong.status, later.status) == ("failed", "completed")


@pytest.mark.parametrize("limit", ["0", "x", "-1", "10001", "1" * 5000])
def test_a_wrong_limit_of_a_list_is_refused(running, limit):
    async def run():
        async with running() as client:
            for resource in (client.files, client.batches):
                status, message = await refusal(resource.list, extra_query={"limit": limit})
                assert status == 400
                assert "allowed: 1 to 10000" in message

    asyncio.run(run())


def test_files_and_batches_are_of_one_key_and_all_batches_are_one_tenant(
    running, monkeypatch, calls
):
    tenants, counted = [], FakeClient.counted

    async def noted(self, *arguments, **options):
        tenants.append(TENANT.get())
        return await counted(self, *arguments, **options)

    monkeypatch.setattr(FakeClient, "counted", noted)

    async def run():
        async with running(api_keys=("one", "two")) as client:
            batch = await ended(client, await create(client, lines("a")))
            other = client.with_options(api_key="two")
            for call, given in [
                (other.files.retrieve, batch.input_file_id),
                (other.files.content, batch.output_file_id),
                (other.files.delete, batch.output_file_id),
                (other.batches.retrieve, batch.id),
                (other.batches.cancel, batch.id),
            ]:
                assert (await refusal(call, given))[0] == 404
            assert (await other.files.list()).data == (await other.batches.list()).data == []
            status, _ = await refusal(
                other.batches.create,
                input_file_id=batch.input_file_id,
                endpoint=EMBEDDINGS,
                completion_window="24h",
            )
            assert status == 404
            wrong = client.with_options(api_key="three")
            assert (await refusal(wrong.files.list))[0] == 401
            assert (await refusal(wrong.files.create, file=b"x", purpose="batch"))[0] == 401

    asyncio.run(run())

    assert tenants == [tenant_of("varlen batch")]


@pytest.mark.parametrize(
    "fields, status, message",
    [
        ({"endpoint": "/v1/files"}, 400, "allowed: /"),
        ({"completion_window": "48h"}, 400, "24h"),
        ({"input_file_id": "../../x"}, 404, "no file"),
        ({"metadata": {"a": "b" * 513}}, 400, "at most 512"),
    ],
)
def test_a_wrong_batch_is_refused(running, fields, status, message):
    async def run():
        async with running() as client:
            file = await client.files.create(file=b"x", purpose="batch")
            given = {"input_file_id": file.id, "endpoint": EMBEDDINGS, "completion_window": "24h"}
            return await refusal(client.batches.create, **given | fields)

    found = asyncio.run(run())

    assert found[0] == status
    assert message in found[1]


def part(name, content, more=""):
    return f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{content}\r\n'


FILE = part("file", "one\r\n--two\r\n", '; filename="f"')
PURPOSE = part("purpose", "batch")
FORM = {"Content-Type": "multipart/form-data; boundary=x"}


def upload(running, body, headers=FORM, size=None, **settings):
    """Upload a body in parts of some bytes; return status, answer and content."""

    async def parts():
        for begin in range(0, len(body), size):
            yield body[begin : begin + size]

    async def run():
        async with running(**settings) as client:
            send = client._client
            content = parts() if size else body
            found = await send.post("/v1/files", content=content, headers=headers)
            answer = found.json()
            if found.status_code != 200:
                return found.status_code, answer["error"]["message"], None
            read = await send.get(f"/v1/files/{answer['id']}/content")
            return found.status_code, answer, read.content

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    "order", [FILE + PURPOSE + "--x--", "before\r\n" + PURPOSE + FILE + "--x--\r\n"]
)
def test_a_form_is_read_in_any_parts(running, size, order):
    status, answer, content = upload(running, order.encode(), size=size)

    assert (status, content) == (200, b"one\r\n--two\r\n")
    assert (answer["filename"], answer["bytes"]) == ("f", 12)


@pytest.mark.parametrize(
    "body, headers, status, message",
    [
        (FILE + "--x--", FORM, 400, "purpose is None"),
        (FILE + part("purpose", "vision") + "--x--", FORM, 400, "'vision'; allowed: 'batch'"),
        (PURPOSE + "--x--", FORM, 400, "no field file"),
        (PURPOSE + FILE, FORM, 400, "ends before"),
        ("", FORM, 400, "ends before"),
        (FILE + FILE + PURPOSE + "--x--", FORM, 400, "twice"),
        (
            FILE + PURPOSE + part("expires_after[seconds]", "60") + "--x--",
            FORM,
            400,
            "allowed: file, purpose",
        ),
        (part("purpose", "b" * 2000) + "--x--", FORM, 400, "more than 1024 bytes"),
        (PURPOSE + "--x" + "y" * 5000, FORM, 400, "more than 4096 bytes"),
        ("{}", {"Content-Type": "application/json"}, 400, "send multipart/form-data"),
    ],
)
def test_a_wrong_upload_is_refused_and_leaves_nothing(
    running, folder, body, headers, status, message
):
    found = upload(running, body.encode(), headers)

    assert found[0] == status
    assert message in found[1]
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_uploads_are_limited_before_they_are_read(running, monkeypatch):
    body = (FILE + PURPOSE + "--x--").encode()
    monkeypatch.setattr(edge, "MAX_FORM_BYTES", len(body) - 1)
    assert upload(running, body)[0] == 413
    # without a length
    monkeypatch.setattr(forms, "MAX_FORM_BYTES", len(body) - 1)
    assert upload(running, body, size=50)[0] == 413
    for module in (edge, forms):
        monkeypatch.setattr(module, "MAX_FORM_BYTES", len(body))
    # bodies of other routes are smaller
    assert upload(running, body, max_body_bytes=1)[0] == 200
    monkeypatch.setattr(batches, "MAX_FILES", 1)
    assert "delete some" in upload(running, body)[1]
    monkeypatch.setattr(batches, "MAX_FILES", 2)
    monkeypatch.setattr(batches, "MIN_FREE_BYTES", 1 << 62)
    assert upload(running, body)[0] == 507


def test_a_slow_upload_ends(running, monkeypatch, folder):
    monkeypatch.setattr(forms, "_SLOW_SECONDS", 0.05)

    async def slow():
        yield FILE.encode()
        await asyncio.Event().wait()

    async def run():
        async with running() as client:
            return await client._client.post("/v1/files", content=slow(), headers=FORM)

    found = asyncio.run(run())
    assert (found.status_code, found.headers["connection"]) == (408, "close")
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_client_that_leaves_in_an_upload_leaves_nothing(make_app, folder):
    app, messages = make_app(batch_folder=folder), [{"type": "http.disconnect"}]

    async def receive():
        return messages.pop()

    async def run():
        exchange = Exchange("/v1/files", headers=FORM)
        exchange._receive = receive
        async with app.router.lifespan_context(app):
            return await exchange.run(app)

    assert asyncio.run(run()).sent == []
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_gateway_without_a_folder_has_no_files(send):
    for method, path in [("POST", "/v1/files"), ("GET", "/v1/batches")]:
        assert send(method, path).status_code == 404


def test_a_folder_is_of_one_gateway_which_touches_nothing_else_in_it(folder):
    folder.mkdir()
    (folder / "file-1.pdf").write_bytes(b"a document")
    (folder / "x.json").write_text("[")
    first = batches.Folder(folder)
    with pytest.raises(OSError, match="another gateway has it"):
        batches.Folder(folder)
    first.close()
    batches.Folder(folder).close()
    assert {path.name for path in folder.iterdir()} == {"file-1.pdf", "x.json", "lock"}
