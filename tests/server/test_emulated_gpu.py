"""Models on an emulated GPU in the real server."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from tests.adapters import save_adapter
from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from tests.gliner_models import save_gliner
from varlen import Encoder
from varlen.in_process.generator import Generator
from varlen_client import Client
from varlen_tools.local_server import LOOPBACK

from .emulated_gpu import EmulatedServer, emulated_server
from .serving import (
    TIMEOUT_SECONDS,
    add_model,
    http_call,
    load,
    metrics,
    model_state,
    outcomes,
    stub_of,
    unload,
    wait_until,
)

# small: each program of a kernel takes milliseconds in the interpreter
SHAPES: dict[str, dict[str, int]] = {
    "BertModel": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 16,
    },
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 1, "n_head": 1, "n_inner": 16, "n_positions": 64},
    "MarianMTModel": {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 1,
        "decoder_attention_heads": 1,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "max_position_embeddings": 24,
    },
}
BATCHES = {"max_batch_tokens": "24", "max_batch_sequences": "3", "max_sequence_tokens": "16"}
STEPS = {
    "max_running_sequences": "2",
    "max_step_tokens": "8",
    "max_sequence_tokens": "60",
    "kv_bytes": "1000000",
    "kv_block_tokens": "16",
}
# By model name: the class of its checkpoint, and its settings.
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    # the costs of `growing` and of `translator` are measured
    "encoder": ("BertModel", {**BATCHES, "warmup_seconds": "0"}),
    "growing": ("BertModel", {**BATCHES, "growing_arena": "true"}),
    "writer": ("GPT2LMHeadModel", {**STEPS, "task": "generate", "warmup_seconds": "0"}),
    "coded": (
        "GPT2LMHeadModel",
        {**STEPS, "task": "generate", "warmup_seconds": "0", "dtype": "int8"},
    ),
    "halved": (
        "GPT2LMHeadModel",
        {**STEPS, "task": "generate", "warmup_seconds": "0"}
        | {"dtype": "fp16", "kv_cache_dtype": "fp8"},
    ),
    "translator": ("MarianMTModel", {**STEPS, "max_sequence_tokens": "24"}),
}
TEXTS = ["the cat", "a river", "the", "a b c d e f g"]
PROMPT = [5, 6, 7]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random checkpoints by class."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: save_checkpoint(folder / kind, kind, **shape) for kind, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmulatedServer]:
    """A server that has loaded no model yet."""
    folder = tmp_path_factory.mktemp("emulated")
    for name, (kind, settings) in MODELS.items():
        add_model(folder / "models", name, checkpoints[kind], device="cuda", **settings)
    with emulated_server(folder / "models", folder) as running:
        yield running


@pytest.fixture(scope="module")
def on_cpu(checkpoints: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Return a function that returns what `writer` generates on a CPU."""
    with Generator.from_pretrained(
        checkpoints["GPT2LMHeadModel"], device="cpu", dtype="fp32", threads=1
    ) as generator:
        yield lambda prompt, **options: generator.generate([prompt], **options)[0]


def load_missing(server: EmulatedServer, *names: str) -> None:
    """Load the models that are not loaded, at the same time."""
    missing = [name for name in names if model_state(server, name) != "READY"]
    with ThreadPoolExecutor() as pool:
        errors = [pool.submit(load, server, name) for name in missing]
    assert [each.result() for each in errors] == [None] * len(missing)


def check_vectors(server: EmulatedServer, name: str, folder: Path) -> None:
    """Compare vectors with the vectors of a CPU."""
    with Encoder.from_pretrained(folder, device="cpu", dtype="fp32") as encoder:
        expected = encoder.embed(TEXTS)
    with Client(server.grpc_url, name) as client:
        assert_close(client.embed(TEXTS), expected, roundings=encoder_roundings(folder))
        alone = client.embed(TEXTS[:1])
    assert_close(alone, expected[:1], roundings=encoder_roundings(folder))


