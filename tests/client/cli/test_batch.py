"""The command `varlen batch` over a gateway with fake models."""

import json

import pytest

from tests.client.gateway.fake_models import Calls, FakeClient
from varlen_client.errors import ServerUnavailable
from varlen_client.gateway import app as gateway_app
from varlen_client.gateway import batches

from .conftest import run


@pytest.fixture
def calls(monkeypatch):
    """Calls of fake models, which take the place of a server's."""
    calls, create = Calls(), gateway_app.create_app
    monkeypatch.setattr(
        gateway_app,
        "create_app",
        lambda settings: create(settings, lambda name: FakeClient(calls, name)),
    )
    monkeypatch.setattr(batches, "_FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "200")
    return calls


def request(name, url="/v1/embeddings", **body):
    body = body or {"model": "embedder", "input": name}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(folder, *requests):
    file = folder / "in.jsonl"
    file.write_text("\n".join(map(json.dumps, requests)) + "\n")
    return file


def answers(output):
    """Return status and body of each answer, by the name of its request."""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found = {each["custom_id"]: each["response"] for each in lines}
    assert len(found) == len(lines)
    assert all(each["error"] is None and each["id"].startswith("batch_req_") for each in lines)
    return {name: (each["status_code"], each["body"]) for name, each in found.items()}


def test_requests_of_several_routes_are_answered_as_the_gateway_answers_them(tmp_path, calls):
    file = write(
        tmp_path,
        request("a"),
        request("b", "/v1/rerank", model="ranker", query="q", documents=["x", "y"]),
        request("c", "/v1/completions", model="writer", prompt="The", max_tokens=3),
        request("d", "/v1/embeddings", model="embedder", input=["1", "2"]),
    )

    result = run("batch", file, "--output", tmp_path / "out.jsonl", "--concurrency", 2)

    assert result.exit_code == 0, result.stderr
    assert "answered 4 of 4 requests" in result.stderr
    found = answers(tmp_path / "out.jsonl")
    assert {status for status, _ in found.values()} == {200}
    assert len(found["a"][1]["data"][0]["embedding"]) == 4
    assert {each["index"] for each in found["b"][1]["results"]} == {0, 1}
    assert found["c"][1]["object"] == "text_completion"
    assert len(found["d"][1]["data"]) == 2


def test_a_refused_request_has_its_error_and_the_others_are_answered(tmp_path, calls):
    file = write(tmp_path, request("a"), request("b", model="embedder", input=[]), request("c"))

    result = run("batch", file, "--output", tmp_path / "out.jsonl")

    assert result.exit_code == 1
    assert "1 requests failed" in result.stderr
    found = answers(tmp_path / "out.jsonl")
    assert [found[name][0] for name in "abc"] == [200, 400, 200]
    assert "input" in found["b"][1]["error"]["message"]
    calls.received.clear()

    again = run("batch", file, "--output", tmp_path / "out.jsonl")

    assert again.exit_code == 1
    assert "1 requests failed" in again.stderr
    assert calls.received == []


def test_a_later_run_sends_only_what_has_no_final_answer(tmp_path, calls):
    names = [f"r{number}" for number in range(6)]
    file, output = write(tmp_path, *map(request, names)), tmp_path / "out.jsonl"
    assert run("batch", file, "--output", output).exit_code == 0
    lines = sorted(output.read_bytes().splitlines(keepends=True))
    busy = json.loads(lines[3])
    busy["response"]["status_code"] = 503
    # a run that was killed while it wrote
    output.write_bytes(b"".join(lines[:3]) + json.dumps(busy).encode() + b"\n" + lines[4][:40])
    calls.received.clear()

    result = run("batch", file, "--output", output)

    assert result.exit_code == 0, result.stderr
    assert "3 of 6 requests are answered" in result.stderr
    assert len(calls.received) == 3
    found = answers(output)
    assert {name: status for name, (status, _) in found.items()} == dict.fromkeys(names, 200)
    assert output.read_bytes().startswith(b"".join(lines[:3]))
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}
    assert run("batch", file, "--output", output).exit_code == 0
    assert len(calls.received) == 3


