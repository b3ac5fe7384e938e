"""The calls that the compile checks compile, and the limits of their machine code."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch

from varlen_bench.ops.beam_searches import advance_searches, follow_beams
from varlen_bench.ops.call import OpCall, kernels
from varlen_bench.ops.chosen_tokens import beam_step, sample_tokens
from varlen_bench.ops.kv_blocks import append_kv, attention_paged, copy_blocks, paged_tiles
from varlen_bench.ops.logit_edits import edit_logits
from varlen_bench.ops.padded import masked_softmax, pack, unpack
from varlen_bench.ops.rows import (
    activate,
    activate_gate,
    add_layer_norm,
    embed,
    embed_layer_norm,
    layer_norm,
    linear_activate,
    norm_heads,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
    rotary,
)
from varlen_bench.ops.sequences import (
    attention_tiles,
    attention_varlen,
    first_tokens,
    pool,
    term_weights,
)
from varlen_kernels import Activation

_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_ONE, _BOTH, _ALL = (_BF16,), (_FP32, _BF16), (_FP32, _FP16, _BF16)


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A call of a launcher on CPU tensors, which compiles kernels inside `dry_run`.

    Attributes:
        label: name that distinguishes the call from other calls of its op.
        make: returns the call for a dtype.
        narrow_loads: limit of global loads under 128 bits; None if the row width allows no wider ones.
        dtypes: dtypes to compile. fp16 needs the loads and registers of bf16, so one call per op checks it.
        tensor_cores: whether kernels for 16-bit dtypes must use tensor cores: HMMA on sm_80, HGMMA on sm_90.
    """

    label: str
    make: partial[OpCall]
    narrow_loads: int | None = None
    dtypes: tuple[torch.dtype, ...] = _BOTH
    tensor_cores: bool = False

    @property
    def op(self) -> str:
        """The launcher's name."""
        return self.make(_FP32).op

    @property
    def name(self) -> str:
        """Op and label, as in registers.csv."""
        return f"{self.op}-{self.label}"

    def run(self, dtype: torch.dtype) -> None:
        call = self.make(dtype)
        call.run(kernels("fused"), call.make_empty())


def _call(
    label: str, make: Callable[..., OpCall], *sizes: object, narrow: int | None = None, **more: Any
) -> CompiledCall:
    """Return a call with these limits; other arguments by name are options of `make`."""
    limits = {name: more.pop(name) for name in ("dtypes", "tensor_cores") if name in more}
    return CompiledCall(label, partial(make, *sizes, **more), narrow, **limits)


def _softmax(keys: int, **limits: Any) -> CompiledCall:
    return _call(str(keys), masked_softmax, [keys] * 2, keys, 16, queries=16, **limits)


def _attention(label: str, head_dim: int, length: int = 64, **more: Any) -> CompiledCall:
    # narrow loads read cu_seqlens, which is not aligned; their number depends on num_warps
    more = {"narrow": 8, "tensor_cores": True, **more}
    return _call(label, attention_varlen, [length] * 4, 12, head_dim, **more)


def _paged(
    label: str, head_dim: int, new: int, sequences: int = 4, kv_heads: int = 4, **more: Any
) -> CompiledCall:
    lengths = [new] * sequences, [new + 24] * sequences
    more = {"narrow": 30, **more}
    return _call(label, attention_paged, *lengths, 12, kv_heads, head_dim, **more)


def _beam(label: str, *sizes: int, **more: Any) -> CompiledCall:
    # reading a group a second time needs narrow loads, and so does most of the second kernel
    return _call(label, beam_step, *sizes, has_finished=True, **{"dtypes": (_FP16,), **more})


def _sample(vocabulary: int, narrow: int | None = None) -> CompiledCall:
    make = partial(sample_tokens, 4, vocabulary, top_k=50, top_p=0.9)
    return CompiledCall(str(vocabulary), make, narrow, (_FP32,))


_LENGTHS = [16] * 4
_BY_DISTANCE: dict[str, Any] = {"narrow": None, "tensor_cores": False, "by_distance": True}

