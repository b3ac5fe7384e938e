"""The command `varlen serve-http`: what it refuses, and what it gives to the gateway."""

import sys

import pytest
from typer.testing import CliRunner

from varlen_client.cli import main as cli


@pytest.fixture
def served(monkeypatch):
    """Return the configurations of uvicorn, which does not run."""
    configs = []

    def run(server):
        configs.append(server.config)
        server.started = True

    monkeypatch.setattr("varlen_client.gateway.http_server.GatewayServer.run_alone", run)
    for name in ("VARLEN_URL", "VARLEN_MODEL", "VARLEN_API_KEYS"):
        monkeypatch.delenv(name, raising=False)
    return configs


def serve(*arguments):
    return CliRunner().invoke(cli.app, ["serve-http", *arguments])


def test_listens_on_loopback_unless_told_otherwise(served):
    assert serve().exit_code == 0

    [config] = served
    assert (config.host, config.port) == ("127.0.0.1", 8080)


@pytest.mark.parametrize("name", ["auto_truncate", "strict"])
@pytest.mark.parametrize("is_on", [True, False])
def test_gives_the_gateway_its_switches(served, monkeypatch, name, is_on):
    found = []
    monkeypatch.setattr("varlen_client.gateway.app.create_app", found.append)

    assert serve(*[f"--{name.replace('_', '-')}"] * is_on).exit_code == 0
    assert [getattr(settings, name) for settings in found] == [is_on]


@pytest.mark.parametrize("given", ["option", "variable"])
def test_gives_the_gateway_the_urls_of_all_replicas(served, monkeypatch, given):
    found, urls = [], ("grpc://127.0.0.1:1", "grpc://127.0.0.1:2")
    monkeypatch.setattr("varlen_client.gateway.app.create_app", found.append)
    if given == "variable":
        monkeypatch.setenv("VARLEN_URL", " ".join(urls))
    arguments = [each for url in urls for each in ("--url", url)] if given == "option" else []

    assert serve(*arguments).exit_code == 0
    assert [settings.url for settings in found] == [urls]


def test_warns_of_an_open_address_without_a_key(served, monkeypatch):
    assert "warning: 0.0.0.0 may be reached" in serve("--host", "0.0.0.0").stderr
    monkeypatch.setenv("VARLEN_API_KEYS", "one two")
    assert serve("--host", "0.0.0.0").stderr == ""
    assert len(served) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--url", "ftp://a"], "must start with grpc://"),
        (["--url", "http://127.0.0.1"], "must be gRPC"),
        (["--api-key", ""], "an API key is empty"),
    ],
    ids=["scheme", "http", "key"],
)
def test_refuses_wrong_options(served, arguments, message):
    result = serve(*arguments)

    assert (result.exit_code, served) == (2, [])
    assert message in result.stderr


@pytest.mark.parametrize("value", ["", "  "], ids=["empty", "blank"])
def test_keys_that_are_set_and_empty_are_a_mistake(served, monkeypatch, value):
    monkeypatch.setenv("VARLEN_API_KEYS", value)

    result = serve()

    assert (result.exit_code, served) == (2, [])
    assert "VARLEN_API_KEYS is set and has no key" in result.stderr
    assert serve("--api-key", "key").exit_code == 0


@pytest.mark.parametrize("missing", ["uvicorn", "httptools"])
def test_says_what_to_install(served, monkeypatch, missing):
    monkeypatch.delitem(sys.modules, "varlen_client.gateway.http_server")
    monkeypatch.setitem(sys.modules, missing, None)

    result = serve()

    assert result.exit_code == 2
    assert f"serve-http needs {missing}; pip install 'varlen-client[http]'" in result.stderr
