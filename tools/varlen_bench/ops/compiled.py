"""The calls that the compile checks compile, and the limits of their machine code."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from varlen_bench.ops.call import kernels
from varlen_bench.ops.table import op_call
from varlen_kernels import Activation

_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_ONE, _BOTH, _ALL = (_BF16,), (_FP32, _BF16), (_FP32, _FP16, _BF16)


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A call of a launcher on CPU tensors, which compiles kernels inside `dry_run`.

    Attributes:
        label: name that distinguishes the call from other calls of its op.
        sizes: arguments of `op_call`.
        narrow_loads: limit of global loads under 128 bits; None if the row width allows no wider ones.
        dtypes: dtypes to compile. fp16 needs the loads and registers of bf16, so one call per op checks it.
        tensor_cores: whether kernels for 16-bit dtypes must use tensor cores: HMMA on sm_80, HGMMA on sm_90.
    """

    op: str
    label: str
    sizes: Mapping[str, Any]
    narrow_loads: int | None = None
    dtypes: tuple[torch.dtype, ...] = _BOTH
    tensor_cores: bool = False

    @property
    def name(self) -> str:
        """Op and label, as in registers.csv."""
        return f"{self.op}-{self.label}"

    def run(self, dtype: torch.dtype) -> None:
        made = op_call(self.op, dtype, **self.sizes)
        made.run(kernels("fused"), made.make_empty())


def _call(
    op: str,
    label: object,
    narrow: int | None = None,
    *,
    dtypes: tuple[torch.dtype, ...] = _BOTH,
    tensor_cores: bool = False,
    **sizes: Any,
) -> CompiledCall:
    """Return a call with these limits, of 64 tokens unless `sizes` has others."""
    return CompiledCall(
        op, str(label), {"lengths": [16] * 4, **sizes}, narrow, dtypes, tensor_cores
    )


def _attention(label: str, narrow: int | None = 8, **more: Any) -> CompiledCall:
    # narrow loads read cu_seqlens, which is not aligned; their number depends on num_warps
    more = {"lengths": [64] * 4, "tensor_cores": True, **more}
    return _call("attention_varlen", label, narrow, **more)


def _paged(label: str, new: int, narrow: int | None = 36, **more: Any) -> CompiledCall:
    # the merge of splits reads two numbers of each head and split
    count = more.pop("sequences", 4)
    # contexts long enough for splits
    more |= {"lengths": [new + 524] * count, "new": [new] * count}
    return _call("attention_paged", label, narrow, **more)


def _groups(label: str, rows: int, **more: Any) -> CompiledCall:
    return _call("linear_groups", label, None, lengths=[rows] * 8, **more)


def _append(label: str, narrow: int | None, optional: str = "", **more: Any) -> CompiledCall:
    return _call("append_kv", label, narrow, optional=optional, **more)


def _beam(label: str, batch: int, beams: int, vocabulary: int, **more: Any) -> CompiledCall:
    # reading a group a second time needs narrow loads, and so does most of the second kernel
    sizes = {"optional": "finished", "dtypes": (_FP16,), "lengths": [1] * batch, **more}
    return _call("beam_step", label, beams=beams, vocabulary=vocabulary, **sizes)


def _pool(label: str, narrow: int | None = 3, length: int = 16, **more: Any) -> CompiledCall:
    return _call("pool", label, narrow, lengths=[length] * 4, **more)


def _few(op: str, label: str, rows: int, **more: Any) -> CompiledCall:
    return _call(op, f"{label}_{rows}", lengths=[1] * rows, **more)


# Llama and Qwen3.
_WIDE_HEADS: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
_ROTATED, _NORMED = "position_ids cos_sin", "query_weight key_weight"
_GPT2: dict[str, Any] = {"norm": "layer"}
_UNPOOLED = "normalize unpooled_lengths"
_BY_DISTANCE: dict[str, Any] = {"narrow": None, "tensor_cores": False, "optional": "distances"}

