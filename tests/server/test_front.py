"""The gateway's page in a real browser: each model answers its form."""

import json

import pytest

from tests.client.gateway.browser import browser, executable
from varlen_client.gateway import GatewaySettings

from .local_gateway import local_gateway
from .task_models import TASK_MODELS

pytestmark = pytest.mark.full

# What a form shows, by the task of its model.
SHOWN = {
    "embed": "cosine similarity",
    "sparse_embed": "terms",
    "token_embed": "tokens",
    "hidden": "tokens",
    "rerank": "The cat sleeps on the mat.",
    "classify": "LABEL_1",
    "token_classify": '"data": [',
    "fill_mask": "no route for its task",
    "extract": "Labels, one a line",
    "question_answer": "Context",
    "translate": "completions",
    "generate": "completions",
}


@pytest.mark.skipif(
    executable() is None, reason="this machine has no Chromium: chromium or google-chrome in PATH"
)
def test_every_model_is_tried_in_a_browser(task_server):
    cards = "[...document.querySelectorAll('details')]"
    names = json.dumps(list(TASK_MODELS))
    with (
        local_gateway(GatewaySettings(url=task_server.grpc_url)) as address,
        browser() as open_page,
    ):
        page = open_page(f"http://{address}/")
        page.wait("document.querySelector('details form')")
        # other tests load other models
        of_task = f"{cards}.filter(each => {names}.includes(each.querySelector('b').textContent))"
        page.run(f"{of_task}.forEach(each => each.open = true)")
        page.wait(f"{of_task}.every(each => each.children.length > 1)")
        page.run(f"{of_task}.forEach(each => each.querySelector('form')?.requestSubmit())")
        page.wait(
            f"{of_task}.every(each => /ms$/.test(each.querySelector('output')?.innerText ?? 'ms'))"
        )
        name_and_text = "each => [each.querySelector('b').textContent, each.innerText]"
        found = dict(page.run(f"{of_task}.map({name_and_text})"))
        assert page.complaints() == []

    assert found.keys() == TASK_MODELS.keys()
    for name, task in TASK_MODELS.items():
        assert task in found[name]
        assert SHOWN[task] in found[name]
