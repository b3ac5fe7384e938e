"""Steps on a GPU, with a stand-in for CUDA graphs on a CPU.

Sizes of graphs, padding of inputs, fixed addresses and the order of the inputs are real.
"""

import pytest
import torch

from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from varlen.execution.step_cpu import CpuSteps
from varlen.execution.step_cuda import CudaSteps
from varlen.memory.arena import Arena
from varlen.memory.layout import Layout
from varlen.models import inputs
from varlen.models.attention import PagedAttention
from varlen.models.checkpoint import Checkpoint
from varlen.models.registry import load_decoder
from varlen.program.recorder import Recorder
from varlen.sequence import Chunk
from varlen_kernels import reference

from .test_cuda import RepeatedWork

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS = 16, 40
LARGEST = {"tokens": 64, "logit_rows": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("gpt2"), "GPT2LMHeadModel")


@pytest.fixture(scope="module")
def program(folder):
    decoder = load_decoder(Checkpoint.open(folder), torch.float32, CPU)
    ops = Recorder()
    hidden = decoder.record(ops, PagedAttention(BLOCKS, BLOCK_SIZE, torch.float32))
    rows = ops.select_rows(hidden, inputs.logit_rows(ops))
    return ops.finish(decoder.record_logits(ops, rows))


@pytest.fixture
def graphs():
    return RepeatedWork()


@pytest.fixture
def steps(program, graphs):
    """Return the steps of a CPU and of a GPU, over equal caches."""
    generator = torch.Generator().manual_seed(0)
    caches = {state.name: torch.randn(state.shape, generator=generator) for state in program.states}

    def make(kind, **options):
        arena = Arena(Layout(program.buffers, 256), LARGEST, CPU)
        copies = {name: cache.clone() for name, cache in caches.items()}
        return kind(program, reference, arena, copies, block_size=BLOCK_SIZE, **options), copies

    return make(CpuSteps), make(CudaSteps, blocks_per_sequence=20, graphs=graphs)


def chunk(start, tokens, samples=1):
    """Return a chunk whose blocks are its own."""
    first = chunk.next_block
    chunk.next_block += -(-(start + tokens) // BLOCK_SIZE)
    blocks = tuple(range(first, chunk.next_block))
    token_ids = tuple(range(1, tokens + 1))
    return Chunk(None, start, token_ids, blocks, (None,) * samples)


STEPS = {
    "one": [(0, 1)],
    "three": [(40, 1), (0, 1), (17, 1)],
    "nine": [(20, 1)] * 9,
    "prompt": [(0, 30)],
    "mixed": [(33, 1), (16, 9), (0, 20, 0)],
    "samples": [(10, 1, 3), (4, 1)],
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_gives_the_logits_and_the_caches_of_the_cpu(folder, steps, step):
    chunk.next_block = 0
    chunks = [chunk(*each) for each in step]
    (cpu, cpu_caches), (gpu, gpu_caches) = steps

    expected, actual = cpu.logits(chunks).clone(), gpu.logits(chunks)

    roundings = encoder_roundings(folder)
    assert_close(actual, expected, roundings=roundings)
    for name, cache in gpu_caches.items():
        assert_close(cache, cpu_caches[name], roundings=roundings)


def test_steps_that_decode_replay_and_capture_nothing(steps, graphs):
    _, (gpu, _) = steps
    captured = graphs.captured

    for count in range(1, 21):
        chunk.next_block = 0
        gpu.logits([chunk(5, 1) for _ in range(count)])

    assert graphs.captured == captured
    assert graphs.replayed == 20


def test_a_step_with_a_prompt_replays_nothing(steps, graphs):
    _, (gpu, _) = steps
    chunk.next_block = 0

    gpu.logits([chunk(5, 1), chunk(0, 7)])

    assert graphs.replayed == 0
