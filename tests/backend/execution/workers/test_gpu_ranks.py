"""Models that ranks hold, each with an emulated GPU: answers as of one process.

The processes of ranks have the emulator of tests/kernels/triton/fake_cuda.py, and exchange numbers over gloo.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from tests.server.emulated.sitecustomize import COUNT, LOST
from tests.server.emulated_gpu import EMULATOR
from varlen import Encoder
from varlen.config import EngineConfig
from varlen.errors import ConfigError
from varlen.execution.packing import in_order
from varlen.in_process.generator import Generator
from varlen.service.generation import GeneratorParts
from varlen.service.one_shot import EncoderParts
from varlen.service.service import Service
from varlen.telemetry.metrics import Stats

from .test_parallel import processes_of

RANKS: dict[str, Any] = {
    "device": "cuda",
    "tensor_parallel": 2,
    # the interpreter takes seconds for what a GPU does at once
    "rank_timeout_seconds": 300,
}
STEPS: dict[str, Any] = {
    "dtype": "fp32",
    "warmup_seconds": 0,
    "threads": 1,
    "max_running_sequences": 2,
    "max_step_tokens": 8,
    "max_sequence_tokens": 40,
    "kv_bytes": 1 << 20,
    "kv_block_tokens": 16,
}
# Half of each for a rank: small, since each program of a kernel takes milliseconds in the interpreter.
DECODER = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_inner": 32, "n_positions": 64}
TRANSLATOR = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
PROMPT = [5, 6, 7]
# Tokens that the leader draws, that the engine chooses from the logits, and searches of each kind.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "ignore_eos": True},
    {"seed": 1, "top_p": 0.9, "ignore_eos": True},
    {"temperature": 0.0, "repetition_penalty": 1.3, "ignore_eos": True},
    {"temperature": 0.0, "logprobs": 1, "ignore_eos": True},
    {"num_beams": 2},
    {"num_beams": 2, "repetition_penalty": 1.3},
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Two GPUs, which this process counts and processes of ranks use."""
    monkeypatch.syspath_prepend(str(EMULATOR))
    monkeypatch.setenv(COUNT, "2")
    monkeypatch.setenv(LOST, str(tmp_path / "lost"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


# the interpreter needs longer on a busy machine
pytestmark = pytest.mark.timeout(1800)


def load(folder: Path, **settings: Any) -> Generator:
    """Return a running model that generates."""
    config = EngineConfig(**{**STEPS, **settings})
    isolated = config.num_processes > 1
    return Generator(Service.load(GeneratorParts, folder, config, Stats(), isolated=isolated))


def answers(model: Generator, prompt: list[int], options: tuple[dict[str, Any], ...]) -> list[Any]:
    """Return the tokens of requests that run at the same time."""
    with ThreadPoolExecutor(4) as pool:
        running = [
            pool.submit(model.generate, [prompt], **{"max_tokens": 3, **each}) for each in options
        ]
    return [one.result()[0].token_ids for one in running]


@pytest.mark.full
def test_tokens_are_those_of_one_process_also_after_a_rank_is_lost(
    gpus: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "gpt2", "GPT2LMHeadModel", **DECODER)
    with load(folder, device="cpu") as alone:
        expected = answers(alone, PROMPT, OPTIONS)
        info = alone._service.model.runner.info

    with load(folder, **RANKS) as model:
        ranks = model._service.model.runner.info
        assert (ranks.device, ranks.vocab_size) == ("cuda", info.vocab_size)
        assert ranks.weight_bytes < 0.7 * info.weight_bytes
        assert answers(model, PROMPT, OPTIONS) == expected

        os.kill(processes_of(model)[1], signal.SIGKILL)

        assert answers(model, PROMPT, OPTIONS[:2]) == expected[:2]


@pytest.mark.full
def test_keys_of_8_bits_are_shared_by_prompts_and_beams(
    gpus: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "gpt2", "GPT2LMHeadModel", **DECODER)
    # a whole block, and some tokens more
    prompt = list(range(1, 21))
    options = ({"temperature": 0.0, "ignore_eos": True}, {"num_beams": 2})

    with load(folder, **RANKS, dtype="fp16", kv_cache_dtype="fp8") as model:
        first, second = ([answers(model, prompt, (each,)) for each in options] for _ in range(2))
        counts = model._service.model.scheduler.snapshot()

    assert first == second
    # the first request has stored the block
    assert counts.blocks.prefix_hit_tokens == 3 * 16


@pytest.mark.full
def test_translations_are_those_of_one_process(gpus: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "t5", "T5ForConditionalGeneration", **TRANSLATOR)
    options: tuple[dict[str, Any], ...] = ({"num_beams": 1}, {"num_beams": 2})
    with load(folder, device="cpu") as alone:
        expected = answers(alone, PROMPT, options)

    with load(folder, **RANKS) as model:
        assert answers(model, PROMPT, options) == expected


@pytest.mark.full
def test_vectors_are_those_of_one_process(gpus: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "bert", **ENCODER)
    texts = ["the cat", "river", "a b c d e f"]
    with Encoder.from_pretrained(folder, device="cpu", dtype="fp32") as alone:
        expected = alone.embed(texts)
    config = EngineConfig(
        **{"dtype": "fp32", "warmup_seconds": 0, "max_sequence_tokens": 16, **RANKS},
        max_batch_tokens=24,
        max_batch_sequences=3,
    )

    with Encoder(Service.load(EncoderParts, folder, config, Stats(), isolated=True)) as model:
        assert model._service.model.info.device == "cuda"
        assert_close(model.embed(texts), expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize(
    ("settings", "gpu", "message"),
    [
        ({"tensor_parallel": 3}, 0, "each rank has a GPU, from GPU 0 on, and torch sees 2"),
        ({"tensor_parallel": 2}, 1, "each rank has a GPU, from GPU 1 on, and torch sees 2"),
        ({"pipeline_parallel": 2}, 0, "pipeline_parallel is 2, which needs a CPU"),
    ],
)
@pytest.mark.parametrize("parts", [GeneratorParts, EncoderParts])
def test_ranks_without_a_gpu_are_refused(
    gpus: pytest.MonkeyPatch,
    tmp_path: Path,
    parts: type[Any],
    settings: dict[str, int],
    gpu: int,
    message: str,
) -> None:
    kind = "GPT2LMHeadModel" if parts is GeneratorParts else "BertModel"
    folder = save_checkpoint(tmp_path / "model", kind)
    config = EngineConfig(device="cuda", dtype="fp32", **settings)

    with pytest.raises(ConfigError, match=message):
        Service.load(parts, folder, config, Stats(), gpu=gpu, isolated=True)


def test_copies_that_need_others_come_after_them() -> None:
    copies = np.array([(0, 1), (2, 3), (1, 4), (5, 2), (6, 2), (7, 8)], np.int32)

    groups = [group.tolist() for group in in_order(copies)]

    assert groups == [[[0, 1], [2, 3]], [[1, 4], [5, 2]], [[6, 2], [7, 8]]]
    assert [len(group) for group in in_order(copies[:0])] == [0]
