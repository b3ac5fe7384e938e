"""Commands, requests and Python of the pages run against a real server."""

import json
import re
import shlex
import urllib.request
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.backend.models.test_router import save as save_routes
from tests.checkpoints import save_checkpoint, set_fields
from tests.docs.pages import blocks, commands
from tests.gliner2_models import save_gliner2
from tests.m3_models import save_m3
from varlen_client.cli.main import PANELS, app
from varlen_client.gateway import GatewaySettings
from varlen_tools.convert_pickle import convert
from varlen_tools.local_server import LocalServer

from .local_gateway import local_gateway
from .serving import TIMEOUT_SECONDS, add_model, load_all
from .task_models import TASK_MODELS, fetch_task_model

TASK_PAGES = (
    "embeddings",
    "classification",
    "reranking",
    "tokens",
    "tokenizer",
    "sparse",
    "late_interaction",
    "masks",
    "extraction",
    "question_answering",
    "generation",
    "translation",
    "gateway",
)
PAGES = (
    "README.md",
    "docs/index.md",
    "docs/start/install.md",
    "docs/start/migration.md",
    *(f"docs/tasks/{name}.md" for name in TASK_PAGES),
    "docs/concepts/one_pass.md",
)
# The models of the other pages are loaded for their tests alone.
PAGES_OF_MAKE_TEST = (
    *("README.md", "docs/index.md", "docs/start/migration.md"),
    *(f"docs/tasks/{name}.md" for name in ("embeddings", "reranking", "tokenizer")),
)
# Models of the pages that the shared server has under other names.
STAND_INS = {
    "e5": "minilm",
    "e5-small-v2": "minilm",
    "my_model": "minilm",
    "en-de": "tiny_dates",
}
# Models of one page: with routes on the page of sparse vectors, one that translates as a chat, one like bge-m3,
# and one that takes schemas.
ROUTED, CHAT, M3, SCHEMAS = OF_ONE_PAGE = "docs-v3", "hunyuan-mt", "m3", "facts"
# The prompt of the page, token by token of bytes, and an answer.
_CHAT_SIZES = {"max_position_embeddings": 1024}
# The model of a gateway that serves one, by the path of a request without `model`.
MODEL_OF_PATH = {"/embed": "minilm", "/rerank": "reranker"}

# Commands that the demo and other tests run, or that need other machines.
NOT_RUN = (
    *("git", "make", "python", "python3", "tritonserver", "docker", "pip", "cd", "."),
    "text-embeddings-router",
)
# Commands of `varlen` that send requests; other tests run the others.
RUN_OF_VARLEN = {*PANELS["Ask"], "status"}
# Blocks of code with these run where they are installed.
OPTIONAL_PACKAGES = ("langchain_openai", "llama_index")


@pytest.fixture(scope="module")
def gateway(server, tmp_path_factory):
    """The address of a gateway before the server."""
    folder = tmp_path_factory.mktemp("batches")
    with local_gateway(GatewaySettings(url=server.grpc_url, batch_folder=folder)) as address:
        yield address


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """Run in a folder with the files that blocks of the pages write."""
    monkeypatch.chdir(tmp_path)
    for block in blocks("sh", pages=PAGES):
        for words in commands(block):
            if words[0] == "printf":
                (tmp_path / words[3]).write_text(words[1].encode().decode("unicode_escape"))


def is_of_make_test(block):
    """Return whether a block needs no model that only its page has."""
    return block.page in PAGES_OF_MAKE_TEST and not page_models(block)


def page_models(block):
    """Return the models of one page that a block names."""
    return [name for name in OF_ONE_PAGE if re.search(rf"(?<![\w-]){name}\b", block.code)]


def blocks_of(language):
    """Return the blocks of all pages."""
    return [
        pytest.param(
            block,
            id=str(block),
            marks=() if is_of_make_test(block) else pytest.mark.full,
        )
        for block in blocks(language, pages=PAGES)
    ]


