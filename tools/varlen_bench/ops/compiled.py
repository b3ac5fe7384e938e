"""The calls that the compile checks compile, and the limits of their machine code."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch

from varlen_bench.ops.call import OpCall, kernels
from varlen_bench.ops.chosen_tokens import beam_step, sample_tokens
from varlen_bench.ops.kv_blocks import append_kv, attention_paged, paged_tiles
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


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A call of a launcher on CPU tensors, which compiles kernels inside `dry_run`.

    Attributes:
        label: what distinguishes the call from others of its op.
        make: returns the call for a dtype.
        narrow_loads: limit of global loads under 128 bits; None if the row width allows no wider ones.
        dtypes: dtypes to compile. fp16 needs the loads and registers of bf16, so one call per op checks it.
        tensor_cores: whether kernels for 16-bit dtypes must use tensor cores: HMMA on sm_80, HGMMA on sm_90.
    """

    label: str
    make: partial[OpCall]
    narrow_loads: int | None = None
    dtypes: tuple[torch.dtype, ...] = (_FP32, _BF16)
    tensor_cores: bool = False

    @property
    def op(self) -> str:
        """The launcher's name."""
        return self.make.func.__name__

    @property
    def name(self) -> str:
        """Op and label, as in registers.csv."""
        return f"{self.op}-{self.label}"

    def run(self, dtype: torch.dtype) -> None:
        call = self.make(dtype)
        call.run(kernels("fused"), call.make_empty())


def _softmax(keys: int, narrow_loads: int | None = None) -> CompiledCall:
    make = partial(masked_softmax, [keys] * 2, keys, 16, queries=16)
    return CompiledCall(str(keys), make, narrow_loads)


def _attention(label: str, head_dim: int, length: int = 64, **options: Any) -> CompiledCall:
    make = partial(attention_varlen, [length] * 4, 12, head_dim, **options)
    # narrow loads read cu_seqlens, which is not aligned; their number depends on num_warps
    return CompiledCall(label, make, narrow_loads=8, tensor_cores=True)


def _paged(
    label: str, head_dim: int, new: int, sequences: int = 4, *, kv_heads: int = 4, **options: Any
) -> CompiledCall:
    lengths = [new] * sequences, [new + 24] * sequences
    make = partial(attention_paged, *lengths, 12, kv_heads, head_dim, **options)
    return CompiledCall(label, make, narrow_loads=30)


def _beam(label: str, sequences: int, beams: int, vocabulary: int, **options: Any) -> CompiledCall:
    # reading a group a second time needs narrow loads, and so does most of the second kernel
    make = partial(beam_step, sequences, beams, vocabulary, has_finished=True, **options)
    return CompiledCall(label, make, dtypes=(_FP16,))


def _sample(vocabulary: int, narrow_loads: int | None = None) -> CompiledCall:
    make = partial(sample_tokens, 4, vocabulary, top_k=50, top_p=0.9)
    return CompiledCall(str(vocabulary), make, narrow_loads, (_FP32,))


_EMBED = partial(embed_layer_norm, vocabulary=64, positions=64)
_LENGTHS = [16] * 4

