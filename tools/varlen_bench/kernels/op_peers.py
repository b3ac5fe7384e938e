"""The peers of each op: other implementations of the same computation."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from varlen_bench.kernels.peers import (
    Call,
    Compile,
    Function,
    Peer,
    Peers,
    Prepare,
    attribute,
    compiled_peer,
    liger_peer,
    nothing,
    torch_peer,
)
from varlen_bench.ops.call import Inputs, OpCall, Read, as_tensor
from varlen_bench.ops.results import first, stacked
from varlen_kernels import reference

LIGHTSEQ = "lightseq"


def peers_of(call: OpCall, *, compiled: bool = True) -> Peers:
    """Return the peers of a call; without torch.compile if not `compiled`."""
    peers = _PEERS[call.op](call)
    return peers if compiled else peers.without_compile()


def _plain(
    function: Function, *others: Peer, read: Read = as_tensor, prepare: Prepare = nothing
) -> Peers:
    """Return a function of torch, the other peers, and the function compiled."""
    return Peers(
        (torch_peer(function, read=read), *others, compiled_peer(function, read=read)), prepare
    )


def _softmax(call: OpCall) -> Peers:
    scale = call.options["scale"]

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(x * scale + mask, dim=-1)

    def plain(x: Tensor) -> Tensor:
        return torch.softmax(x, dim=-1)

    def prepare(inputs: Inputs) -> Inputs:
        x = inputs["x"]
        hidden = torch.arange(x.shape[-1], device=x.device) >= inputs["seqlens"][:, None]
        mask = x.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(x.dtype).min)
        return {"mask": mask[:, None, None, :]}

    with_mask = torch_peer(masked, name="torch-masked")
    if scale != 1.0:
        return Peers((with_mask, compiled_peer(masked)), prepare)
    # no key is masked
    liger = liger_peer("liger_softmax", lambda function, inputs: function(inputs["x"]))
    return Peers((with_mask, *_plain(plain, liger).systems), prepare)


def _activate(call: OpCall) -> Peers:
    def activated(x: Tensor, bias: Tensor) -> Tensor:
        return reference.activate(x, bias, **call.options)

    return _plain(activated)


def _embed_layer_norm(call: OpCall) -> Peers:
    def embedded(
        token_ids: Tensor,
        position_ids: Tensor,
        type_ids: Tensor,
        token_table: Tensor,
        position_table: Tensor,
        type_table: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        summed = F.embedding(token_ids, token_table) + F.embedding(position_ids, position_table)
        summed = summed + F.embedding(type_ids, type_table)
        return F.layer_norm(summed, weight.shape, weight, bias, call.options["eps"])

    return _plain(embedded)


def _add_layer_norm(call: OpCall) -> Peers:
    eps = call.options["eps"]

    def plain(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x + residual, weight.shape, weight, bias, eps)

    liger = liger_peer(
        "liger_layer_norm",
        lambda function, i: function(i["x"] + i["residual"], i["weight"], i["bias"], eps),
    )
    return _plain(plain, liger)


def _residual_rms_norm(call: OpCall) -> Peers:
    eps = call.options["eps"]

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total, F.rms_norm(total, weight.shape, weight, eps)

    def call_liger(function: Function, i: Inputs) -> tuple[Tensor, Tensor]:
        normed, total = function(i["x"], i["residual"], i["weight"], eps)
        return total, normed

    liger = liger_peer("liger_fused_add_rms_norm", call_liger, stacked)
    return _plain(plain, liger, read=stacked)


def _activate_gate(call: OpCall) -> Peers:
    def gated(x: Tensor) -> Tensor:
        return reference.activate_gate(x, **call.options)

    def prepare(inputs: Inputs) -> Inputs:
        gate, up = inputs["x"].chunk(2, dim=1)
        return {"gate": gate.contiguous(), "up": up.contiguous()}

    liger = liger_peer("liger_swiglu", lambda function, i: function(i["gate"], i["up"]))
    return _plain(gated, liger, prepare=prepare)


def _attention(call: OpCall) -> Peers:
    """Return torch's packed attention, and peers on tensors that are padded before the measurement."""
    heads, scale = call.options["num_heads"], call.options["scale"]
    batch, longest = len(call.lengths), max(call.lengths)
    is_full = min(call.lengths) == longest

    def build_varlen(_: Compile) -> Call:
        function = attribute("torch.nn.attention.varlen", "varlen_attn")

        def run(inputs: Inputs) -> object:
            qkv, bounds = inputs["qkv"], inputs["cu_seqlens"]
            # its scale is head_dim ** -0.5 too
            q, k, v = qkv.view(len(qkv), 3, heads, -1).unbind(1)
            return function(q, k, v, bounds, bounds, longest, longest)

        return run

    def read_varlen(result: object, inputs: Inputs) -> Tensor:
        # some versions of torch also return the log-sum-exp
        return first(result, inputs).flatten(1)

    def unfused(q: Tensor, k: Tensor, v: Tensor, inside: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3)) * scale
        if not is_full:
            scores = scores.masked_fill(~inside, torch.finfo(q.dtype).min)
        return torch.matmul(scores.softmax(-1), v)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, inside: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if is_full else inside)

    def cudnn(q: Tensor, k: Tensor, v: Tensor, inside: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return sdpa(q, k, v, inside)

    def read(result: object, inputs: Inputs) -> Tensor:
        return as_tensor(result, inputs).transpose(1, 2)[inputs["inside"][:, 0, 0]].flatten(1)

    def prepare(inputs: Inputs) -> Inputs:
        bounds = inputs["cu_seqlens"][: batch + 1]
        qkv = inputs["qkv"]
        inside = torch.arange(longest, device=qkv.device) < bounds.diff()[:, None]
        whole = qkv.new_zeros(batch, longest, qkv.shape[1])
        whole[inside] = qkv[: sum(call.lengths)]
        q, k, v = whole.view(batch, longest, 3, heads, -1).permute(2, 0, 3, 1, 4).contiguous()
        return {"q": q, "k": k, "v": v, "inside": inside[:, None, None, :]}

    peers = (
        Peer("varlen_attn", build_varlen, read_varlen),
        torch_peer(sdpa, name="sdpa", read=read),
        torch_peer(cudnn, name="sdpa-cudnn", read=read),
        torch_peer(unfused, read=read),
        compiled_peer(unfused, read=read),
    )
    return Peers(peers, prepare)


def _attention_paged(call: OpCall) -> Peers:
    """Return torch's attention on keys that are padded before the measurement."""
    options, lengths = call.options, call.lengths
    heads, window = options["num_heads"], options.get("window", 0)
    batch, longest, new = len(lengths), max(lengths), call.tokens // len(lengths)
    if batch * new < call.tokens:
        # not as many new tokens in each sequence
        return Peers()

    def sdpa(q: Tensor, k: Tensor, v: Tensor, readable: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=readable, enable_gqa=k.shape[1] != heads
        )

    def read(result: object, inputs: Inputs) -> Tensor:
        return as_tensor(result, inputs).transpose(1, 2).flatten(2).flatten(0, 1)

    def prepare(inputs: Inputs) -> Inputs:
        tables = inputs["cu_blocks"].tolist()
        caches = inputs["key_cache"], inputs["value_cache"]
        _, key_heads, _, head_dim = caches[0].shape
        k, v = (cache.new_zeros(batch, key_heads, longest, head_dim) for cache in caches)
        for i, length in enumerate(lengths):
            blocks = inputs["block_ids"][tables[i] : tables[i + 1]].long()
            for dense, cache in zip((k, v), caches, strict=True):
                rows = cache[blocks].transpose(0, 1).flatten(1, 2)
                dense[i, :, :length] = rows[:, :length]
        q = inputs["qkv"].view(batch, new, -1, head_dim)[:, :, :heads].transpose(1, 2).contiguous()
        key = torch.arange(longest, device=q.device)
        query = inputs["context_lens"][:, None] - new + torch.arange(new, device=q.device)
        distance = query[:, None, :, None] - key
        readable = distance >= 0
        if window:
            readable &= distance < window
        return {"q": q, "k": k, "v": v, "readable": readable}

    return Peers((torch_peer(sdpa, name="sdpa", read=read),), prepare)


def _append_kv(call: OpCall) -> Peers:
    if "cos_sin" in call.inputs:
        return Peers(())
    heads, key_heads = call.options["num_heads"], call.options["num_kv_heads"]

    def indexed(
        qkv: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        block_size, head_dim = key_cache.shape[2:]
        by_head = qkv.view(len(qkv), -1, head_dim)
        _, keys, values = torch.split(by_head, [heads, key_heads, key_heads], dim=1)
        block, place = slots // block_size, slots % block_size
        key_cache[block, :, place] = keys
        value_cache[block, :, place] = values
        return key_cache, value_cache

    return Peers((torch_peer(indexed, read=call.read),))


def _pool(call: OpCall) -> Peers:
    batch = len(call.lengths)

    def added(x: Tensor, owner: Tensor, cu_seqlens: Tensor) -> Tensor:
        sums = torch.zeros(batch, x.shape[1], dtype=torch.float32, device=x.device)
        sums = sums.index_add(0, owner, x.float())
        return F.normalize(sums / cu_seqlens.diff()[:, None], dim=1)

    def prepare(inputs: Inputs) -> Inputs:
        lengths = inputs["cu_seqlens"].diff().long()
        owner = torch.arange(batch, device=lengths.device).repeat_interleave(lengths)
        return {"owner": owner}

    return _plain(added, prepare=prepare)


def _beam_step(call: OpCall) -> Peers:
    def plain(logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = torch.log_softmax(logits.float(), dim=-1) + scores.view(-1, 1)
        top = total.view(len(scores), -1).topk(2 * scores.shape[1], dim=1)
        vocabulary = logits.shape[1]
        return top.indices % vocabulary, top.indices // vocabulary, top.values

    def by_rows(logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Search each row first, which avoids writing the log-softmax."""
        best = 2 * scores.shape[1]
        found = logits.topk(min(best, logits.shape[1]), dim=1)
        offset = scores.view(-1, 1) - logits.float().logsumexp(1, keepdim=True)
        width = found.values.shape[1]
        top = (found.values.float() + offset).view(len(scores), -1).topk(best, dim=1)
        tokens = found.indices.view(len(scores), -1).gather(1, top.indices)
        return tokens, top.indices // width, top.values

    def build_lightseq(_: Compile) -> Call:
        step = attribute("varlen_bench.kernels.lightseq_rule", "beam_step")
        return lambda inputs: step(inputs["logits"], inputs["scores"])

    peers = (
        torch_peer(plain, read=call.read),
        torch_peer(by_rows, name="torch-by-rows", read=call.read),
        Peer(LIGHTSEQ, build_lightseq, call.read, no_graph="the host waits for the queue"),
        compiled_peer(plain, read=call.read),
        compiled_peer(by_rows, name="compile-by-rows", read=call.read),
    )
    return Peers(peers)


_PEERS: dict[str, Callable[[OpCall], Peers]] = {
    "masked_softmax": _softmax,
    "add_layer_norm": _add_layer_norm,
    "residual_rms_norm": _residual_rms_norm,
    "activate": _activate,
    "activate_gate": _activate_gate,
    "embed_layer_norm": _embed_layer_norm,
    "attention_varlen": _attention,
    "append_kv": _append_kv,
    "attention_paged": _attention_paged,
    "pool": _pool,
    "beam_step": _beam_step,
}
