"""The real server on a GPU gives the answers of the CPU, single and batched."""

import random

import numpy as np
import pytest
import torch

from tests.checkpoints import WORDS
from tests.closeness import assert_close, encoder_roundings
from varlen_tools.local_server import LocalServer

from .clients import GrpcClient, HttpClient, texts
from .serving import add_model

pytestmark = pytest.mark.gpu

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def gpu_server(tmp_path_factory, minilm):
    repository = tmp_path_factory.mktemp("gpu")
    for dtype in DTYPES:
        add_model(repository, dtype, minilm, device="cuda", dtype=dtype)
    with LocalServer(repository) as running:
        running.wait_ready()
        yield running


@pytest.fixture(params=[GrpcClient, HttpClient], ids=["grpc", "http"])
def gpu_client(request, gpu_server):
    with request.param(gpu_server) as client:
        yield client


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_text_gets_the_vector_of_the_cpu(gpu_client, in_process, minilm, dtype):
    chance = random.Random(0)
    rows = [" ".join(chance.choices(WORDS, k=chance.randint(1, 40))) for _ in range(50)]
    expected = in_process.embed(rows)

    batched = gpu_client.infer(dtype, texts(*rows))
    alone = np.concatenate([gpu_client.infer(dtype, texts(row)) for row in rows[:10]])

    precision = DTYPES[dtype]
    roundings = encoder_roundings(minilm, precision)
    assert_close(batched, expected, roundings=roundings, dtype=precision)
    assert_close(alone, expected[:10], roundings=roundings, dtype=precision)
