"""Executors on an emulated GPU: right answers, and counts of launches, copies and waits."""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.backend.memory.address_space import FakeSpace
from tests.backend.requests import random_prompts
from tests.checkpoints import save_checkpoint
from tests.closeness import assert_rows_close, encoder_roundings
from varlen.config import EngineConfig
from varlen.decoding.chooser import TokenChooser
from varlen.decoding.grammar.grammars import Grammars
from varlen.decoding.token_edits import BadWords
from varlen.execution.cuda.runner import CudaSteps
from varlen.execution.model_info import edit_limits
from varlen.execution.runner import Runner
from varlen.execution.warm_up import check_numbers
from varlen.execution.workers import steps
from varlen.intake.tokenization import Tokenizer
from varlen.memory import arena
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import bytes_of
from varlen.request.generation import GenerationOptions
from varlen.request.request import Prompt, Request, RequestOptions, Source
from varlen.scheduling.batch import Chunk, GeneratedSequence, unanswered_sequences
from varlen.scheduling.device_plan import BeamStep, SampledToken
from varlen_bench.gpu_report import ahead, decoders, encoders, figures
from varlen_bench.gpu_report.decoders import DecoderGrid, decode_chunks, prompt_chunk, step_of
from varlen_bench.gpu_report.encoders import EncoderGrid
from varlen_bench.gpu_report.figures import MUST_BE_0
from varlen_bench.kernels import timing
from varlen_bench.peers.checkpoints import EncoderShape, GeneratorShape, save_random_decoder
from varlen_kernels import fused, reference
from varlen_kernels.reference.few_rows import FoldedNorm
from varlen_kernels.reference.linear_layers import CodedWeight

from .fake_cuda import FakeCuda, emulated_gpu

CUDA = torch.device("cuda")
SIZES = {"max_batch_tokens": 24, "max_batch_sequences": 3, "max_sequence_tokens": 16}
STEPS = {
    "dtype": "fp32",
    "max_running_sequences": 2,
    "max_step_tokens": 8,
    "max_sequence_tokens": 20,
    "kv_bytes": 1 << 20,
    "kv_block_tokens": 16,
}
# small: each program of a kernel takes milliseconds in the interpreter
ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 16,
}
TRANSLATOR = {"d_model": 16, "d_kv": 16, "d_ff": 16, "num_layers": 1, "num_heads": 1}
DECODER = {"n_embd": 16, "n_layer": 1, "n_head": 1, "n_inner": 16, "n_positions": 24}


# Models that are measured on GPUs: their form with small layers, the field for these, and their number.
MEASURED: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "gpt2-small": ("GPT2LMHeadModel", DECODER, "n_layer", 12),
    "llama-1.2b": (
        "LlamaForCausalLM",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "intermediate_size": 16,
            "tie_word_embeddings": True,
        },
        "num_hidden_layers",
        16,
    ),
}
GREEDY = GenerationOptions(temperature=0.0)
# Launches in the graph of a decode step of one sequence in bf16: in each layer, beside them, and in the whole model.
NODES = {"gpt2-small": (5, 4, 64), "llama-1.2b": (5, 4, 84)}


@pytest.fixture
def gpu() -> Iterator[FakeCuda]:
    with emulated_gpu() as gpu:
        yield gpu


