"""Models that generate in int8 and int4 behind the server answer as in process."""

import pytest

from tests.checkpoints import save_checkpoint
from tests.quantized import save_quantized, widen
from varlen.in_process.generator import Generator
from varlen_client import Client
from varlen_tools.local_server import LocalServer

from .serving import TIMEOUT_SECONDS, add_model

pytestmark = pytest.mark.full

KINDS = {
    "translator": "MarianMTModel",
    "writer": "GPT2LMHeadModel",
    "gemma": "Gemma3ForCausalLM",
    "hunyuan": "HunYuanDenseV1ForCausalLM",
    "t5gemma": "T5GemmaForConditionalGeneration",
}
SETTINGS = {
    "translator": {"dtype": "int8", "device": "cpu"},
    "writer": {"dtype": "int4", "device": "cpu"},
    "gemma": {"dtype": "int8", "device": "cpu"},
    "hunyuan": {"dtype": "int8", "device": "cpu"},
    "t5gemma": {"dtype": "int8", "device": "cpu"},
}
TEXTS = ("the cat", "a", "the cat and the river, again and again", "0123456789")
# One of each method that quantizes.
METHODS = ("awq", "gptq-old", "packed-4-asymmetric", "int8", "fp8-blocks", "nf4")
SEARCH = {"max_tokens": 20, "num_beams": 3}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Tiny random checkpoints by model name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: save_checkpoint(folder / name, kind) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def server(checkpoints, tmp_path_factory):
    """A server with all models, which it calibrates."""
    folder = tmp_path_factory.mktemp("int8")
    for name, checkpoint in checkpoints.items():
        add_model(folder, name, checkpoint, **SETTINGS[name])
    with LocalServer(folder) as running:
        running.wait_ready(TIMEOUT_SECONDS)
        yield running


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_the_model_in_process(server, checkpoints, name):
    with Client(server.grpc_url, name) as client:
        served = [client.generate(text, **SEARCH) for text in TEXTS]
    with Generator.from_pretrained(checkpoints[name], **SETTINGS[name]) as generator:
        expected = generator.generate(TEXTS, **SEARCH)

    assert [answer.token_ids for answer in served] == [each.token_ids for each in expected]
    has_encoder = name in ("translator", "t5gemma")
    assert f"the {'encoder and ' if has_encoder else ''}decoder, activations" in server.log()
    assert f"in {SETTINGS[name]['dtype']} on" in server.log()


def test_quantized_checkpoints_answer_as_their_weights(tmp_path):
    """A server of its own: the other one calibrates for minutes."""
    models = tmp_path / "models"
    for name in METHODS:
        save_quantized(tmp_path / name, name)
        widen(tmp_path / f"{name}-floats", save_quantized(tmp_path / f"{name}-floats", name))
        add_model(models, name, tmp_path / name)
    add_model(models, "kept", tmp_path / "awq", dtype="auto")
    with LocalServer(models) as server:
        server.wait_ready(TIMEOUT_SECONDS)
        served = {}
        for name in (*METHODS, "kept"):
            with Client(server.grpc_url, name) as client:
                served[name] = [client.generate(text, **SEARCH).token_ids for text in TEXTS]
        log = server.log()
    for name, tokens in served.items():
        folder, dtype = ("awq", "auto") if name == "kept" else (f"{name}-floats", "fp32")
        with Generator.from_pretrained(tmp_path / folder, dtype=dtype, device="cpu") as generator:
            expected = generator.generate(TEXTS, **SEARCH)
        assert tokens == [each.token_ids for each in expected], name

    assert "weights quantized by gptq: 14 of 4 bits in groups of 16; they are widened" in log
    assert "14 of 4 bits in groups of 16; a CPU keeps the codes of linear layers" in log
    assert "linear layers that keep codes: 8" in log