COMPILED = [
    # BERT-base, MiniLM, the widest row, and a width without vector loads
    _call("768", add_layer_norm, 64, 768, narrow=0, dtypes=_ALL),
    _call("384", add_layer_norm, 64, 384, narrow=0),
    _call("16384", add_layer_norm, 64, 16_384, narrow=0),
    _call("501", add_layer_norm, 64, 501),
    _call("768", rms_norm, 64, 768, narrow=0),
    _call("4096", rms_norm, 64, 4096, narrow=0),
    _call("768", residual_rms_norm, 64, 768, narrow=0),
    _call("4096", residual_rms_norm, 64, 4096, narrow=0),
    _call("768", layer_norm, 64, 768, narrow=0),
    _call("768", residual_layer_norm, 64, 768, narrow=0),
    _call("1600", residual_layer_norm, 64, 1600, narrow=0),
    _call("64", norm_heads, 64, 12, 4, 64, narrow=0),
    _call("128", norm_heads, 64, 32, 8, 128, narrow=0),
    # two loads of positions per thread
    _call("64", rotary, 64, 12, 4, 64, narrow=2),
    _call("128", rotary, 64, 32, 8, 128, narrow=2),
    # one load of an id per load of a row
    _call("768", embed, 64, 768, narrow=4, vocabulary=64, positions=64),
    _call("4096", embed, 64, 4096, narrow=2, vocabulary=64),
    # three loads of ids per row of a thread
    _call("768", embed_layer_norm, 64, 768, narrow=3, vocabulary=64, positions=64),
    _call("384", embed_layer_norm, 64, 384, narrow=6, vocabulary=64, positions=64),
    *(_call(kind, activate, 64, 3072, narrow=0, kind=kind) for kind in get_args(Activation)),
    # without CUDA, torch's product and the kernel of `activate`
    _call("3072", linear_activate, 64, 16, 3072, narrow=0, dtypes=_ONE),
    _call("3072", activate_gate, 64, 3072, narrow=0),
    # one load of a length; 10 and 500 keys allow vectors of 2 and 4 elements
    _softmax(10),
    _softmax(80, narrow=1),
    _softmax(500, dtypes=_ALL),
    _softmax(501),
    _softmax(4096, narrow=1),
    _softmax(16_384, narrow=2),
    _call("large_causal", masked_softmax, [1024] * 2, 1024, 16, narrow=1, causal=True),
    _call("64", attention_tiles, [64] * 4, 12, 64, dtypes=_ONE),
    _attention("64", 64, dtypes=_ALL),
    _attention("64_long", 64, 256),
    # tiles of fewer than 64 queries, which wgmma does not support
    _attention("64_short", 64, 16, narrow=None, tensor_cores=False),
    # several heads a program
    _attention("64_shortest", 64, 4, has_tiles=True, narrow=3, dtypes=_ONE, tensor_cores=False),
    # as a server's encoder calls it
    _attention("64_tiles", 64, has_tiles=True, narrow=3, dtypes=_ONE),
    # one more column of the table
    _attention("64_keys", 64, has_tiles=True, half_keys=True, narrow=4, dtypes=_ONE),
    _attention(
        "64_near_keys", 64, narrow=4, dtypes=_ONE, has_tiles=True, half_keys=True, window=65
    ),
    _attention("64_causal", 64, causal=True),
    _attention("64_window", 64, causal=True, kv_heads=4, window=32, dtypes=_ONE),
    _attention("64_near", 64, window=65, dtypes=_ONE),
    # one narrow load of the bias per score
    _attention("64_biased", 64, causal=True, biased=True, narrow=None),
    # one narrow load of the row of each distance; tiles have fewer than 64 queries
    _attention("64_distances", 64, **_BY_DISTANCE),
    _attention("128_distances", 128, dtypes=_ONE, **_BY_DISTANCE),
    *(_attention(str(head_dim), head_dim) for head_dim in (32, 96, 128, 256)),
    _attention("80", 80, dtypes=_ONE, narrow=None),
    # narrow loads read the slots; of paged attention, the block tables and the bounds of the sequences
    _call("64", append_kv, 64, 12, 4, 64, narrow=4),
    _call("80", append_kv, 64, 12, 12, 80, dtypes=_ONE),
    # only keys and values
    _call("64_alone", append_kv, 64, 0, 4, 64, narrow=4, dtypes=_ONE),
    # Llama and Qwen3; narrow loads read positions, too
    _call("64_rotated", append_kv, 64, 12, 4, 64, narrow=8, rotated=True),
    _call("128_rotated", append_kv, 64, 32, 8, 128, narrow=8, dtypes=_ONE, rotated=True),
    _call(
        "128_normed", append_kv, 64, 32, 8, 128, narrow=8, dtypes=_ONE, rotated=True, normed=True
    ),
    _call("64", copy_blocks, 4, 12, 4, 64, narrow=2, dtypes=_ONE),
    _call("64", paged_tiles, [40] * 4, [64] * 4, 12, 4, 64, dtypes=_ONE),
    _call("64_decode", paged_tiles, [1] * 4, [25] * 4, 12, 4, 64, dtypes=_ONE),
    _paged("64", 64, 40, dtypes=_ALL, tensor_cores=True),
    _paged("64_long", 64, 160, dtypes=_ONE, tensor_cores=True),
    _paged("64_short", 64, 5, dtypes=_ONE),
    _paged("64_window", 64, 40, window=32, tensor_cores=True),
    # one narrow load of the bias per score
    _paged("64_biased", 64, 40, biased=True, narrow=None, tensor_cores=True),
    _paged("64_decode_biased", 64, 1, biased=True, narrow=None),
    _paged("128", 128, 40, dtypes=_ONE, tensor_cores=True),
    # fp32 spills up to 16 bytes under Triton 3.6
    _paged("256", 256, 40, dtypes=_ONE),
    # GPT-2 has as many key heads as heads
    _paged("64_decode", 64, 1, kv_heads=12, dtypes=_ALL),
    _paged("64_decode_grouped", 64, 1, dtypes=_ONE),
    # without splits, because the programs fill a wave
    _paged("128_decode_whole", 128, 1, 132, dtypes=_ONE),
    _paged("128_decode", 128, 1, block_size=64, window=32, dtypes=_ONE),
    _paged("256_decode", 256, 1),
    # two loads of cu_seqlens and one of `normalize`
    _call("mean", pool, _LENGTHS, 768, narrow=3, mode="mean"),
    _call("max", pool, _LENGTHS, 384, narrow=3, mode="max"),
    # long sequences, in two kernels
    _call("parts", pool, [64] * 4, 768, narrow=3, mode="mean"),
    _call("parts_max", pool, [64] * 4, 384, narrow=3, dtypes=_ONE, mode="max"),
    _call("parts_widest", pool, [64] * 4, 16_384, narrow=3, mode="mean"),
    _call("weighted", pool, _LENGTHS, 768, narrow=3, dtypes=_ONE, mode="weighted_mean"),
    _call("parts_weighted", pool, [64] * 4, 768, narrow=3, dtypes=_ONE, mode="weighted_mean"),
    _call("cls", pool, _LENGTHS, 768, narrow=2, mode="cls", normalized=False),
    _call("widest", pool, _LENGTHS, 16_384, narrow=3, mode="mean"),
    _call("501", pool, _LENGTHS, 501, dtypes=_ONE, mode="max"),
    # one load more: of the tokens that are not pooled
    _call("unpooled", pool, _LENGTHS, 768, narrow=4, dtypes=_ONE, mode="weighted_mean", unpooled=2),
    _call("unpooled_cls", pool, _LENGTHS, 768, narrow=4, dtypes=_ONE, mode="cls", unpooled=2),
    _call(
        "unpooled_parts",
        pool,
        [64] * 4,
        768,
        narrow=4,
        dtypes=_ONE,
        mode="weighted_mean",
        unpooled=2,
    ),
    # as pooling of slices: a sum, and a maximum of a slice that is not full
    _call("sum", term_weights, _LENGTHS, 64, 4096, narrow=2, mode="sum"),
    _call("3000", term_weights, _LENGTHS, 64, 3000, dtypes=_ONE),
    _call("768", first_tokens, _LENGTHS, 768, narrow=2),
    _call("768", unpack, _LENGTHS, 768, narrow=2),
    _call("768", pack, _LENGTHS, 768, narrow=2),
    # vocabularies of real models, and the largest sizes
    _beam("4x32000", 8, 4, 32000, dtypes=_ALL),
    _beam("4x32000-128", 128, 4, 32000),
    _beam("4x50257", 8, 4, 50257, dtypes=(_FP32, _FP16)),
    _beam("4x250000", 8, 4, 250000, dtypes=(_FP32, _FP16)),
    _beam("5x300000", 1, 5, 300000),
    _beam("64x32000", 2, 64, 32000),
    _beam("1x32000-edits", 32, 1, 32000, width=16, edits=64, dtypes=_BOTH),
    _beam("1x32000-widest", 8, 1, 32000, width=128),
    _beam("64x300000", 1, 64, 300000, dtypes=(_FP32, _FP16)),
    # numbers of single beams are narrow loads
    _call("2x32", follow_beams, 2, 32, 32, dtypes=_ONE),
    _call("2x32", advance_searches, 2, 32, 32000, dtypes=_ONE),
    # single logits
    _call("500", edit_logits, 4, 500, 32000, dtypes=(_FP32,)),
    # one load of each number of a row
    _sample(32000, 5),
    _sample(50257),
]