@pytest.mark.full
def test_vectors_and_greedy_tokens_are_those_of_a_cpu(
    server: EmulatedServer, checkpoints: dict[str, Path], on_cpu: Callable[..., Any]
) -> None:
    load_missing(server, "encoder", "writer")

    check_vectors(server, "encoder", checkpoints["BertModel"])
    with Client(server.grpc_url, "writer") as client:
        for prompt in (PROMPT, list(range(1, 20))):
            answer = client.generate(prompt, **GREEDY)
            assert answer.token_ids == on_cpu(prompt, **GREEDY).token_ids
    for name in ("encoder", "writer"):
        assert metrics(server, name)["varlen_cuda_graphs"] > 0


# Answers beside the greedy one: drawn, edited, chosen by the host, and searched.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"seed": 1, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "ignore_eos": True},
    {"seed": 2, "temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 2, "ignore_eos": True},
    {"num_beams": 2},
    {"num_beams": 2, "repetition_penalty": 1.3},
)


@pytest.mark.full
def test_drawn_and_searched_tokens_are_those_of_a_cpu(
    server: EmulatedServer, on_cpu: Callable[..., Any]
) -> None:
    load_missing(server, "writer")
    cases = [
        (prompt, {"max_tokens": 5, **options})
        for prompt in (PROMPT, list(range(1, 12)))
        for options in OPTIONS
    ]
    with Client(server.grpc_url, "writer") as client, ThreadPoolExecutor(4) as pool:
        # at the same time, so that steps have some of each kind
        running = [pool.submit(client.generate, prompt, **options) for prompt, options in cases]
        found = [each.result().token_ids for each in running]

    assert found == [on_cpu(prompt, **options).token_ids for prompt, options in cases]


@pytest.mark.full
def test_weights_of_8_bits_serve(server: EmulatedServer) -> None:
    load_missing(server, "coded")

    with Client(server.grpc_url, "coded") as client:
        first, second = (client.generate(PROMPT, **GREEDY).token_ids for _ in range(2))
    assert len(first) == 4
    assert first == second
    assert "int8: codes for the weights of 5 linear layers" in server.log()


@pytest.mark.full
def test_keys_of_8_bits_are_shared_by_prompts_and_beams(server: EmulatedServer) -> None:
    load_missing(server, "halved")
    # a whole block, and some tokens more
    prompt = list(range(1, 21))

    with Client(server.grpc_url, "halved") as client:
        for options in (GREEDY, {"num_beams": 2, "max_tokens": 4}):
            before = metrics(server, "halved")["varlen_prefix_cache_hit_tokens_total"]
            first, second = (client.generate(prompt, **options).token_ids for _ in range(2))
            assert first == second
            after = metrics(server, "halved")["varlen_prefix_cache_hit_tokens_total"]
            assert after - before >= 16


@pytest.mark.full
def test_translations_are_those_of_a_cpu(
    server: EmulatedServer, checkpoints: dict[str, Path]
) -> None:
    load_missing(server, "translator")
    settings = {"device": "cpu", "dtype": "fp32", "threads": 1, "max_sequence_tokens": 24}
    sources = ["the cat", "a"]
    with (
        Generator.from_pretrained(checkpoints["MarianMTModel"], **settings) as generator,
        Client(server.grpc_url, "translator") as client,
    ):
        for beams in (1, 2):
            options = {"num_beams": beams, "max_tokens": 4}
            expected = [each.text for each in generator.generate(sources, **options)]
            found = [each.text for each in client.translate(sources, **options)]
            assert found == expected


@pytest.mark.full
def test_a_growing_arena_of_a_gpu_serves(
    server: EmulatedServer, checkpoints: dict[str, Path]
) -> None:
    load_missing(server, "growing")

    check_vectors(server, "growing", checkpoints["BertModel"])


