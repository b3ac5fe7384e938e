"""`varlen status`: servers, models, their load, and where metrics are."""

import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.client.conftest import free_port
from varlen_client.cli import status as cli_status
from varlen_client.transport import replicas


def test_status_prints_every_replica_and_fails_when_none_is_ready(varlen, server):
    gone = f"{server.url.partition(':')[0]}://127.0.0.1:{free_port()}"

    one = varlen("status", "--url", gone, "--url", server.url)
    none = varlen("status", "--url", gone, "--url", gone)

    assert (one.exit_code, none.exit_code) == (0, 1)
    assert f"NOT READY: {gone}: no connection" in one.stdout
    assert f"ready: fake 0.1 at {server.url}" in one.stdout
    assert none.stdout.count("NOT READY") == 2


def test_status_takes_one_metrics_url_for_one_server(varlen, server):
    result = varlen("status", "--url", server.url, "--url", server.url, "--metrics-url", "http://a")

    assert result.exit_code == 2
    assert "--metrics-url belongs to one server" in result.stderr


def test_status_reports_missing_metrics(varlen):
    result = varlen("status", "--metrics-url", "http://127.0.0.1:9/metrics")

    assert result.exit_code == 0
    assert "ready: fake 0.1" in result.stdout
    assert "off, or not at http://127.0.0.1:9/metrics" in result.stdout


def test_status_exits_1_when_the_model_is_not_ready(varlen, server):
    server.model.models = [("fake", "UNAVAILABLE")]

    result = varlen("status")

    assert result.exit_code == 1
    assert row(result, "fake") == ["fake", "NOT READY (UNAVAILABLE)"]


def test_status_shows_queue_rates_and_outcomes(varlen, metrics_page, monkeypatch):
    monkeypatch.setattr(cli_status, "SAMPLE_SECONDS", 0.2)

    result = varlen("status", "--metrics-url", metrics_page)

    assert result.exit_code == 0
    name, state, task, queued, rate, *_, outcomes = row(result, "fake")
    assert (name, state, task) == ("fake", "ready", "embed")
    assert (queued, outcomes) == ("7 (300 tokens)", "ok 30, failed 1")
    assert 20 < float(rate) <= 50


def test_status_shows_that_a_model_drains(varlen, monkeypatch):
    page = 'varlen_draining{model="fake",instance="fake_0_0",version="1"} 2\n'
    monkeypatch.setattr(cli_status, "fetch_metrics", lambda url, *, timeout: page)
    monkeypatch.setattr(cli_status, "SAMPLE_SECONDS", 0)

    result = varlen("status")

    assert result.exit_code == 0
    assert row(result, "fake")[:3] == ["fake", "draining", "embed"]


def row(result, model: str) -> list[str]:
    """Return the columns of a model that `varlen status` prints."""
    [line] = [line for line in result.stdout.splitlines() if line.startswith(f"{model} ")]
    return re.split(r"\s{2,}", line.strip())


def test_status_lists_all_models_unless_one_is_chosen(varlen, server):
    server.model.models = [("fake", "READY"), ("absent", ""), ("broken", "UNAVAILABLE")]

    result = varlen("status")
    chosen = varlen("status", "--model", "broken")

    assert (result.exit_code, chosen.exit_code) == (0, 1)
    assert row(result, "fake") == ["fake", "ready", "embed"]
    assert row(result, "absent") == ["absent", "NOT READY (not loaded)"]
    assert row(result, "broken") == row(chosen, "broken") == ["broken", "NOT READY (UNAVAILABLE)"]
    assert not re.search("^fake ", chosen.stdout, re.MULTILINE)


def test_status_of_several_ready_models_needs_no_choice(varlen, server):
    server.model.models = [("fake", "READY"), ("other", "READY")]

    result = varlen("status")

    assert result.exit_code == 0
    assert [row(result, name)[1] for name in ("fake", "other")] == ["ready", "ready"]


def test_status_of_many_models_opens_one_connection(varlen, server, monkeypatch):
    server.model.models = [(f"model{n}", "READY") for n in range(60)]
    opened = []

    def connect(*arguments):
        opened.append(arguments)
        return open_connection(*arguments)

    open_connection = replicas._connect
    monkeypatch.setattr(replicas, "_connect", connect)

    result = varlen("status")

    assert row(result, "model0") == ["model0", "ready", "embed"]
    assert result.stdout.count(" embed") == 60
    assert len(opened) == 1


def test_status_finds_the_metrics_after_the_ports_of_the_server(varlen, server, monkeypatch):
    asked = []
    page = 'nv_inference_count{model="%s",version="1"} 1\n'

    def fetch(url, *, timeout):
        asked.append(url)
        return page % ("fake" if ":8002" in url else "of another server")

    monkeypatch.setattr(cli_status, "fetch_metrics", fetch)
    monkeypatch.setattr(cli_status, "SAMPLE_SECONDS", 0)

    result = varlen("status")

    port = int(server.url.rpartition(":")[2])
    following = f"http://127.0.0.1:{port + (1 if server.url.startswith('grpc') else 2)}/metrics"
    assert asked[:2] == [following, "http://127.0.0.1:8002/metrics"]
    assert "metrics  http://127.0.0.1:8002/metrics" in result.stdout


def test_status_says_where_it_looked_for_metrics(varlen, monkeypatch):
    monkeypatch.setattr(cli_status, "fetch_metrics", lambda url, *, timeout: None)

    result = varlen("status")

    assert re.search(
        r"off, or not at http://127\.0\.0\.1:\d+/metrics or http://127\.0\.0\.1:8002/metrics \(give",
        result.stdout,
    )


@pytest.fixture
def metrics_page():
    """URL of a metrics page whose `ok` requests grow by 10 with each read."""
    ok = iter(range(10, 1000, 10))

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            labels = 'model="fake",instance="fake_0_0"'
            self.wfile.write(
                f"varlen_queued_requests{{{labels}}} 7\n"
                f"varlen_queued_tokens{{{labels}}} 300\n"
                f'varlen_requests_total{{{labels},outcome="ok"}} {next(ok)}\n'
                f'varlen_requests_total{{{labels},outcome="failed"}} 1\n'.encode()
            )

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{page.server_address[1]}/metrics"
        page.shutdown()
        thread.join()