@pytest.fixture(scope="module")
def load_page_model(server, repository, tmp_path_factory):
    """Return a function that loads a model of one page alone, once."""

    @cache
    def load(name):
        folder = tmp_path_factory.mktemp(name)
        if name == M3:
            m3 = save_m3(save_checkpoint(folder / "saved", "XLMRobertaModel"))
            convert(m3)
            add_model(repository, name, m3, outputs="sparse_embed,token_embed")
            load_all(server, [name])
            return
        if name == ROUTED:
            save_routes(save_checkpoint(folder / "bert", "BertForMaskedLM"), folder / "saved")
            task = "sparse_embed"
        elif name == SCHEMAS:
            save_gliner2(folder / "saved", scale=1)
            task = "extract"
        else:
            save_checkpoint(folder / "saved", "HunYuanDenseV1ForCausalLM", **_CHAT_SIZES)
            template = "{{ messages[0].content }}"
            set_fields(folder / "saved", "tokenizer_config.json", chat_template=template)
            task = "generate"
        fetch_task_model(folder / "saved", repository, name, task)
        load_all(server, [name])

    return load


@pytest.fixture
def models_of_the_block(block, load_task_models, load_page_model):
    """Load the models that a block names, or asks without a name."""
    for name in page_models(block):
        load_page_model(name)
    names = {*re.findall(r"\w[\w-]*", block.code)}
    names |= {STAND_INS[name] for name in names & STAND_INS.keys()}
    names |= {model for path, model in MODEL_OF_PATH.items() if path in block.code}
    load_task_models(names & TASK_MODELS.keys())


def at(server: LocalServer, gateway: str, text: str) -> str:
    """Return code of a page with the addresses and the models of the server."""
    text = text.replace("127.0.0.1:8080", gateway)
    text = text.replace("grpc://127.0.0.1:8001", server.grpc_url)
    text = text.replace("127.0.0.1:8001", server.grpc_url.removeprefix("grpc://"))
    text = text.replace("127.0.0.1:8000", server.http_url.removeprefix("http://"))
    for name, stand_in in STAND_INS.items():
        for quoted in (f'"{name}"', f"--model {name}", f"models/{name}/"):
            text = text.replace(quoted, quoted.replace(name, stand_in))
    return text


@pytest.mark.usefixtures("models_of_the_block")
@pytest.mark.parametrize("block", blocks_of("sh"))
def test_commands_and_requests_are_answered(block, server, gateway):
    done = 0
    for command in commands(block):
        words = shlex.split(at(server, gateway, shlex.join(command)))
        name = Path(words[0]).name
        if name == "printf":
            Path(words[3]).write_text(words[1].encode().decode("unicode_escape"))
        elif name == "varlen" and words[1] in RUN_OF_VARLEN:
            run = CliRunner().invoke(app, [*words[1:], "--url", server.grpc_url])
            assert run.exit_code == 0, run.output
            # a random model may end its answer at once
            assert run.output
        elif name == "curl":
            assert ask(words[1], words[words.index("-d") + 1] if "-d" in words else None)
        else:
            assert words[0] in NOT_RUN or name == "varlen", words
        done += 1
    assert done


@pytest.mark.usefixtures("models_of_the_block")
@pytest.mark.parametrize("block", blocks_of("python"))
def test_python_runs(block, server, gateway, repository):
    for package in OPTIONAL_PACKAGES:
        if package in block.code:
            pytest.importorskip(package)
    code = at(server, gateway, block.code).replace("model_repository/", f"{repository}/")
    code = code.replace('"./pii"', f'"{repository}/pii/1"')

    exec(compile(code, str(block), "exec"), {})


def ask(address: str, body: str | None) -> bytes:
    """Return the answer to a POST; without a body, to a GET."""
    model = MODEL_OF_PATH.get(address[address.index("/") :])
    if model is not None and body is not None:
        body = json.dumps({"model": model, **json.loads(body)})
    headers = {"Content-Type": "application/json"}
    data = None if body is None else body.encode()
    request = urllib.request.Request(f"http://{address}", data, headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        content: bytes = answer.read()
    return content
