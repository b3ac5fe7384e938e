"""Steps on a GPU, with a stand-in for CUDA graphs on a CPU.

Sizes of graphs, padding of inputs, fixed addresses and the order of the inputs are real.
"""

import logging
from array import array
from functools import partial
from itertools import islice

import pytest
import torch

from tests.backend.execution.test_step_packing import sequence_of_source
from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from tests.repeated_work import RepeatedWork
from varlen.execution.arenas import KvSize, few_dims
from varlen.execution.cpu.runner import CpuRunner, CpuSteps
from varlen.execution.cuda import runner as cuda_runner
from varlen.execution.cuda.runner import CudaSources, CudaSteps
from varlen.execution.cuda.step_fusion import fuse_steps
from varlen.execution.int8.calibration import coded_weight, linear_weights, use_codes
from varlen.execution.packing import (
    part_of_step,
    source_arrays,
    source_dims,
    step_arrays,
    step_dims,
)
from varlen.execution.programs import record_steps
from varlen.memory.arena import Arena
from varlen.memory.planner import Layout
from varlen.models import loading
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder
from varlen.program.recorder import Recorder
from varlen.scheduling.batch import Chunk
from varlen_kernels import reference
from varlen_kernels.reference.linear_layers import CodedWeight, widened

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS = 16, 90
LARGEST = {"tokens": 64, "sequences": 20, "logit_rows": 20}
KINDS = [
    "GPT2LMHeadModel",
    pytest.param("BartForConditionalGeneration", marks=pytest.mark.full),
    "T5ForConditionalGeneration",
    "LlamaForCausalLM",
]
# Ops of a step of few rows.
FEW_ROWS = {"norm_append_kv", "linear_residual", "norm_linear", "norm_next_tokens"}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture(scope="module")
def has_sources(folder):
    return Checkpoint.open(folder).translate is not None


@pytest.fixture(scope="module")
def programs(folder):
    """Return step and encoder for a CPU, then for a GPU with weights as there."""
    kv = KvSize(BLOCKS, BLOCK_SIZE, 0, torch.float32)
    checkpoint, dtype = Checkpoint.open(folder), torch.float32
    cpu = record_steps(load_decoder(checkpoint, dtype, CPU), kv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "is_by_output", lambda _: True)
        model = load_decoder(checkpoint, dtype, CPU)
    return cpu, record_steps(model, kv, partial(Recorder, for_gpu=True))


@pytest.fixture
def graphs():
    return RepeatedWork()


@pytest.fixture(scope="module")
def step_graphs():
    return RepeatedWork()


@pytest.fixture(scope="module")
def captured_steps(programs, step_graphs):
    """Return steps of a CPU and of a GPU, their caches, and what these hold."""
    cpu, gpu = (each[0] for each in programs)
    runner, cpu_caches = over_caches(CpuRunner, cpu, of_steps=True)
    blocks = {"blocks_per_sequence": 20, "blocks_per_source": 4}
    on_gpu, caches = over_caches(CudaSteps, gpu, graphs=step_graphs, **blocks)
    first = {name: cache.clone() for name, cache in cpu_caches.items()}
    return (CpuSteps(runner), cpu_caches), (on_gpu, caches), first


@pytest.fixture
def steps(captured_steps):
    """Return the steps of a CPU and of a GPU, over equal caches."""
    *steps, first = captured_steps
    for _, caches in steps:
        for name, cache in caches.items():
            cache.copy_(first[name])
    return tuple(steps)


@pytest.fixture
def sources(programs, graphs):
    """Return the encoders of a CPU and of a GPU, over equal caches."""
    if len(programs[0]) == 1:
        return None
    cpu, gpu = (each[1] for each in programs)
    return over_caches(CpuRunner, cpu, of_steps=True), over_caches(CudaSources, gpu, graphs=graphs)


def over_caches(kind, program, **options):
    """Return a runner of a program, and its random caches."""
    generator = torch.Generator().manual_seed(0)
    caches = {s.name: torch.randn(s.shape, generator=generator) for s in program.states}
    layout, room = Layout(program.buffers, 256), 0
    if kind is CudaSteps and (few := fuse_steps(program)):
        room = Layout(few.buffers, 256).plan(few_dims(LARGEST)).footprint
        options["few_rows"] = few
    arena = Arena(layout, LARGEST, CPU, room=room)
    return kind(program, reference, arena, caches, **options), caches


def packed(chunks):
    """Return a step that only computes logits."""
    return part_of_step(step_arrays(chunks, BLOCK_SIZE))