COMPILED = [
    # BERT-base, MiniLM, the widest row, and a width without vector loads
    _call("add_layer_norm", 768, 0, dtypes=_ALL),
    _call("add_layer_norm", 384, 0, hidden=384),
    _call("add_layer_norm", 16384, 0, hidden=16_384),
    _call("add_layer_norm", 501, hidden=501),
    _call("rms_norm", 768, 0),
    _call("rms_norm", 4096, 0, hidden=4096),
    _call("residual_rms_norm", 768, 0),
    _call("residual_rms_norm", 4096, 0, hidden=4096),
    _call("layer_norm", 768, 0),
    _call("residual_layer_norm", 768, 0),
    _call("residual_layer_norm", 1600, 0, hidden=1600),
    _call("norm_heads", 64, 0),
    _call("norm_heads", 128, 0, **_WIDE_HEADS),
    # two loads of positions per thread
    _call("rotary", 64, 2),
    _call("rotary", 128, 2, **_WIDE_HEADS),
    # one load of an id per load of a row
    _call("embed", 768, 4),
    _call("embed", 4096, 2, hidden=4096, optional=""),
    # three loads of ids per row of a thread
    _call("embed_layer_norm", 768, 3),
    _call("embed_layer_norm", 384, 6, hidden=384),
    *(_call("activate", kind, 0, kind=kind) for kind in get_args(Activation)),
    # without CUDA, torch's product and the kernel of `activate`
    _call("linear_activate", 3072, 0, dtypes=_ONE),
    _call("activate_gate", 3072, 0),
    # narrow loads read the bounds of groups; with few rows tensor cores of sm_90 have no wgmma
    _groups("768", 64, hidden=768, features=3072, dtypes=_ALL, tensor_cores=True),
    _groups("768_decode", 1, hidden=768, features=3072),
    _groups("rank_16", 1, hidden=768, features=16),
    _groups("of_rank_16", 64, hidden=16, features=768, optional="bias"),
    # one load of a length; 10 and 500 keys allow vectors of 2 and 4 elements
    *(
        _call(
            "masked_softmax", keys, narrow, dtypes=dtypes, heads=16, queries=16, lengths=[keys] * 2
        )
        for keys, narrow, dtypes in [
            (10, None, _BOTH),
            (80, 1, _BOTH),
            (500, None, _ALL),
            (501, None, _BOTH),
            (4096, 1, _BOTH),
            (16_384, 2, _BOTH),
        ]
    ),
    # its kernel is the masked softmax
    _call("attention_padded", 64, 1, lengths=[64, 40], dtypes=_ONE),
    _call("masked_softmax", "large_causal", 1, heads=16, lengths=[1024] * 2, causal=True),
    _call("attention_tiles", 64, lengths=[64] * 4, dtypes=_ONE),
    _attention("64", dtypes=_ALL),
    _attention("64_long", lengths=[256] * 4),
    # tiles of fewer than 64 queries, which wgmma does not support
    _attention("64_short", None, lengths=[16] * 4, tensor_cores=False),
    # several heads a program
    _attention(
        "64_shortest", 3, optional="tiles", lengths=[4] * 4, dtypes=_ONE, tensor_cores=False
    ),
    # as a server's encoder calls it
    _attention("64_tiles", 3, optional="tiles", dtypes=_ONE),
    # one more column of the table
    _attention("64_keys", 4, optional="tiles key_lengths", dtypes=_ONE),
    _attention("64_near_keys", 4, optional="tiles key_lengths", dtypes=_ONE, window=65),
    _attention("64_causal", causal=True),
    _attention("64_window", causal=True, kv_heads=4, window=32, dtypes=_ONE),
    _attention("64_near", window=65, dtypes=_ONE),
    # Gemma 2, and heads of T5Gemma
    _attention("64_capped", dtypes=_ONE, soft_cap=50.0),
    _attention("256_capped", dtypes=_ONE, head_dim=256, causal=True, soft_cap=50.0),
    # one narrow load of the bias per score
    _attention("64_biased", None, causal=True, optional="bias"),
    # one narrow load of the row of each distance; tiles have fewer than 64 queries
    _attention("64_distances", **_BY_DISTANCE),
    _attention("128_distances", dtypes=_ONE, head_dim=128, **_BY_DISTANCE),
    *(_attention(str(head_dim), head_dim=head_dim) for head_dim in (32, 96, 128, 256)),
    _attention("80", None, dtypes=_ONE, head_dim=80),
    # narrow loads read the slots; of paged attention, the block tables and the bounds of the sequences
    _append("64", 4),
    _append("80", None, heads=12, kv_heads=12, head_dim=80, dtypes=_ONE),
    # only keys and values
    _append("64_alone", 4, heads=0, dtypes=_ONE),
    # narrow loads read positions, too
    _append("64_rotated", 8, _ROTATED),
    _append("128_rotated", 8, _ROTATED, dtypes=_ONE, **_WIDE_HEADS),
    _append("128_normed", 8, f"{_ROTATED} {_NORMED}", dtypes=_ONE, **_WIDE_HEADS),
    # GPT-2 small and Llama 3.2 1B, with as many rows as programs have
    _few("norm_append_kv", "768", 1, **_GPT2, optional="", kv_heads=12),
    _few("norm_append_kv", "768", 64, **_GPT2, optional="", kv_heads=12),
    _few("norm_append_kv", "2048", 4, hidden=2048, heads=32, kv_heads=8),
    _few("norm_append_kv", "2048", 16, hidden=2048, heads=32, kv_heads=8),
    _few("linear_residual", "768", 1),
    _few("linear_residual", "2048", 4, hidden=2048, features=8192),
    _few("linear_residual", "2048", 16, hidden=2048, features=8192),
    _few("linear_residual", "768", 64),
    _few("norm_linear", "2048", 1, hidden=2048, features=16_384),
    _few("norm_linear", "2048", 4, hidden=2048, features=16_384, tensor_cores=True),
    _few("norm_linear", "768", 16, **_GPT2, kind="gelu_tanh", is_gated=False),
    _few("norm_linear", "2048", 64, hidden=2048, features=16_384, tensor_cores=True),
    _few("norm_next_tokens", "768", 1, **_GPT2, vocabulary=50_257),
    _few("norm_next_tokens", "2048", 4, hidden=2048, vocabulary=128_256, tensor_cores=True),
    _few("norm_next_tokens", "768", 16, **_GPT2, vocabulary=50_257, tensor_cores=True),
    _few("norm_next_tokens", "2048", 64, hidden=2048, vocabulary=128_256, tensor_cores=True),
    _call("copy_blocks", 64, 2, layers=12, dtypes=_ONE),
    _call("paged_tiles", 64, lengths=[64] * 4, new=[40] * 4, dtypes=_ONE),
    _call("paged_tiles", "64_decode", lengths=[25] * 4, new=[1] * 4, dtypes=_ONE),
    _paged("64", 40, dtypes=_ALL, tensor_cores=True),
    _paged("64_long", 160, dtypes=_ONE, tensor_cores=True),
    _paged("64_short", 5, dtypes=_ONE),
    _paged("64_window", 40, window=320, tensor_cores=True),
    # one narrow load of the bias per score
    _paged("64_biased", 40, None, optional="tiles bias", tensor_cores=True),
    _paged("64_decode_biased", 1, None, optional="tiles bias"),
    _paged("128", 40, dtypes=_ONE, head_dim=128, tensor_cores=True),
    # fp32 spills up to 16 bytes under Triton 3.6
    _paged("256", 40, dtypes=_ONE, head_dim=256),
    # GPT-2 has as many key heads as heads
    _paged("64_decode", 1, kv_heads=12, dtypes=_ALL),
    _paged("64_decode_grouped", 1, dtypes=_ONE),
    # without splits, because the programs fill a wave
    _paged("128_decode_whole", 1, sequences=132, dtypes=_ONE, head_dim=128),
    _paged("128_decode", 1, block_size=64, window=320, dtypes=_ONE, head_dim=128),
    _paged("256_decode", 1, head_dim=256),
    _paged("256_capped", 40, dtypes=_ONE, head_dim=256, soft_cap=50.0),
    _paged("256_decode_capped", 1, dtypes=_ONE, head_dim=256, soft_cap=50.0),
    # two loads of cu_seqlens and one of `normalize`
    _pool("mean"),
    _pool("max", hidden=384, mode="max"),
    # long sequences, in two kernels
    _pool("parts", length=64),
    _pool("parts_max", length=64, hidden=384, dtypes=_ONE, mode="max"),
    _pool("parts_widest", length=64, hidden=16_384),
    _pool("weighted", dtypes=_ONE, mode="weighted_mean"),
    _pool("parts_weighted", length=64, dtypes=_ONE, mode="weighted_mean"),
    _pool("cls", 2, mode="cls", optional=""),
    _pool("widest", hidden=16_384),
    _pool("501", None, hidden=501, dtypes=_ONE, mode="max"),
    # one load more: of the tokens that are not pooled
    _pool("unpooled", 4, dtypes=_ONE, mode="weighted_mean", optional=_UNPOOLED),
    _pool("unpooled_cls", 4, dtypes=_ONE, mode="cls", optional=_UNPOOLED),
    _pool("unpooled_parts", 4, 64, dtypes=_ONE, mode="weighted_mean", optional=_UNPOOLED),
    # as pooling of slices: a sum, and a maximum of a slice that is not full
    _call("term_weights", "sum", 2, hidden=64, terms=4096, mode="sum"),
    _call("term_weights", 3000, hidden=64, dtypes=_ONE),
    _call("first_tokens", 768, 2),
    # vocabularies of real models, and the largest sizes
    _beam("4x32000", 8, 4, 32000, dtypes=_ALL),
    _beam("4x32000-128", 128, 4, 32000),
    _beam("4x50257", 8, 4, 50257, dtypes=(_FP32, _FP16)),
    _beam("4x250000", 8, 4, 250000, dtypes=(_FP32, _FP16)),
    _beam("5x300000", 1, 5, 300000),
    _beam("64x32000", 2, 64, 32000),
    _beam(
        "1x32000-edits", 32, 1, 32000, best=16, longest=64, optional="finished edits", dtypes=_BOTH
    ),
    _beam("1x32000-widest", 8, 1, 32000, best=128),
    _beam("64x300000", 1, 64, 300000, dtypes=(_FP32, _FP16)),
    # numbers of single beams are narrow loads
    _call("follow_beams", "2x32", lengths=[512] * 2, beams=32, dtypes=_ONE),
    _call("advance_searches", "2x32", lengths=[1] * 2, beams=32, vocabulary=32000, dtypes=_ONE),
    # single logits
    _call("edit_logits", 500, lengths=[500] * 4, vocabulary=32000, dtypes=(_FP32,)),
    # one load of each number of a row
    # tokens of a list are anywhere in their row
    _call("sample_tokens", 32000, 56, vocabulary=32000, dtypes=(_FP32,)),
    _call("sample_tokens", 50257, vocabulary=50257, dtypes=(_FP32,)),
]
