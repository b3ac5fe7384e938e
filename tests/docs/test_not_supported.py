"""What the page of unsupported things says is in the source, and refused."""

import re

from starlette.routing import Route

from tests.ci.scripts import PROJECT
from varlen.request.foreign_options import FOREIGN_OPTIONS
from varlen_client.gateway import GatewaySettings, unserved_fields
from varlen_client.gateway.app import create_app

from .messages import texts_of

PAGE = (PROJECT / "docs/start/not_supported.md").read_text()
# Cells of each row: what is not supported, what to do instead, what refuses it.
ROWS = re.findall(r"^\| (?!-|not supported)(.+?) \| (.+) \| (.+?) \|$", PAGE, re.MULTILINE)
# A name in code: a field of a request, or a path of the gateway.
FIELD = re.compile(r"`([a-z_]+)`")
PATH = re.compile(r"`(/[\w/]+)`")


def test_every_message_is_in_the_source():
    texts = texts_of(PROJECT / "backend/varlen")
    messages = [seen[1:-1] for *_, seen in ROWS if re.fullmatch("`[^`]+`", seen)]

    assert len(messages) > 15
    assert [each for each in messages if each not in texts] == []


def test_every_field_is_refused_by_the_model_or_the_gateway():
    refused = {name for name, option in FOREIGN_OPTIONS.items() if not option.option}
    for table in vars(unserved_fields).values():
        if isinstance(table, dict):
            refused |= {name for name in table if isinstance(name, str)}
    requests = PAGE.partition("## Requests that generate")[2]
    named = {name for what, *_ in ROWS if what in requests for name in FIELD.findall(what)}

    assert len(named) > 15
    assert named - refused == set()


def test_a_message_that_names_a_field_is_that_of_the_field():
    seen = [re.findall(r"`([a-z_]+) is not served; ([^`]+)`", cell) for *_, cell in ROWS]
    messages = [message for cell in seen for message in cell]

    assert len(messages) > 6
    for name, reason in messages:
        assert FOREIGN_OPTIONS[name].remedy == reason


def test_no_path_is_one_of_the_gateway():
    app = create_app(GatewaySettings(url="grpc://127.0.0.1:1"))
    served = {route.path_format for route in app.routes if isinstance(route, Route)}
    named = {path for what, *_ in ROWS for path in PATH.findall(what)}

    assert len(named) > 4
    assert named & served == set()
