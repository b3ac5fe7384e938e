"""`server_api.json` has the names of the running server's module."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.backend.fakes.server_api import api_of, read_apis

from .serving import http_call, load, unload

MODEL = Path(__file__).parent / "models/server_api.py"
CONFIG = """
backend: "python"
input [ { name: "any" data_type: TYPE_BOOL dims: [ 1 ] } ]
output [ { name: "names" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
RELEASES = {"2.51.0": "24.10"}


@pytest.fixture
def found(server, repository):
    """Names of the running server's module."""
    folder = repository / "server_api"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1/model.py").symlink_to(MODEL)
    assert load(server, "server_api") is None
    try:
        given = {"name": "any", "shape": [1], "datatype": "BOOL", "data": [True]}
        status, answer = http_call(
            server, "POST", "/v2/models/server_api/infer", {"inputs": [given]}
        )
    finally:
        unload(server, "server_api")
    assert status == 200, answer
    names: dict[str, Any] = json.loads(answer["outputs"][0]["data"][0])
    return api_of(names)


def test_the_running_server_has_the_names_of_its_release(server, found):
    _, metadata = http_call(server, "GET", "/v2")
    api = read_apis()[RELEASES[metadata["version"]]]

    assert found.module == api.module
    assert {name: found.classes[name] for name in api.classes} == api.classes
