"""The packed PyTorch peer computes what transformers computes, with a stand-in for its attention."""

from itertools import pairwise

import pytest
import torch

from tests.closeness import assert_close, encoder_roundings
from varlen_bench.kernels import encoder_peers as peers_module
from varlen_bench.kernels.encoder import random_prompts
from varlen_bench.kernels.encoder_peers import encoder_peers, exact_vectors
from varlen_bench.kernels.grid import TINY
from varlen_bench.kernels.peers import Unavailable
from varlen_bench.peers.checkpoints import save_random_checkpoint

pytestmark = pytest.mark.full

CPU = torch.device("cpu")
LENGTHS = [5, 1, 9, 3]


def attention_by_sequence(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k):
    """Stand-in for `varlen_attn`: the same arguments, one sequence after the other."""
    assert cu_seq_q is cu_seq_k
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == max(LENGTHS)
    parts = []
    for begin, end in pairwise(cu_seq_q.tolist()):
        rows = (part[begin:end].transpose(0, 1) for part in (q, k, v))
        parts.append(torch.nn.functional.scaled_dot_product_attention(*rows).transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def folder(tmp_path):
    save_random_checkpoint(TINY.encoders[0], tmp_path, positions=16)
    return tmp_path


def packed_peers(folder, compiled=lambda model: model, dtype=torch.float32):
    """Return the prompts, and the packed peers by name."""
    prompts = random_prompts(LENGTHS, vocabulary=50)
    peers = encoder_peers(folder, prompts, dtype, CPU, compiled)
    return prompts, {peer.name: peer for peer in peers.systems if peer.name.startswith("packed")}


@pytest.mark.parametrize("returns_tuple", [False, True], ids=["tensor", "tuple"])
def test_packed_vectors_match_float64(folder, returns_tuple, monkeypatch):
    def attention(*arguments):
        context = attention_by_sequence(*arguments)
        return (context, None) if returns_tuple else context

    monkeypatch.setattr(peers_module, "attribute", lambda module, name: attention)
    compiled = []
    prompts, peers = packed_peers(folder, lambda model: compiled.append(model) or model)

    with torch.inference_mode():
        results = {name: peer.build(None)({}) for name, peer in peers.items()}

    exact = exact_vectors(folder, prompts, CPU)
    assert set(results) == {"packed", "packed-compile"}
    assert len(compiled) == 1
    for vectors in results.values():
        assert_close(vectors, exact, roundings=encoder_roundings(folder))


def test_bfloat16_vectors_have_the_cosine_that_the_benchmark_asks_for(folder, monkeypatch):
    monkeypatch.setattr(peers_module, "attribute", lambda module, name: attention_by_sequence)
    prompts, peers = packed_peers(folder, dtype=torch.bfloat16)

    with torch.inference_mode():
        vectors = peers["packed"].build(None)({})

    assert vectors.dtype == torch.float32
    cosines = (vectors.double() * exact_vectors(folder, prompts, CPU)).sum(1)
    assert cosines.min() > 0.999


def test_a_torch_without_the_function_makes_the_peer_unavailable(folder, monkeypatch):
    import torch.nn.attention.varlen

    monkeypatch.delattr(torch.nn.attention.varlen, "varlen_attn")
    _, peers = packed_peers(folder)

    for peer in peers.values():
        with pytest.raises(Unavailable, match="varlen_attn"):
            peer.build(None)
