"""An encoder on the fused kernels, in CUDA graphs or in the interpreter."""

import numpy as np
import pytest
import torch
import transformers

from tests.closeness import assert_rows_close, encoder_roundings
from tests.repeated_work import RepeatedWork
from varlen.config import EngineConfig
from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.model_state import OneShot
from varlen.execution.packing import largest_dims
from varlen.execution.runner import Runner
from varlen.memory.arena import Arena
from varlen.memory.planner import Layout
from varlen.models.blocks.heads import record_head
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_encoder
from varlen.program.recorder import Recorder
from varlen.request.request import Masks, Prompt, RequestOptions
from varlen_kernels import fused

MAX_TOKENS = 64
MODEL_CLASSES = {
    "embed": "BertModel",
    "token_classify": "BertForTokenClassification",
    "classify": "BertForSequenceClassification",
}
# Slow in the interpreter, which runs their kernels in test_vocabulary.py.
MASKED_CLASSES = dict.fromkeys(("sparse_embed", "fill_mask"), "BertForMaskedLM")


@pytest.fixture(params=MODEL_CLASSES)
def load(request, tmp_path):
    """Return a function that loads a small random BERT in fp32 on a device."""
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=80,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    kind = (MODEL_CLASSES | MASKED_CLASSES)[request.param]
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    # the tests send token ids only
    (tmp_path / "tokenizer.json").write_text("{}")

    def load_on(device):
        settings = EngineConfig(
            task=request.param, device=device, dtype="fp32", max_batch_tokens=MAX_TOKENS
        )
        return Runner(Checkpoint.open(tmp_path), settings)

    return load_on


def fused_runner(load, device, folder):
    """Return a runner of the model on the fused kernels, with a GPU's program."""
    if device.type == "cuda":
        return load("cuda").state
    checkpoint, task = Checkpoint.open(folder), load("cpu").info.task
    encoder = load_encoder(checkpoint, torch.float32, device)
    ops = Recorder(for_gpu=True)
    hidden = encoder.record(ops)
    program = ops.finish(record_head(ops, task, encoder.heads, hidden, checkpoint.pooling))
    arena = Arena(Layout(program.buffers, 256), largest_dims(MAX_TOKENS), device)
    return OneShot(CudaRunner(program, fused, arena, RepeatedWork()))


# `make test` compares a smaller encoder in test_fake_cuda.py
@pytest.mark.full
def test_results_match_the_reference(load, device, tmp_path):
    numbers = np.random.default_rng(0)
    ours, fused_ones = load("cpu"), fused_runner(load, device, tmp_path)
    # in the interpreter, graphs of all sizes take more time than batches
    for lengths in [1], [5, 1, 9], [30, 2, 17], [40, 12, 12]:
        batch = [
            Prompt(numbers.integers(0, 50, n).astype(np.int32), numbers.integers(0, 2, n))
            for n in lengths
        ]
        options = [RequestOptions(normalize=index % 2 == 0) for index in range(len(batch))]
        expected = ours.run(batch, options)

        results = fused_ones.run(batch, options)

        assert_rows_close(results, expected, roundings=encoder_roundings(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("load", MASKED_CLASSES, indirect=True)
def test_masked_language_models_match_the_reference(load, tmp_path):
    numbers = np.random.default_rng(0)
    batch = [
        Prompt(
            numbers.integers(0, 50, n).astype(np.int32),
            payload=Masks(np.arange(masks, dtype=np.int32)),
        )
        for n, masks in ((30, 8), (2, 1), (17, 3))
    ]
    options = [RequestOptions()] * len(batch)
    expected = load("cpu").state.run(batch, options)

    results = load("cuda").state.run(batch, options)

    # of masks the probabilities, since equal ones may change places
    rows = [[row[:, 1] if row.ndim == 3 else row for row in found] for found in (results, expected)]
    assert_rows_close(*rows, roundings=16 * encoder_roundings(tmp_path))
