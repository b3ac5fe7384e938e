"""The pages about the gateway name its paths and limits."""

import asyncio
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from starlette.routing import Route

from tests.ci.scripts import PROJECT
from varlen.decoding.text.chat import MAX_MESSAGES
from varlen_client.calls import DEFAULT_ROWS_PER_REQUEST
from varlen_client.gateway import GatewaySettings, unserved_fields
from varlen_client.gateway.app import create_app
from varlen_client.gateway.bodies import MAX_INPUTS
from varlen_client.gateway.generation import ChatBody, CompletionsBody

GATEWAY = (PROJECT / "docs/tasks/gateway.md").read_text()
TASK_PAGES = [page for page in (PROJECT / "docs/tasks").glob("*.md") if page.stem != "gateway"]
# The gateway has no path for this task.
NO_PATH = "masks"
MIGRATION = (PROJECT / "docs/start/migration.md").read_text()


@cache
def paths() -> frozenset[str]:
    """Return the paths of a gateway that has all of them."""

    async def found() -> frozenset[str]:
        with TemporaryDirectory() as folder:
            settings = GatewaySettings(url="grpc://127.0.0.1:1", batch_folder=Path(folder))
            app = create_app(settings)
            async with app.router.lifespan_context(app):
                routes = [route for route in app.routes if isinstance(route, Route)]
                return frozenset(route.path_format for route in routes)

    return asyncio.run(found())


def named_paths(text: str) -> set[str]:
    """Return the paths in code: `/embed` and `POST /embed`."""
    return set(re.findall(r"`(?:GET |POST |DELETE )?(/[\w/.{}]*)`", text))


def test_the_endpoints_are_those_of_the_gateway():
    listed = re.findall(r"^\| (`(?:GET|POST|DELETE) .*?) \|", GATEWAY, re.MULTILINE)

    found = {path.replace("/NAME", "/{name}") for row in listed for path in named_paths(row)}
    assert found == paths()


def test_the_table_of_fields_has_those_of_completions_and_chats():
    rows = [row for row in GATEWAY.splitlines() if re.match(r"\| (all|.*(compl|chats).*) \|", row)]

    named = set(re.findall(r"`([a-z_]+)", "\n".join(rows)))
    assert named >= CompletionsBody.model_fields.keys() | ChatBody.model_fields.keys()


@pytest.mark.parametrize("name", ["max_requests", "timeout_seconds", "watch_seconds"])
def test_the_table_of_limits_has_the_defaults_of_the_gateway(name):
    option = "--" + name.replace("timeout_seconds", "timeout").replace("_", "-")
    [default] = re.findall(rf"^\| `{option}` \| (\S+) \|", GATEWAY, re.MULTILINE)

    assert float(default) == getattr(GatewaySettings(url=""), name)


def test_the_page_names_every_field_that_is_not_served():
    names = {
        name
        for table in "TEXTS COHERE RANKS COMPLETIONS CHATS MESSAGES PARTS TOKENIZATION".split()
        for name in getattr(unserved_fields, table)
    }

    _, _, section = GATEWAY.partition("### Fields that are not served")
    assert names - set(re.findall(r"`([a-z_]+)`", section.partition("## ")[0])) == set()


def test_paths_that_moving_in_calls_missing_are_missing():
    rows = re.findall(r"^\| (.*) \| served \| not by the gateway", MIGRATION, re.MULTILINE)
    missing = named_paths("\n".join(rows))

    assert len(rows) > 3
    assert missing & paths() == set()


def test_all_other_paths_on_the_page_about_moving_in_are_served():
    rows = [line for line in MIGRATION.splitlines() if "not by the gateway" not in line]
    requests = set(re.findall(r"127\.0\.0\.1:8080(/[\w/]+)", MIGRATION))

    assert requests
    assert requests | named_paths("\n".join(rows)) <= paths()


def test_the_page_has_the_messages_that_the_server_takes():
    assert f"a chat {MAX_MESSAGES} messages" in GATEWAY


def test_moving_in_has_the_limits_of_a_request():
    assert f"takes up to {MAX_INPUTS} inputs" in MIGRATION
    assert f"at most {DEFAULT_ROWS_PER_REQUEST} rows" in MIGRATION


@pytest.mark.parametrize("page", TASK_PAGES, ids=lambda page: page.stem)
def test_a_task_page_opens_with_the_requests_to_gateway_and_server(page):
    text = page.read_text()

    sections = re.findall("^## (.*)$", text, re.MULTILINE)
    ports = re.findall(r"^curl 127\.0\.0\.1:(\d+)", text.partition("In Python:")[0], re.MULTILINE)

    assert sections[0] == "Request"
    assert "Config" not in sections[:2]
    assert list(dict.fromkeys(ports)) == (["8000"] if page.stem == NO_PATH else ["8080", "8000"])