@pytest.mark.full
def test_what_has_no_kernel_is_refused_when_it_loads(
    server: EmulatedServer, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    adapted = save_checkpoint(tmp_path / "adapted", "BertModel", **SHAPES["BertModel"])
    save_adapter(adapted, "BertModel", "first", r=2)
    refused = {
        "adapted": (adapted, "the checkpoint has adapters, and the device is a GPU"),
        "extractor": (save_gliner(tmp_path / "gliner"), 'the task "extract" runs on CPUs only'),
    }
    for name, (folder, message) in refused.items():
        add_model(server.model_repository, name, folder, device="cuda", **BATCHES)

        assert message in str(load(server, name))


# Requests that say whether a model works, by their paths.
PROBES: dict[str, dict[str, Any]] = {
    "encoder/infer": {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}],
        "parameters": {"probe": True},
    },
    "writer/generate": {"text_input": "a", "max_tokens": 1, "probe": True},
}


class Ends:
    """The responses of requests that stream, each on a connection of its own."""

    def __init__(self, server: EmulatedServer, count: int) -> None:
        """Start `count` requests for long answers."""
        self._clients = [
            tritonclient.grpc.InferenceServerClient(f"{LOOPBACK}:{server.grpc_port}")
            for _ in range(count)
        ]
        self.responses: list[SimpleQueue[tuple[Any, Exception | None]]] = []
        for client in self._clients:
            queue = SimpleQueue[tuple[Any, Exception | None]]()
            self.responses.append(queue)
            client.start_stream(lambda result, error, queue=queue: queue.put((result, error)))
            client.async_stream_infer(
                "writer",
                [
                    _tensor("input_ids", np.array(PROMPT), "INT64"),
                    _tensor("stream", np.array([True]), "BOOL"),
                ],
                parameters={"max_tokens": 55, "temperature": 0.0, "ignore_eos": True},
                enable_empty_final_response=True,
            )

    def errors(self) -> list[str]:
        """Wait for the end of each request; return what they ended with."""
        found = []
        for client, queue in zip(self._clients, self.responses, strict=True):
            finals: list[str] = []
            while not finals:
                finals += _final(*queue.get(timeout=TIMEOUT_SECONDS))
            # whatever comes later
            client.stop_stream()
            while not queue.empty():
                finals += _final(*queue.get())
            client.close()
            assert len(finals) == 1
            found += finals
        return found


def _tensor(name: str, array: Any, datatype: str) -> tritonclient.grpc.InferInput:
    tensor = tritonclient.grpc.InferInput(name, list(array.shape), datatype)
    return tensor.set_data_from_numpy(array)


def _final(result: Any, error: Exception | None) -> Sequence[str]:
    """Return the error of a response that ends its request, empty without one."""
    if error is not None:
        return [str(error)]
    parameters = result.get_response().parameters
    return [""] if parameters["triton_final_response"].bool_param else []


@pytest.mark.full
def test_a_lost_gpu_ends_each_request_once_and_a_reload_serves_again(
    server: EmulatedServer, checkpoints: dict[str, Path], on_cpu: Callable[..., Any]
) -> None:
    load_missing(server, "encoder", "writer")
    stubs = {name: stub_of(server, name) for name in ("encoder", "writer")}
    before = outcomes(server, "writer")
    running = Ends(server, 4)
    wait_until(lambda: any(not each.empty() for each in running.responses), "one has begun")

    server.lost.touch()

    errors = running.errors()
    # two run, and two wait
    assert all("stopped after a fault of its device" in error for error in errors), errors
    after = outcomes(server, "writer")
    assert sum(after.values()) - sum(before.values()) == len(errors)
    for path, body in PROBES.items():
        status, answer = http_call(server, "POST", f"/v2/models/{path}", body)
        assert status != 200
        assert "stopped after a fault of its device" in str(answer)

    server.lost.unlink()
    for name, stub in stubs.items():
        unload(server, name)
        wait_until(lambda name=name: model_state(server, name) == "UNAVAILABLE", "it is unloaded")
        assert load(server, name) is None
        assert stub_of(server, name) != stub
    check_vectors(server, "encoder", checkpoints["BertModel"])
    with Client(server.grpc_url, "writer") as client:
        assert client.generate(PROMPT, **GREEDY).token_ids == on_cpu(PROMPT, **GREEDY).token_ids
