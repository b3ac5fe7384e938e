"""Quantized checkpoints, written by a statement of each format, with their weights.

This module does not use varlen, nor any library that quantizes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import WEIGHTS, save_checkpoint, set_fields, write_file

# Sizes that fill words of 32 bits.
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
}
GROUP = 16
# Parts of a weight by the ends of their names after the layer's, and the weight that they stand for, in fp32.
Parts = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Form:
    """A format.

    Attributes:
        quantize: returns the parts of a weight `[out, in]`.
        config: its `quantization_config`.
        file: the file that has it, if config.json has none.
    """

    quantize: Callable[[Tensor], Parts]
    config: dict[str, Any]
    file: str = "config.json"
    says: str = field(default="")


def save_quantized(
    folder: Path, name: str, kind: str = "LlamaForCausalLM", **sizes: Any
) -> dict[str, Tensor]:
    """Save a random checkpoint in a form, and return its quantized weights `[out, in]` by name."""
    form, by_input = FORMS[name], kind.startswith("GPT2")
    save_checkpoint(folder, kind, **(sizes or SIZES))
    tensors, expected = load_file(folder / WEIGHTS), {}
    torch.manual_seed(0)
    ends = (
        "_attn.weight",
        "_proj.weight",
        "_fc.weight",
        "dense.weight",
        "Wqkv.weight",
        "Wo.weight",
    )
    ends += ("Wi.weight", "query.weight", "key.weight", "value.weight")
    for weight in [each for each in tensors if each.endswith(ends)]:
        stored = tensors.pop(weight)
        parts, expected[weight] = form.quantize(stored.t() if by_input else stored)
        layer = weight.removesuffix(".weight")
        tensors |= {f"{layer}{end}": part.contiguous() for end, part in parts.items()}
    save_file(tensors, folder / WEIGHTS)
    if form.file == "config.json":
        set_fields(folder, form.file, quantization_config=form.config)
    else:
        write_file(folder, form.file, form.config)
    return expected


def widen(folder: Path, expected: Mapping[str, Tensor]) -> None:
    """Make a quantized checkpoint one of floats."""
    tensors = load_file(folder / WEIGHTS)
    layers = tuple(name.removesuffix("weight") for name in expected)
    kept = {
        name: each
        for name, each in tensors.items()
        if name.endswith(".bias") or not name.startswith(layers)
    }
    save_file(kept | {name: each.contiguous() for name, each in expected.items()}, folder / WEIGHTS)
    set_fields(folder, "config.json", quantization_config=None)
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        (folder / name).unlink(missing_ok=True)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Return codes `[a, n]` in words, the first in the lowest bits: `[a, n / (32 / bits)]`."""
    count = 32 // bits
    words = torch.zeros(len(codes), -(-codes.shape[1] // count), dtype=torch.int64)
    for at in range(codes.shape[1]):
        words[:, at // count] += codes[:, at].long() << (at % count * bits)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _affine(
    weight: Tensor, bits: int, groups: Tensor, *, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes `[out, in]` from 0, scales and zero points `[out, groups]`.

    Args:
        groups: the group of each input.
    """
    count, most = int(groups.max()) + 1, (1 << bits) - 1
    parts = [weight[:, groups == group] for group in range(count)]
    low = torch.stack([part.amin(1) for part in parts], 1)
    high = torch.stack([part.amax(1) for part in parts], 1)
    if symmetric:
        scale = (torch.maximum(-low, high) * 2 / most).half()
        zero = torch.full_like(low, 1 << (bits - 1))
    else:
        scale = ((high - low) / most).half()
        zero = (-low / scale).round().clamp(0, most)
    codes = (weight / scale.float()[:, groups] + zero[:, groups]).round().clamp(0, most)
    return codes.int(), scale, zero.int()


def _value(codes: Tensor, scale: Tensor, zero: Tensor, groups: Tensor) -> Tensor:
    return (codes - zero[:, groups]).float() * scale.float()[:, groups]


def _in_order(weight: Tensor, size: int = GROUP) -> Tensor:
    return torch.arange(weight.shape[1]) // size


def _order(weight: Tensor) -> Tensor:
    """Return an order of inputs, the same for layers with the same inputs."""
    numbers = torch.Generator().manual_seed(weight.shape[1])
    return torch.randperm(weight.shape[1], generator=numbers)


def _awq(weight: Tensor) -> Parts:
    groups = _in_order(weight)
    codes, scale, zero = _affine(weight, 4, groups)

    def interleaved(values: Tensor) -> Tensor:
        eights = values.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return _words(eights.flatten(1), 4)

    parts = {".qweight": interleaved(codes.t()), ".qzeros": interleaved(zero.t())}
    return parts | {".scales": scale.t()}, _value(codes, scale, zero, groups)


def _gptq(
    bits: int,
    *,
    version: int = 1,
    symmetric: bool = True,
    ordered: bool = False,
    size: int = GROUP,
) -> Callable[[Tensor], Parts]:
    def quantize(weight: Tensor) -> Parts:
        groups = _in_order(weight, size)
        if ordered:
            groups = groups[_order(weight)]
        codes, scale, zero = _affine(weight, bits, groups, symmetric=symmetric)
        zeros = _words(zero.t(), bits)
        if version == 1:
            # the words less one in each place: a zero point of 0 borrows from the next one
            zeros = zeros - sum(1 << at for at in range(0, 32, bits))
        parts = {
            ".qweight": _words(codes, bits).t(),
            ".qzeros": zeros,
            ".scales": scale.t(),
            ".g_idx": groups.int(),
        }
        return parts, _value(codes, scale, zero, groups)

    return quantize


def _gptq_of_two_kinds(weight: Tensor) -> Parts:
    """Return a layer of a Llama, whose down projections have other bits and groups."""
    is_down = weight.shape[1] == SIZES["intermediate_size"]
    return (_gptq(8, size=2 * GROUP) if is_down else _gptq(4))(weight)


def _packed(
    bits: int, size: int, *, symmetric: bool = True, ordered: bool = False
) -> Callable[[Tensor], Parts]:
    def quantize(weight: Tensor) -> Parts:
        groups = _in_order(weight, size or weight.shape[1])
        if ordered:
            groups = groups[_order(weight)]
        codes, scale, zero = _affine(weight, bits, groups, symmetric=symmetric)
        parts = {
            ".weight_packed": _words(codes, bits),
            ".weight_scale": scale.bfloat16(),
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts[".weight_zero_point"] = _words(zero.t(), bits).t()
        if ordered:
            parts[".weight_g_idx"] = groups.int()
        return parts, _value(codes, scale.bfloat16(), zero, groups)

    return quantize


def _int8(weight: Tensor) -> Parts:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale.float()


def _fp8(rows: int, columns: int, name: str = ".weight_scale") -> Callable[[Tensor], Parts]:
    def quantize(weight: Tensor) -> Parts:
        out, fan_in = weight.shape
        by = (torch.arange(out) // (rows or out), torch.arange(fan_in) // (columns or fan_in))
        scale = torch.zeros(int(by[0][-1]) + 1, int(by[1][-1]) + 1)
        for row, column in ((i, j) for i in range(len(scale)) for j in range(scale.shape[1])):
            part = weight[by[0] == row][:, by[1] == column]
            scale[row, column] = part.abs().max() / 448
        codes = (weight / scale[by[0]][:, by[1]]).to(torch.float8_e4m3fn)
        stored = scale.flatten() if scale.numel() == 1 else scale
        rounding = {".input_scale": torch.ones(1), ".kv_scale": torch.ones(1)}
        parts = {".weight": codes, name: stored, **rounding}
        return parts, codes.float() * scale[by[0]][:, by[1]]

    return quantize


def _table(*, double: bool, storage: torch.dtype = torch.uint8) -> Callable[[Tensor], Parts]:
    def quantize(weight: Tensor) -> Parts:
        size, nested, offset = 64, 256, 0.25
        entries = torch.randn(16).sort().values.clamp(-1, 1)
        blocks = weight.flatten().view(-1, size)
        largest = blocks.abs().amax(1)
        end = ".weight.quant_state.bitsandbytes__nf4"
        state = {
            "quant_type": "nf4",
            "blocksize": size,
            "dtype": "float32",
            "shape": [*weight.shape],
        }
        parts = {".weight.absmax": largest, ".weight.quant_map": entries}
        if double:
            levels = torch.linspace(-1, 1, 256)
            factor = (largest - offset).abs().max().view(1)
            codes = ((largest - offset) / factor)[:, None].sub(levels).abs().argmin(1)
            largest = levels[codes] * factor + offset
            state |= {
                "nested_blocksize": nested,
                "nested_offset": offset,
                "nested_dtype": "float32",
            }
            parts |= {".weight.absmax": codes.to(torch.uint8)}
            parts |= {".weight.nested_absmax": factor, ".weight.nested_quant_map": levels}
        codes = (blocks / largest[:, None])[..., None].sub(entries).abs().argmin(-1)
        pairs = codes.flatten().view(-1, 2)
        packed = (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8)
        parts[".weight"] = packed.view(storage)[:, None]
        parts[end] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return parts, (entries[codes] * largest[:, None]).view_as(weight)

    return quantize


def _llm_int8(weight: Tensor) -> Parts:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    parts = {
        ".weight": codes,
        ".SCB": largest,
        ".weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return parts, codes.float() * (largest / 127)[:, None]


def _compressed(form: str, *, activations: bool = False, **weights: Any) -> dict[str, Any]:
    """Return the configuration of compressed-tensors."""
    weights = {"dynamic": False, "symmetric": True, "type": "int", **weights}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": {"num_bits": 8, "dynamic": True} if activations else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


_AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "data_type": "int",
    "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
}
_MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_GROUPS = {"strategy": "group", "group_size": GROUP}

FORMS: Mapping[str, Form] = {
    "awq": Form(_awq, _AWQ, says="14 of 4 bits in groups of 16"),
    "awq-old": Form(
        _awq,
        {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"},
        "quant_config.json",
    ),
    "gptq": Form(_gptq(4), _GPTQ),
    "gptq-old": Form(
        _gptq(4, ordered=True),
        {"bits": 4, "group_size": GROUP, "desc_act": True, "damp_percent": 0.01, "sym": True},
        "quantize_config.json",
    ),
    "gptq-asymmetric": Form(
        _gptq(4, symmetric=False, ordered=True), {**_GPTQ, "desc_act": True, "sym": False}
    ),
    "gptq-v2": Form(
        _gptq(4, version=2, symmetric=False), {**_GPTQ, "checkpoint_format": "gptq_v2"}
    ),
    "gptq-mixed": Form(
        _gptq_of_two_kinds,
        {**_GPTQ, "dynamic": {"+:.*down": {"bits": 8, "group_size": 2 * GROUP}, "-:lm_head": {}}},
        says="12 of 4 bits in groups of 16, 2 of 8 bits in groups of 32",
    ),
    "auto-round": Form(_gptq(4), _AUTO_ROUND, says="quantized by gptq: 14 of 4 bits"),
    "auto-round-mixed": Form(
        _gptq_of_two_kinds,
        {
            **_AUTO_ROUND,
            "quant_method": "intel/auto-round",
            "packing_format": "auto_round:gptq",
            "extra_config": {"down_proj": {"bits": 8, "group_size": 2 * GROUP}},
        },
    ),
    "auto-round-awq": Form(
        _awq, {**_AUTO_ROUND, "packing_format": "auto_round:auto_awq", "sym": False}
    ),
    "gptq-8": Form(_gptq(8), {**_GPTQ, "bits": 8}, says="14 of 8 bits in groups of 16"),
    "packed-4": Form(_packed(4, GROUP), _compressed("pack-quantized", num_bits=4, **_GROUPS)),
    "packed-4-ordered": Form(
        _packed(4, GROUP, ordered=True),
        _compressed("pack-quantized", num_bits=4, actorder="group", **_GROUPS),
    ),
    "packed-4-asymmetric": Form(
        _packed(4, GROUP, symmetric=False),
        _compressed("pack-quantized", num_bits=4, **_GROUPS, symmetric=False),
    ),
    "packed-4-channel": Form(
        _packed(4, 0), _compressed("pack-quantized", num_bits=4, strategy="channel")
    ),
    "packed-8": Form(_packed(8, 0), _compressed("pack-quantized", num_bits=8, strategy="channel")),
    "int8": Form(
        _int8,
        _compressed("int-quantized", num_bits=8, strategy="channel", activations=True),
        says="14 of 8 bits with a scale for each output; they are widened to the dtype of the model as they are loaded;"
        " activations are not quantized",
    ),
    "fp8-tensor": Form(
        _fp8(0, 0), _compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
    ),
    "fp8-modelopt": Form(
        _fp8(0, 0),
        {"quant_method": "modelopt", "producer": {"name": "modelopt"}, **_MODELOPT},
        says="14 of 8-bit floats with one scale; they are widened to the dtype of the model as they are loaded;"
        " activations are not quantized",
    ),
    "fp8-modelopt-old": Form(
        _fp8(0, 0),
        {"producer": {"name": "modelopt"}, "quantization": _MODELOPT},
        "hf_quant_config.json",
    ),
    "fp8-channel": Form(_fp8(1, 0), {**_FP8, "quant_method": "fbgemm_fp8"}),
    "fp8-blocks": Form(
        _fp8(24, 16, ".weight_scale_inv"),
        {**_FP8, "weight_block_size": [24, 16]},
        says="10 of 8-bit floats with blocks of 24 x 16, 4 of 8-bit floats with blocks of 16 x 16",
    ),
    "nf4": Form(_table(double=False), _BNB),
    "nf4-bf16": Form(
        _table(double=False, storage=torch.bfloat16), {**_BNB, "bnb_4bit_quant_storage": "bfloat16"}
    ),
    "nf4-double": Form(
        _table(double=True),
        {**_BNB, "bnb_4bit_use_double_quant": True},
        says="weights quantized by bitsandbytes: 14 of 4 bits in groups of 64",
    ),
    "llm-int8": Form(_llm_int8, {"load_in_8bit": True, "llm_int8_threshold": 6.0}),
}
