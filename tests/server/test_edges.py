"""All edge cases, on a gateway before the real server."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.checkpoints import set_fields
from tests.edges.case import Answer, check
from tests.edges.table import EDGES
from varlen_client.gateway import GatewaySettings

from .local_gateway import local_gateway
from .serving import TIMEOUT_SECONDS, add_model, load, unload

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
# Models by the role that a case names.
MODELS = {
    "embedder": "minilm",
    "ranker": "reranker",
    "classifier": "classifier",
    "sparse": "splade",
    "tokens": "colbert",
    "states": "encoder",
    "tagger": "tagger",
    "writer": "edge_writer",
}


@pytest.fixture(scope="module")
def ask(server, repository, load_task_models, tmp_path_factory):
    """Return a function that sends a body to the gateway."""
    writer = tmp_path_factory.mktemp("edges") / "writer"
    shutil.copytree(ROOT / "model_repository/tiny_gpt2/1", writer)
    set_fields(writer, "tokenizer_config.json", chat_template=TEMPLATE)
    add_model(repository, MODELS["writer"], writer, task="generate")
    load_task_models([MODELS[role] for role in ("ranker", "sparse", "tokens")])
    assert load(server, MODELS["writer"]) is None
    with (
        local_gateway(GatewaySettings(url=server.grpc_url)) as address,
        httpx2.Client(base_url=f"http://{address}", timeout=TIMEOUT_SECONDS) as client,
    ):

        def ask(
            route: str, body: Mapping[str, Any], role: str, headers: Mapping[str, str] | None
        ) -> Answer:
            model = MODELS[role]
            path = route.replace(f"/{role}/", f"/{model}/")
            response = client.post(f"{path}?model={model}", json=body, headers=headers)
            return Answer(response.status_code, response.text)

        yield ask
    unload(server, MODELS["writer"])


# `make test` has those that need no weights, on a gateway before fake models
@pytest.mark.full
@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name)
def test_the_answer_is_right(edge, ask):
    check(edge, ask)