COMPILED = [
    # BERT-base, MiniLM, the widest row, and a width without vector loads
    CompiledCall("768", partial(add_layer_norm, 64, 768), 0, (_FP32, _FP16, _BF16)),
    CompiledCall("384", partial(add_layer_norm, 64, 384), 0),
    CompiledCall("16384", partial(add_layer_norm, 64, 16_384), 0),
    CompiledCall("501", partial(add_layer_norm, 64, 501)),
    CompiledCall("768", partial(rms_norm, 64, 768), 0),
    CompiledCall("4096", partial(rms_norm, 64, 4096), 0),
    CompiledCall("768", partial(residual_rms_norm, 64, 768), 0),
    CompiledCall("4096", partial(residual_rms_norm, 64, 4096), 0),
    CompiledCall("768", partial(layer_norm, 64, 768), 0),
    CompiledCall("768", partial(residual_layer_norm, 64, 768), 0),
    CompiledCall("1600", partial(residual_layer_norm, 64, 1600), 0),
    CompiledCall("64", partial(norm_heads, 64, 12, 4, 64), 0),
    CompiledCall("128", partial(norm_heads, 64, 32, 8, 128), 0),
    # two loads of positions per thread
    CompiledCall("64", partial(rotary, 64, 12, 4, 64), 2),
    CompiledCall("128", partial(rotary, 64, 32, 8, 128), 2),
    # one load of an id per load of a row
    CompiledCall("768", partial(embed, 64, 768, vocabulary=64, positions=64), 4),
    CompiledCall("4096", partial(embed, 64, 4096, vocabulary=64), 2),
    # three loads of ids per row of a thread
    CompiledCall("768", partial(_EMBED, 64, 768), 3),
    CompiledCall("384", partial(_EMBED, 64, 384), 6),
    *(
        CompiledCall(kind, partial(activate, 64, 3072, kind=kind), 0)
        for kind in get_args(Activation)
    ),
    # without CUDA, torch's product and the kernel of `activate`
    CompiledCall("3072", partial(linear_activate, 64, 16, 3072), 0, (_BF16,)),
    CompiledCall("3072", partial(activate_gate, 64, 3072), 0),
    # one load of a length; 10 and 500 keys allow vectors of 2 and 4 elements
    _softmax(10),
    _softmax(80, 1),
    replace(_softmax(500), dtypes=(_FP32, _FP16, _BF16)),
    _softmax(501),
    _softmax(4096, 1),
    _softmax(16_384, 2),
    CompiledCall("large_causal", partial(masked_softmax, [1024] * 2, 1024, 16, causal=True), 1),
    CompiledCall("64", partial(attention_tiles, [64] * 4, 12, 64), dtypes=(_BF16,)),
    replace(_attention("64", 64), dtypes=(_FP32, _FP16, _BF16)),
    _attention("64_long", 64, 256),
    # tiles of fewer than 64 queries, which wgmma does not support
    replace(_attention("64_short", 64, 16), narrow_loads=None, tensor_cores=False),
    # several heads a program
    replace(
        _attention("64_shortest", 64, 4, has_tiles=True),
        narrow_loads=3,
        dtypes=(_BF16,),
        tensor_cores=False,
    ),
    # as a server's encoder calls it
    replace(_attention("64_tiles", 64, has_tiles=True), narrow_loads=3, dtypes=(_BF16,)),
    # one more column of the table
    replace(
        _attention("64_keys", 64, has_tiles=True, half_keys=True), narrow_loads=4, dtypes=(_BF16,)
    ),
    replace(
        _attention("64_near_keys", 64, has_tiles=True, half_keys=True, window=65),
        narrow_loads=4,
        dtypes=(_BF16,),
    ),
    _attention("64_causal", 64, causal=True),
    replace(_attention("64_window", 64, causal=True, kv_heads=4, window=32), dtypes=(_BF16,)),
    replace(_attention("64_near", 64, window=65), dtypes=(_BF16,)),
    # one narrow load of the bias per score
    replace(_attention("64_biased", 64, causal=True, biased=True), narrow_loads=None),
    # one narrow load of the row of each distance; tiles have fewer than 64 queries
    *(
        replace(
            _attention(f"{head_dim}_distances", head_dim, by_distance=True),
            dtypes=dtypes,
            narrow_loads=None,
            tensor_cores=False,
        )
        for head_dim, dtypes in ((64, (_FP32, _BF16)), (128, (_BF16,)))
    ),
    *(_attention(str(head_dim), head_dim) for head_dim in (32, 96, 128, 256)),
    replace(_attention("80", 80), dtypes=(_BF16,), narrow_loads=None),
    # narrow loads read the slots; of paged attention, the block tables and the bounds of the sequences
    CompiledCall("64", partial(append_kv, 64, 12, 4, 64), 4),
    CompiledCall("80", partial(append_kv, 64, 12, 12, 80), dtypes=(_BF16,)),
    # keys and values alone
    CompiledCall("64_alone", partial(append_kv, 64, 0, 4, 64), 4, (_BF16,)),
    CompiledCall("64", partial(paged_tiles, [40] * 4, [64] * 4, 12, 4, 64), dtypes=(_BF16,)),
    CompiledCall("64_decode", partial(paged_tiles, [1] * 4, [25] * 4, 12, 4, 64), dtypes=(_BF16,)),
    replace(_paged("64", 64, 40), dtypes=(_FP32, _FP16, _BF16), tensor_cores=True),
    replace(_paged("64_long", 64, 160), dtypes=(_BF16,), tensor_cores=True),
    replace(_paged("64_short", 64, 5), dtypes=(_BF16,)),
    replace(_paged("64_window", 64, 40, window=32), tensor_cores=True),
    # one narrow load of the bias per score
    replace(_paged("64_biased", 64, 40, biased=True), narrow_loads=None, tensor_cores=True),
    replace(_paged("64_decode_biased", 64, 1, biased=True), narrow_loads=None),
    replace(_paged("128", 128, 40), dtypes=(_BF16,), tensor_cores=True),
    # fp32 spills up to 16 bytes under Triton 3.6
    replace(_paged("256", 256, 40), dtypes=(_BF16,)),
    # GPT-2 has as many key heads as heads
    replace(_paged("64_decode", 64, 1, kv_heads=12), dtypes=(_FP32, _FP16, _BF16)),
    replace(_paged("64_decode_grouped", 64, 1), dtypes=(_BF16,)),
    # too many tokens for splits
    replace(_paged("128_decode_whole", 128, 1, 400), dtypes=(_BF16,)),
    replace(_paged("128_decode", 128, 1, block_size=64, window=32), dtypes=(_BF16,)),
    _paged("256_decode", 256, 1),
    # two loads of cu_seqlens and one of `normalize`
    CompiledCall("mean", partial(pool, _LENGTHS, 768, mode="mean"), 3),
    CompiledCall("max", partial(pool, _LENGTHS, 384, mode="max"), 3),
    # long sequences, in two kernels
    CompiledCall("parts", partial(pool, [64] * 4, 768, mode="mean"), 3),
    CompiledCall("parts_max", partial(pool, [64] * 4, 384, mode="max"), 3, (_BF16,)),
    CompiledCall("parts_widest", partial(pool, [64] * 4, 16_384, mode="mean"), 3),
    CompiledCall("weighted", partial(pool, _LENGTHS, 768, mode="weighted_mean"), 3, (_BF16,)),
    CompiledCall("parts_weighted", partial(pool, [64] * 4, 768, mode="weighted_mean"), 3, (_BF16,)),
    CompiledCall("cls", partial(pool, _LENGTHS, 768, mode="cls", normalized=False), 2),
    CompiledCall("widest", partial(pool, _LENGTHS, 16_384, mode="mean"), 3),
    CompiledCall("501", partial(pool, _LENGTHS, 501, mode="max"), dtypes=(_BF16,)),
    # one load more: of the tokens that are not pooled
    CompiledCall(
        "unpooled", partial(pool, _LENGTHS, 768, mode="weighted_mean", unpooled=2), 4, (_BF16,)
    ),
    CompiledCall("unpooled_cls", partial(pool, _LENGTHS, 768, mode="cls", unpooled=2), 4, (_BF16,)),
    CompiledCall(
        "unpooled_parts",
        partial(pool, [64] * 4, 768, mode="weighted_mean", unpooled=2),
        4,
        (_BF16,),
    ),
    # as pooling of slices: a sum, and a maximum of a slice that is not full
    CompiledCall("sum", partial(term_weights, _LENGTHS, 64, 4096, mode="sum"), 2),
    CompiledCall("3000", partial(term_weights, _LENGTHS, 64, 3000), dtypes=(_BF16,)),
    CompiledCall("768", partial(first_tokens, _LENGTHS, 768), 2),
    CompiledCall("768", partial(unpack, _LENGTHS, 768), 2),
    CompiledCall("768", partial(pack, _LENGTHS, 768), 2),
    # vocabularies of real models, and the largest sizes
    replace(_beam("4x32000", 8, 4, 32_000), dtypes=(_FP32, _FP16, _BF16)),
    _beam("4x32000-128", 128, 4, 32_000),
    replace(_beam("4x50257", 8, 4, 50_257), dtypes=(_FP32, _FP16)),
    replace(_beam("4x250000", 8, 4, 250_000), dtypes=(_FP32, _FP16)),
    _beam("5x300000", 1, 5, 300_000),
    _beam("64x32000", 2, 64, 32_000),
    replace(_beam("1x32000-edits", 32, 1, 32_000, width=16, edits=64), dtypes=(_FP32, _BF16)),
    _beam("1x32000-widest", 8, 1, 32_000, width=128),
    replace(_beam("64x300000", 1, 64, 300_000), dtypes=(_FP32, _FP16)),
    # one load of each number of a row
    _sample(32_000, 5),
    _sample(50_257),
]