def logits_of(gpu, step):
    """Return the logits of a step."""
    gpu.run(step)
    return gpu.last_logits(len(step.inputs["logit_rows"]))


@pytest.fixture
def chunk(has_sources):
    """Return a function that returns a chunk whose blocks are its own."""
    free = iter(range(BLOCKS))

    def take(tokens):
        return array("i", islice(free, -(-tokens // BLOCK_SIZE)))

    def chunk(start, tokens, samples=1):
        blocks, token_ids = take(start + tokens), tuple(range(1, tokens + 1))
        if not has_sources:
            return Chunk(None, start, token_ids, blocks, (None,) * samples)
        length = 1 + (7 * blocks[0] + start) % 50
        sequence = sequence_of_source(length)
        return Chunk(sequence, start, token_ids, blocks, (None,) * samples, take(length))

    return chunk


STEPS = {
    "one": [(0, 1)],
    "three": [(40, 1), (0, 1), (17, 1)],
    "nine": [(20, 1)] * 9,
    "prompt": [(0, 30)],
    "mixed": [(33, 1), (16, 9), (0, 20, 0)],
    "samples": [(10, 1, 3), (4, 1)],
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_gives_the_logits_and_the_caches_of_the_cpu(folder, steps, chunk, step):
    chunks = [chunk(*each) for each in step]
    (cpu, cpu_caches), (gpu, gpu_caches) = steps

    step = packed(chunks)
    expected, actual = cpu.run(step.inputs, step_dims(step.inputs)).clone(), logits_of(gpu, step)

    roundings = encoder_roundings(folder)
    assert_close(actual, expected, roundings=roundings)
    for name, cache in gpu_caches.items():
        assert_close(cache, cpu_caches[name], roundings=roundings)


def test_drafted_tokens_are_rows_that_read_the_rows_before_them(folder, steps, chunk):
    whole = chunk(13, 6)
    rows = [
        whole._replace(
            start=position, token_ids=(token,), block_ids=whole.block_ids[: position // 16 + 1]
        )
        for position, token in enumerate(whole.token_ids, start=13)
    ]
    (cpu, cpu_caches), (gpu, gpu_caches) = steps
    roundings = encoder_roundings(folder)

    alone, drafted = packed([whole]), packed(rows)
    expected = cpu.run(alone.inputs, step_dims(alone.inputs)).clone()
    cached = {name: cache.clone() for name, cache in cpu_caches.items()}

    found = cpu.run(drafted.inputs, step_dims(drafted.inputs)).clone()
    assert_close(found[-1:], expected, roundings=roundings)
    assert_close(logits_of(gpu, drafted), found, roundings=roundings)
    for caches in (cpu_caches, gpu_caches):
        for name, cache in caches.items():
            assert_close(cache, cached[name], roundings=roundings)


def test_each_step_replays_one_graph_and_captures_nothing(steps, step_graphs, chunk):
    _, (gpu, _) = steps
    captured, replayed = step_graphs.captured, step_graphs.replayed

    decoding = [chunk(5, 1) for _ in range(20)]
    for count in range(1, 21):
        logits_of(gpu, packed(decoding[:count]))
    assert step_graphs.replayed == replayed + 20
    longest = LARGEST["tokens"] - 18
    prompt = chunk(0, longest)
    # up to 32 tokens and 64
    lengths = (2, 13, 14, 15, longest)
    for length in lengths:
        shorter = prompt._replace(token_ids=prompt.token_ids[:length])
        logits_of(gpu, packed([*decoding[:18], shorter]))

    assert step_graphs.captured == captured
    assert step_graphs.replayed == replayed + 20 + len(lengths)


def test_steps_of_short_contexts_have_graphs_of_their_own(
    folder, programs, graphs, chunk, monkeypatch
):
    monkeypatch.setattr(cuda_runner, "_CONTEXTS", (16, 32))
    # programs for each token of a context, but not for more than 4 rows
    monkeypatch.setattr(
        cuda_runner, "decode_programs", lambda _, *, rows, longest, **__: rows > 4 or longest
    )
    cpu, gpu = (each[0] for each in programs)
    runner, _ = over_caches(CpuRunner, cpu, of_steps=True)
    blocks = {"blocks_per_sequence": 20, "blocks_per_source": 4}
    steps, _ = over_caches(CudaSteps, gpu, graphs=graphs, **blocks)

    # three of 1, 2 and 4 sequences, one of 8, 16 and 20; steps of 32 and 64 tokens
    assert steps.graph_use.count == 3 * 3 + 3 + 2
    found = []
    for contexts in ([10], [15], [16], [31], [40], [3, 9], [3, 20], [45, 2], [5] * 5, [40] * 5):
        step = packed([chunk(start, 1) for start in contexts])
        expected = CpuSteps(runner).run(step.inputs, step_dims(step.inputs)).clone()
        assert_close(logits_of(steps, step), expected, roundings=encoder_roundings(folder))
        found.append(steps.graph())
    # contexts of up to 16 tokens, up to 32, and longer ones
    assert found[0] is found[1]
    assert found[2] is found[3]
    assert found[8] is found[9]
    assert len(set(found)) == len(found) - 3


def test_steps_of_few_rows_have_ops_of_their_own(folder, programs):
    program = programs[1][0]
    few = fuse_steps(program)

    # weights of a CPU have another layout
    assert fuse_steps(programs[0][0]) is None
    if Checkpoint.open(folder).architecture == "BartForConditionalGeneration":
        # norms behind its layers are folded into none
        assert few is None
        return
    # beside them, one kernel a layer and two before all layers
    kernels = {op.kernel for op in few.ops}
    assert kernels == {*FEW_ROWS, "embed", "paged_tiles", "attention_paged"}
    logits, tokens = few.outputs
    assert (logits,) == program.outputs
    assert tokens.dtype == torch.int32


def test_loading_logs_what_the_graphs_cost(programs, caplog):
    program = programs[1][0]
    with caplog.at_level(logging.INFO, "varlen"):
        arena = Arena(Layout(program.buffers, 256), LARGEST, CPU)
        caches = {state.name: torch.zeros(state.shape) for state in program.states}
        steps = CudaSteps(
            program,
            reference,
            arena,
            caches,
            blocks_per_sequence=20,
            blocks_per_source=4,
            graphs=RepeatedWork(),
        )

    # decode steps of 1, 2, 4, 8, 16 and 20 sequences, and steps of 32 and 64 tokens
    assert "captured 8 of 8 graphs in " in caplog.text
    assert steps.graph_use.count == 8


def test_layers_of_one_form_share_their_tiles_on_a_gpu(programs, has_sources):
    calls = [[op.kernel for op in program.ops].count("paged_tiles") for program, *_ in programs]

    # a table of the decoder's own tokens, and one of the sources
    assert calls == [0, 2 if has_sources else 1]


@pytest.mark.parametrize("lengths", [[7], [1, 19, 12], [3] * 9], ids=["one", "three", "nine"])
def test_sources_give_the_caches_of_the_cpu_by_one_replay(
    folder, has_sources, sources, graphs, lengths
):
    if not has_sources:
        pytest.skip("a decoder has no sources")
    (cpu, cpu_caches), (gpu, gpu_caches) = sources
    blocks = iter(range(BLOCKS))
    chunks = [
        Chunk(
            None, 0, (0,), array("i"), (), (next(blocks), next(blocks)), tuple(range(1, length + 1))
        )
        for length in lengths
    ]
    arrays = source_arrays(chunks, BLOCK_SIZE)
    captured = graphs.captured

    cpu.run(arrays, source_dims(arrays), [])
    gpu.start(arrays, source_dims(arrays))

    assert (graphs.captured, graphs.replayed) == (captured, 1)
    for name, cache in gpu_caches.items():
        assert_close(cache, cpu_caches[name], roundings=encoder_roundings(folder))


@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_steps_of_few_rows_take_codes(folder, programs, graphs, chunk, codes):
    if Checkpoint.open(folder).architecture == "BartForConditionalGeneration":
        pytest.skip("norms behind its layers are folded into none")
    program = programs[1][0]
    weights = {id(weight): weight for weight, _ in linear_weights([program]).values()}
    coded = {key: coded_weight(each, codes) for key, each in weights.items()}
    exact = {key: widened(each, torch.float32) for key, each in coded.items()}
    chunks, blocks = [chunk(7, 1), chunk(0, 1)], {"blocks_per_sequence": 20, "blocks_per_source": 4}

    few = fuse_steps(use_codes(program, coded))
    assert {op.kernel for op in few.ops} >= FEW_ROWS
    assert sum(isinstance(op.operands[1], CodedWeight) for op in few.ops if op.operands[1:]) > 1
    logits = []
    for each in (use_codes(program, coded), use_codes(program, exact)):
        gpu, _ = over_caches(CudaSteps, each, graphs=graphs, **blocks)
        logits.append(logits_of(gpu, packed(chunks)).clone())
    assert_close(*logits, roundings=encoder_roundings(folder))
    others, _ = over_caches(CudaSteps, program, graphs=graphs, **blocks)
    assert not torch.equal(logits_of(others, packed(chunks)), logits[0])