def test_a_request_that_fails_for_a_while_is_sent_again(tmp_path, calls, monkeypatch):
    times = iter(range(3))
    counted = FakeClient.counted

    async def busy_at_first(self, *arguments, **options):
        if next(times, None) is not None:
            raise ServerUnavailable("the queue is full")
        return await counted(self, *arguments, **options)

    monkeypatch.setattr(FakeClient, "counted", busy_at_first)
    output = tmp_path / "out.jsonl"

    result = run("batch", write(tmp_path, request("a")), "--output", output)

    assert result.exit_code == 0, result.stderr
    assert answers(output)["a"][0] == 200
    assert next(times, None) is None


def test_a_server_that_stays_down_leaves_an_error_that_a_later_run_asks_again(tmp_path, calls):
    file, output = write(tmp_path, request("a")), tmp_path / "out.jsonl"
    calls.failure = ServerUnavailable("the server does not answer")

    assert run("batch", file, "--output", output).exit_code == 1
    assert answers(output)["a"][0] == 503
    calls.failure = None

    assert run("batch", file, "--output", output).exit_code == 0
    assert answers(output)["a"][0] == 200


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'"\xff"', "not a JSON object in UTF-8"),
        (b"[" * 100_000, "not a JSON object"),
        (json.dumps(request("")).encode(), "no custom_id"),
        (json.dumps(request("x" * 1025)).encode(), "up to 1024 characters"),
        (b'{"custom_id": [' + b"1," * 600_000 + b"1]}", "allowed: up to 589824"),
        (json.dumps(request("a")).encode(), "the custom_id 'a' is there twice"),
        (json.dumps(request("b") | {"method": "GET"}).encode(), "'GET'; allowed: POST"),
        (json.dumps(request("b", "/v1/files")).encode(), "'/v1/files'; allowed: /"),
        (json.dumps(request("b") | {"body": []}).encode(), "the body is not an object"),
        (json.dumps(request("b", stream=True)).encode(), "leave stream out"),
        (json.dumps(request("b", input="x" * (9 << 20))).encode(), "allowed: 8388608"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_sent(tmp_path, calls, line, message):
    file = tmp_path / "in.jsonl"
    file.write_bytes(json.dumps(request("a")).encode() + b"\n\n" + line + b"\n")

    result = run("batch", file, "--output", tmp_path / "out.jsonl")

    assert result.exit_code == 2
    assert "line 3: " in result.stderr
    assert message in result.stderr
    assert not calls.received
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_of_something_else_is_kept(tmp_path, calls):
    output = tmp_path / "out.jsonl"
    for text, message in [
        ("a report\n", "no output of a batch"),
        ("a report", "no output of a batch"),
        ('{"id": 1, "custom_id": "a"}', "no output of a batch"),
        ('{"custom_id": [], "response": {"status_code": 200}}\n', "no output of a batch"),
        ('{"custom_id": "a", "response": {"status_code": 200}}\n', "no output of a batch"),
        (batches._line("x", 200, b"{}").decode(), "answers 'x'"),
    ]:
        output.write_text(text)

        result = run("batch", write(tmp_path, request("a")), "--output", output)

        assert result.exit_code == 2
        assert message in result.stderr
        assert output.read_text() == text


def test_a_name_of_half_a_character_is_answered(tmp_path, calls):
    output = tmp_path / "out.jsonl"

    result = run("batch", write(tmp_path, request("\ud800")), "--output", output)

    assert result.exit_code == 1
    # the same text is what the request embeds
    assert answers(output)["\ud800"][0] == 400


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_requests_is_refused(tmp_path, calls, content):
    (tmp_path / "in.jsonl").write_text(content)

    result = run("batch", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")

    assert result.exit_code == 2
    assert "has no request" in result.stderr
