"""Foreign clients before the real server and gateways: they get what our client gets.

The calls are in `tests/foreign`. Each runs in the first Python that has its client: this one, or one of those in
the variable VARLEN_FOREIGN_PYTHONS, separated by colons. It is skipped where none has it.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import set_fields
from tests.closeness import assert_close, encoder_roundings
from tests.foreign.calls import CALLS, Addresses
from tests.foreign.calls.table import (
    DATE,
    MASKED,
    MAX_TOKENS,
    PROMPT,
    QUERY,
    REQUESTS,
    TEXTS,
    TOOL_ARGUMENTS,
)
from varlen_client import Client
from varlen_client.gateway import GatewaySettings
from varlen_tools.local_server import LocalServer, find_command

from .local_gateway import local_gateway
from .serving import add_model, load_all, unload
from .task_models import TASK_MODELS

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests/foreign/run.py"
PYTHONS = (sys.executable, *filter(None, os.environ.get("VARLEN_FOREIGN_PYTHONS", "").split(":")))
# No client may ask the internet.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_DISABLE_TELEMETRY": "1"}
# Load generators take a minute for each call on a busy machine.
CLIENT_SECONDS = 900
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
# Models in fp32 with the random checkpoint of one of `TASK_MODELS`.
RANDOM = {"ranking": "reranker", "moods": "sentiment", "masks": "bert"}

pytestmark = [pytest.mark.full, pytest.mark.timeout(CLIENT_SECONDS + 100)]


@dataclass(frozen=True)
class Foreign:
    """The addresses of server and gateways, and the checkpoints of the models."""

    addresses: Addresses
    server: LocalServer
    checkpoints: Mapping[str, Path]

    def connect(self, model: str) -> Client:
        return Client(self.server.grpc_url, model)


@pytest.fixture(scope="module")
def foreign(server, repository, minilm, task_checkpoints, tmp_path_factory):
    """The shared server with the models of the calls, and a gateway for each model."""
    with_template = tmp_path_factory.mktemp("foreign") / "gpt2"
    shutil.copytree(ROOT / "model_repository/tiny_gpt2/1", with_template)
    set_fields(with_template, "tokenizer_config.json", chat_template=TEMPLATE)
    checkpoints = {name: task_checkpoints[source] for name, source in RANDOM.items()}
    add_model(repository, "gpt2", with_template, task="generate")
    add_model(repository, "dates", ROOT / "model_repository/tiny_dates/1", task="translate")
    for name, folder in checkpoints.items():
        add_model(repository, name, folder, task=TASK_MODELS[RANDOM[name]])
    added = ("gpt2", "dates", *RANDOM)
    load_all(server, added)
    with ExitStack() as stack:
        gateways = {
            name: "http://"
            + stack.enter_context(local_gateway(GatewaySettings(url=server.grpc_url, model=name)))
            for name in ("minilm", *added)
        }
        addresses = Addresses(
            http=server.http_url.removeprefix("http://"),
            grpc=server.grpc_url.removeprefix("grpc://"),
            gateway=gateways,
            folders={"minilm": str(minilm), "gpt2": str(with_template)},
        )
        yield Foreign(addresses, server, {"minilm": minilm, **checkpoints})
    for name in added:
        unload(server, name)


@pytest.fixture(scope="module")
def answers(foreign):
    """Return a function that returns the answers of a client in a Python."""

    @cache
    def answers(python: str, client: str) -> dict[str, Any]:
        found: dict[str, Any] = run(python, client, json.dumps(asdict(foreign.addresses)))
        return found

    return answers


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.client}-{call.name}")
def test_a_foreign_client_gets_what_our_client_gets(call, request):
    python = next((python for python in PYTHONS if call.client in versions(python)), None)
    if python is None:
        pytest.skip(f"no Python has {call.client}")
    print(call.client, versions(python)[call.client])
    foreign = request.getfixturevalue("foreign")

    outcome = request.getfixturevalue("answers")(python, call.client)[call.name]

    if call.refused is not None:
        assert call.refused in outcome["error"]
        return
    assert "error" not in outcome, outcome["error"]
    CHECKS[call.answer](foreign, outcome["answer"])


def test_every_call_of_the_table_has_an_answer_and_a_name_of_its_own():
    assert {call.answer for call in CALLS} <= set(CHECKS)
    assert len({call.name for call in CALLS}) == len(CALLS)


@cache
def versions(python: str) -> dict[str, str]:
    """Return the versions of the foreign clients that a Python has."""
    found: dict[str, str] = run(python)
    return found


def run(python: str, *arguments: str) -> Any:
    """Return what the calls of `tests/foreign` print in a Python."""
    perf_analyzer = Path(find_command("perf_analyzer"))
    ended = subprocess.run(
        [python, str(RUN), *arguments],
        env=os.environ | QUIET | {"PATH": f"{perf_analyzer.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=CLIENT_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def check_vectors(foreign: Foreign, answer: Any) -> None:
    with foreign.connect("minilm") as client:
        close(foreign, "minilm", answer, client.embed(TEXTS))


def check_similarities(foreign: Foreign, answer: Any) -> None:
    with foreign.connect("minilm") as client:
        first, *others = client.embed(TEXTS)
    close(foreign, "minilm", answer, np.stack(others) @ first)


def check_ranks(foreign: Foreign, answer: Any) -> None:
    with foreign.connect("ranking") as client:
        logits = client.rerank(QUERY, TEXTS)
    order = np.argsort(-logits, kind="stable")
    assert [index for index, _ in answer] == order.tolist()
    close(foreign, "ranking", [score for _, score in answer], 1 / (1 + np.exp(-logits[order])))


def check_labels(foreign: Foreign, answer: Any) -> None:
    with foreign.connect("moods") as client:
        expected = {each.label: each.score for each in client.predict(TEXTS[:1])[0]}
    assert answer.keys() == expected.keys()
    close(foreign, "moods", [answer[label] for label in expected], list(expected.values()))


def check_masks(foreign: Foreign, answer: Any) -> None:
    with foreign.connect("masks") as client:
        ((expected,),) = client.fill_mask([MASKED], top_k=len(answer))
    assert [token for token, _ in answer] == [each.token_id for each in expected]
    close(foreign, "masks", [score for _, score in answer], [each.score for each in expected])


def check_text(expected: Callable[[Foreign], str]) -> Callable[[Foreign, Any], None]:
    def check(foreign: Foreign, answer: Any) -> None:
        assert answer == expected(foreign)

    return check


def completion(foreign: Foreign, prompt: Any = PROMPT) -> str:
    with foreign.connect("gpt2") as client:
        return client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0).text


def chat(foreign: Foreign) -> str:
    return completion(foreign, [{"role": "user", "content": PROMPT}])


def translation(foreign: Foreign) -> str:
    with foreign.connect("dates") as client:
        return client.translate([DATE])[0].text


def check_beginning(foreign: Foreign, answer: Any) -> None:
    whole = completion(foreign)
    assert whole.startswith(answer)
    assert answer != whole


def check_usage(foreign: Foreign, answer: Any) -> None:
    with foreign.connect("gpt2") as client:
        expected = client.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0)
    assert answer == [expected.text, expected.num_prompt_tokens, len(expected.token_ids)]


def check_tool(foreign: Foreign, answer: Any) -> None:
    assert answer == TOOL_ARGUMENTS


def check_models(foreign: Foreign, answer: Any) -> None:
    with foreign.connect("minilm") as client:
        assert sorted(answer) == sorted({each.name for each in client.models() if each.ready})


def check_requests(foreign: Foreign, answer: Any) -> None:
    # perf_analyzer may send a few more before it stops
    assert answer >= REQUESTS


def close(foreign: Foreign, model: str, actual: Any, expected: Any) -> None:
    assert_close(actual, expected, roundings=encoder_roundings(foreign.checkpoints[model]))


CHECKS: Mapping[str, Callable[[Foreign, Any], None]] = {
    "vectors": check_vectors,
    "similarities": check_similarities,
    "ranks": check_ranks,
    "labels": check_labels,
    "masks": check_masks,
    "completion": check_text(completion),
    "prompt and completion": check_text(lambda foreign: PROMPT + completion(foreign)),
    "completion without its last part": check_beginning,
    "completion and usage": check_usage,
    "tool": check_tool,
    "chat": check_text(chat),
    "translation": check_text(translation),
    "models": check_models,
    "requests": check_requests,
}