def test_an_encoder_copies_in_replays_copies_out_and_waits_once(
    gpu: FakeCuda, tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(save_checkpoint(tmp_path, "BertModel", **ENCODER))
    batches = [random_prompts(lengths, types=2) for lengths in ([7, 3], [16, 1, 5])]
    options = [RequestOptions(), RequestOptions(normalize=True), RequestOptions()]
    settings = {"dtype": "fp32", **SIZES}
    expected = [
        Runner(checkpoint, EngineConfig(device="cpu", **settings)).run(batch, options[: len(batch)])
        for batch in batches
    ]

    runner = Runner(checkpoint, EngineConfig(device="cuda", **settings))

    # graphs of 16 and of 24 tokens, with the same kernels
    assert runner.graph_use.count == 2
    assert gpu.nodes[0] == gpu.nodes[1]
    for batch, answers in zip(batches, expected, strict=True):
        with gpu.counted() as counts:
            found = runner.run(batch, options[: len(batch)])
        assert_rows_close(found, answers, roundings=encoder_roundings(tmp_path))
        assert counts == {
            "pinned copies to the device": 1,
            "replays": 1,
            "pinned copies to the host": 1,
            "waits": 1,
        }
    runner.close()


@pytest.mark.full
def test_a_padded_encoder_launches_op_by_op_and_waits_once(gpu: FakeCuda, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_checkpoint(tmp_path, "BertModel", **ENCODER))
    settings: Mapping[str, Any] = {"dtype": "fp32", **SIZES}
    runner = Runner(checkpoint, EngineConfig(device="cuda", execution="padded", **settings))
    check_numbers(runner)
    packed = Runner(checkpoint, EngineConfig(device="cpu", **settings))

    for lengths in ([7, 3, 8], [16], [1, 1, 1]):
        batch, options = random_prompts(lengths, types=2), [RequestOptions()] * len(lengths)
        with gpu.counted() as counts:
            found = runner.run(batch, options)
        assert_rows_close(found, packed.run(batch, options), roundings=encoder_roundings(tmp_path))
        assert counts["waits"] == 1
        assert counts["pinned copies to the host"] == 1
        assert counts["pinned copies to the device"] == len(runner.program.inputs)
        assert not counts["replays"]
    assert gpu.nodes == []
    assert runner.slots == 2
    runner.close()


KINDS = {
    "greedy": GenerationOptions(temperature=0.0),
    "sampled": GenerationOptions(temperature=0.8, top_k=20, top_p=0.9, seed=1),
    "beams": GenerationOptions(num_beams=2, max_tokens=2),
}


def step_runner(
    folder: Path, device: str, *, kernels: object = None, **settings: bool | str | int
) -> Runner:
    """Return a decoder that has not warmed up, which takes long in the interpreter."""
    checkpoint = Checkpoint.open(folder)
    tokenizer = Tokenizer(checkpoint.folder, checkpoint.max_sequence_tokens).huggingface
    bad_words = BadWords(tokenizer, checkpoint.target_vocab_size, ())
    # no request has a grammar
    grammars = cast(Grammars, None)
    config = EngineConfig(device=device, **{**STEPS, **settings})
    limits = edit_limits(checkpoint, config)
    choice = TokenChooser(checkpoint, grammars, bad_words, torch.device(device), limits)
    return Runner(checkpoint, config, choice, kernels=kernels)


def chosen(results: Sequence[SampledToken | BeamStep]) -> list[object]:
    """Return the tokens of a step, or the answers of a search that has ended."""
    return [
        [answer.token_ids for answer in each.answers or ()]
        if isinstance(each, BeamStep)
        else each.token_id
        for each in results
    ]


@pytest.mark.full
def test_keys_and_values_of_fp8_are_appended_and_read(gpu: FakeCuda, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "GPT2LMHeadModel", **DECODER)
    logits = []
    for dtype in ("auto", "fp8"):
        runner = step_runner(folder, "cuda", dtype="fp16", kv_cache_dtype=dtype)
        prompt = prompt_chunk(runner, 3, KINDS["greedy"])
        runner.run_batch(step_of((prompt,)))
        runner.run_batch(step_of((prompt._replace(start=3, token_ids=(1,)),)))
        assert isinstance(runner.decoder.steps, CudaSteps)
        logits.append(runner.decoder.steps.last_logits(1).cpu())
        runner.close()
    auto, fp8 = logits

    assert not torch.equal(auto, fp8)
    # a number has 3 bits behind its first one
    assert (auto - fp8).abs().max() < 0.1 * auto.abs().max()


@pytest.mark.full
def test_a_copied_block_of_fp8_is_read_as_the_block_itself(gpu: FakeCuda, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "GPT2LMHeadModel", **DECODER)
    runner = step_runner(folder, "cuda", dtype="fp16", kv_cache_dtype="fp8")
    prompt = prompt_chunk(runner, 3, KINDS["greedy"])
    runner.run_batch(step_of((prompt,)))
    # as two samples or beams of one prompt, which write to blocks of their own
    first, second = (
        prompt._replace(start=3, token_ids=(1,), block_ids=array("i", [block])) for block in (0, 1)
    )
    runner.run_batch(replace(step_of((first, second)), copies=((0, 1),)))

    assert isinstance(runner.decoder.steps, CudaSteps)
    logits = runner.decoder.steps.last_logits(2).cpu()
    assert logits.isfinite().all()
    assert torch.equal(logits[0], logits[1])
    runner.close()


@pytest.mark.full
def test_short_contexts_have_a_graph_with_fewer_programs(gpu: FakeCuda, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "GPT2LMHeadModel", **{**DECODER, "n_positions": 300})
    sizes = {"max_sequence_tokens": 300, "max_running_sequences": 1, "max_step_tokens": 2}
    runner = step_runner(folder, "cuda", **sizes)
    # one sequence of up to 256 tokens and of 300, and, with a short one, two of each
    assert runner.graph_use.count == 4

    used = []
    for context in (290, 20):
        runner.run_batch(step_of(decode_chunks(runner, 1, context, KINDS["greedy"])))
        assert isinstance(runner.decoder.steps, CudaSteps)
        used.append(runner.decoder.steps.graph())

    assert used[0] is not used[1]
    runner.close()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", MEASURED)
def test_nodes_of_the_graph_of_a_decode_step(
    gpu: FakeCuda, tmp_path: Path, name: str, dtype: str
) -> None:
    kind, sizes, field, layers = MEASURED[name]
    nodes = []
    for count in (1, 2):
        folder = save_checkpoint(tmp_path / str(count), kind, **{**sizes, field: count})
        step_runner(folder, "cuda", dtype=dtype).close()
        # the smallest graph comes last
        nodes.append(gpu.nodes[-1])

    first, second = nodes
    each, beside = second - first, 2 * first - second
    assert (each, beside, beside + layers * each) == NODES[name]


class Composed:
    """Kernels of a GPU, but compositions of the reference for linear layers."""

    def __getattr__(self, name: str) -> object:
        is_linear = "linear" in name or name == "norm_next_tokens"
        return getattr(reference if is_linear else fused, name)

    def norm_append_kv(
        self,
        x: Tensor,
        weight: CodedWeight,
        bias: Tensor | None,
        norm: FoldedNorm,
        *rest: Any,
        eps: float,
        out: Tensor,
        **heads: int,
    ) -> None:
        """Append by the kernel: the reference would wait for the device."""
        reference.norm_linear(x, weight, bias, norm, eps=eps, out=out)
        fused.append_kv(out, *rest, **heads, out=out)


@pytest.mark.full
def test_codes_give_the_tokens_of_the_reference(
    gpu: FakeCuda,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = save_checkpoint(tmp_path, "GPT2LMHeadModel", **DECODER)
    settings = {"dtype": "int8", "max_running_sequences": 1, "max_step_tokens": 3}
    with caplog.at_level("INFO", "varlen"):
        runners = [
            step_runner(folder, "cuda", kernels=kernels, **settings)
            for kernels in (None, Composed())
        ]

    assert "int8: codes for the weights of 5 linear layers" in caplog.text
    first, second = (tokens_one_by_one(each, GREEDY, steps=5) for each in runners)
    assert first == second
    program = runners[0].program
    assert runners[0].info.dtype == "int8"
    # a byte for each number, and a scale for each feature
    for op in program.ops:
        if "linear" in op.kernel:
            weight = op.operands[1]
            assert isinstance(weight, CodedWeight)
            hidden, features = weight.shape
            assert bytes_of(weight) == features * (hidden + 4)
    for runner in runners:
        runner.close()


@pytest.mark.full
def test_an_encoder_has_codes_too(
    gpu: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint.open(save_checkpoint(tmp_path, "BertModel", **ENCODER))
    batch, options = random_prompts([3, 2], types=2), [RequestOptions()] * 2
    found = []
    for dtype in ("int8", "bf16"):
        settings: Mapping[str, Any] = {**SIZES, "max_batch_tokens": 8, "max_sequence_tokens": 8}
        with caplog.at_level("INFO", "varlen"):
            runner = Runner(checkpoint, EngineConfig(device="cuda", dtype=dtype, **settings))
        found.append(np.stack(runner.run(batch, options)))
        runner.close()

    assert "int8: codes for the weights of 4 linear layers" in caplog.text
    lengths = np.linalg.norm(found[0], axis=1) * np.linalg.norm(found[1], axis=1)
    assert ((found[0] * found[1]).sum(1) / lengths > 0.995).all()


@pytest.mark.full
def test_beams_of_a_model_without_positions_follow_on_the_device(
    gpu: FakeCuda, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, "T5ForConditionalGeneration", **TRANSLATOR)
    answers = []
    for device in ("cpu", "cuda"):
        runner = step_runner(folder, device)
        source = Source(np.array([5, 3, 9], np.int32))
        prompt = Prompt(np.zeros(1, np.int32), payload=source)
        options = RequestOptions(generation=GenerationOptions(num_beams=2, max_tokens=3))
        (sequence,) = unanswered_sequences(Request((prompt,), options))
        assert isinstance(sequence, GeneratedSequence)
        if device == "cuda":
            # decode steps of one, two and three rows and steps of eight tokens, and as many tokens of sources
            assert runner.graph_use.count == 4 + 1
        first = Chunk(
            sequence, 0, (0,), array("i", [0]), (sequence,), (2,), (5, 3, 9), beam_slots=(0, 1)
        )
        beams = first._replace(token_ids=(0, 0), encodes=(), beams=2)
        steps = (
            first,
            beams._replace(start=1, block_ids=array("i", [0, 1])),
            beams._replace(start=2, block_ids=array("i", [0, 0])),
        )
        counts = []
        for chunk in steps:
            with gpu.counted() as counted:
                last = runner.run_batch(step_of((chunk,)))
            counts.append(counted)
        if device == "cuda":
            # the source is copied and encoded by a graph, before the step and its search
            assert counts[0] == {
                "pinned copies to the device": 3,
                "replays": 2,
                "launches": 3,
                "pinned copies to the host": 1,
                "waits": 1,
            }
        answers.append(chosen(last))
        runner.close()

    assert len(answers[0][0][0]) > 0
    assert answers[0] == answers[1]


def tokens_one_by_one(runner: Runner, options: GenerationOptions, *, steps: int) -> list[int]:
    """Return the tokens after a prompt of three, each known before the next step begins."""
    chunk = prompt_chunk(runner, 3, options)
    found = list[int]()
    while True:
        (token,) = runner.run_batch(step_of((chunk,)))
        assert isinstance(token, SampledToken)
        found.append(token.token_id)
        chunk.sequence.token_ids.append(token.token_id)
        if len(found) == steps:
            return found
        chunk = chunk._replace(start=2 + len(found), token_ids=(token.token_id,))


@pytest.mark.full
def test_graphs_stay_valid_where_memory_is_released_and_mapped_again(
    gpu: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path, "GPT2LMHeadModel", **DECODER)
    spaces: list[FakeSpace] = []

    def new_space(device: torch.device) -> FakeSpace:
        spaces.append(FakeSpace(device))
        return spaces[-1]

    monkeypatch.setattr(arena, "CudaMemory", new_space)
    runner = step_runner(folder, "cuda", growing_arena=True)
    (space,) = spaces
    expected = tokens_one_by_one(
        step_runner(folder, "cpu"), GenerationOptions(temperature=0.0), steps=3
    )

    found = []
    for mappings in (1, 2):
        assert len(space.history) == mappings
        found.append(tokens_one_by_one(runner, GenerationOptions(temperature=0.0), steps=3))
        assert runner.use().reserved_bytes > 0
        runner.release_arenas()
        assert runner.use().reserved_bytes == 0
        assert not space.mapped
        tokens_one_by_one(runner, GenerationOptions(temperature=0.0), steps=1)

    assert found == [expected] * 2
    runner.close()


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stages measure everything once, and models not warm up."""
    for module in (timing, figures):
        monkeypatch.setattr(module, "_WARM_UPS", 0)
    for module in (decoders, encoders):
        monkeypatch.setattr(module, "_HOST_PASSES", 1)
    for name in ("_WARM_UPS", "_PASSES", "_STEPS_OF_PASS"):
        monkeypatch.setattr(ahead, name, 1)
    monkeypatch.setattr(
        ahead, "profiled_kernels", lambda replay: replay() or [(0.0, 2.0, "one"), (3.0, 4.0, "two")]
    )
    monkeypatch.setattr(figures, "_PASSES", 1)
    monkeypatch.setattr(encoders, "_PASSES", 1)
    monkeypatch.setattr(encoders, "_BATCHES", 2)
    monkeypatch.setattr(steps, "warm_up", lambda *_: None)


@pytest.mark.full
def test_stages_of_the_gpu_report_measure_encoders(gpu: FakeCuda, once: None) -> None:
    shape = EncoderShape("tiny", hidden=16, layers=1, heads=1, features=16, vocabulary=30)
    grid = EncoderGrid((shape,), {"2x3": [3, 3]}, "fp32", max_tokens=16, max_length=8)

    found = [
        *encoders.measure_dependent_launch(shape, grid, 1),
        *encoders.measure_overlap(shape, grid),
    ]

    wrong = {row["figure"]: row["value"] for row in found if row["unit"] == MUST_BE_0}
    assert wrong == {
        "batches whose bits differ": 0,
        "random batches of 1 whose bits differ": 0,
        "batches of 2 whose bits differ": 0,
    }
    names = [row["figure"] for row in found if row["unit"] != MUST_BE_0]
    assert len(names) == len(set(names)) == 8
    assert all(row["value"] > 0 for row in found if row["unit"] != MUST_BE_0)


@pytest.mark.full
def test_stages_of_the_gpu_report_measure_decoders(gpu: FakeCuda, once: None) -> None:
    shape = GeneratorShape("tiny", hidden=16, layers=1, heads=1, positions=24, vocabulary=300)
    grid = DecoderGrid(
        {"gpt2": lambda folder: save_random_decoder(shape, folder)},
        settings=STEPS,
        steps=((2, 9),),
        chunks=(5,),
        requests=(1,),
        prompt_tokens=3,
        answer_tokens=2,
        num_beams=2,
    )

    found = [
        *decoders.measure_steps("gpt2", grid, 1e9),
        *decoders.measure_requests("gpt2", grid),
        *ahead.measure_ahead("gpt2", grid, ((2, 4),)),
    ]

    assert [row["value"] for row in found if row["unit"] == MUST_BE_0] == [0]
    assert {row["figure"] for row in found} >= {
        "graph, part of the roofline",
        "whole greedy step",
        "whole sampled step",
        "step with a prompt",
        "greedy step, ahead",
        "sampled step, ahead",
        "penalty step, ahead",
        "kernels of a replay",
        "greedy",
        "sampled",
        "beams",
    }
    assert all(row["value"] > 0 for row in found if row["unit"] in {"us", "ms", "tokens/s"})


def test_tensors_of_two_devices_do_not_mix(gpu: FakeCuda) -> None:
    x = torch.ones(3, device=CUDA)

    with pytest.raises(RuntimeError, match=r"same device: add got a CPU tensor of \(3,\)"):
        x + torch.ones(3)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        fused.activate(torch.ones(2, 4), kind="relu")
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        x.numpy()
    assert (x * 2).tolist() == [2, 2, 2]


def test_a_capture_refuses_waits_and_copies_of_pageable_memory(gpu: FakeCuda) -> None:
    x, pinned = torch.ones(3, device=CUDA), torch.ones(3, pin_memory=True)

    def refused(work) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(None, capture_error_mode="thread_local")
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            work()
        graph.capture_end()

    refused(lambda: x.sum().item())
    refused(torch.cuda.synchronize)
    refused(lambda: x.copy_(torch.ones(3), non_blocking=True))
    refused(lambda: x.copy_(pinned))
    refused(lambda: x[[0, 2]])


def test_a_graph_replays_its_launches_on_the_memory_of_the_capture(gpu: FakeCuda) -> None:
    x, pinned = torch.zeros(3, device=CUDA), torch.zeros(3, pin_memory=True)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(None, capture_error_mode="thread_local")
    x.copy_(pinned, non_blocking=True)
    doubled = (x * 2)[1:] + 1
    graph.capture_end()

    pinned.copy_(torch.tensor([1.0, 2.0, 3.0]))
    with gpu.counted() as counts:
        graph.replay()

    assert gpu.nodes == [3]
    assert counts == {"replays": 1}
    assert doubled.tolist() == [5.0, 7.0]


def test_launches_copies_and_waits_are_counted(gpu: FakeCuda) -> None:
    host = torch.ones(3, pin_memory=True)

    with gpu.counted() as counts:
        x = torch.zeros(3, device=CUDA)
        x.copy_(host, non_blocking=True)
        x.add_(1)
        x[torch.tensor([True, False, True])].cpu()
        torch.cuda.Event().synchronize()

    assert counts == Counter(
        {
            "launches": 3,
            "pinned copies to the device": 1,
            "pageable copies to the device": 1,
            "pageable copies to the host": 1,
            "waits": 3,
        }
    )
