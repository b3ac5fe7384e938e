"""Decoder checkpoints in llama.cpp's format, GGUF.

llama.cpp's own converter refuses tokenizers that it does not know. Files for it have none: prompts are token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

_Weight = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]
# Weights of GPT-2's linear layers have the input first.
_INPUT_FIRST = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def write_gguf(
    checkpoint: Path, path: Path, kind: str = "F32", *, with_tokenizer: bool = False
) -> None:
    """Write the weights of a GPT2LMHeadModel or LlamaForCausalLM.

    Args:
        kind: type of matrices, such as "Q4_K", whose rows are whole blocks; other weights are fp32.
        with_tokenizer: whether the file has the checkpoint's byte-level tokenizer.

    Raises:
        ValueError: the checkpoint is of another family, or has a weight that llama.cpp does not know.
    """
    import gguf

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    family = config["model_type"]
    if family not in ("gpt2", "llama"):
        raise ValueError(f"model_type is {family!r}; allowed: gpt2, llama")
    writer: Any = gguf.GGUFWriter(path, family)
    layers = (
        _add_gpt2_fields(writer, config) if family == "gpt2" else _add_llama_fields(writer, config)
    )
    writer.add_vocab_size(config["vocab_size"])
    if with_tokenizer:
        _add_tokenizer(writer, checkpoint / "tokenizer.json")
    else:
        writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    architecture = gguf.MODEL_ARCH.GPT2 if family == "gpt2" else gguf.MODEL_ARCH.LLAMA
    names: Any = gguf.get_tensor_name_map(architecture, layers)
    for stored, weight in _weights(checkpoint, config):
        name = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"llama.cpp has no name for {stored}")
        if kind == "F32" or weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            raw_dtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, quantized(weight, kind), raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def widened_gguf(checkpoint: Path, kind: str) -> dict[str, Tensor]:
    """Return the floats of a Llama's matrices in a type of `write_gguf`, by name.

    The package gguf widens them. Rows have other places in the file, and blocks are parts of rows.
    """
    import gguf
    import torch
    from safetensors.numpy import load_file

    of_kind = gguf.GGMLQuantizationType[kind]
    return {
        name: torch.from_numpy(gguf.quants.dequantize(quantized(weight, kind), of_kind))
        for name, weight in load_file(checkpoint / "model.safetensors").items()
        if weight.ndim == 2
    }


def quantized(weight: _Weight, kind: str) -> _Bytes:
    """Return the blocks of a matrix in the nearest codes, `[rows, bytes]`.

    The package gguf reads these types, and writes Q8_0 only.

    Args:
        kind: "Q8_0", "Q4_K", "Q5_K" or "Q6_K"; rows are multiples of 32, or 256 inputs.
    """
    import gguf

    if kind == "Q8_0":
        blocks: _Bytes = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
        return blocks
    values = weight.reshape(-1, 256)
    blocks = _q6_blocks(values) if kind == "Q6_K" else _affine_blocks(values, int(kind[1]))
    return blocks.reshape(len(weight), -1)


def _affine_blocks(values: _Weight, bits: int) -> _Bytes:
    """Return blocks of Q4_K or Q5_K: groups of 32 with scales and minima."""
    groups, most = values.reshape(-1, 8, 32), (1 << bits) - 1
    least = -groups.min(2).clip(max=0)
    factor, scale = _in_levels((groups.max(2).clip(min=0) + least) / most, 63)
    factor_of_least, minimum = _in_levels(least, 63)
    step = (factor * scale)[..., None]
    codes = _rounded((groups + (factor_of_least * minimum)[..., None]) / step, 0, most)
    sixes = [each[:, :4] | (each[:, 4:] >> 4 << 6) for each in (scale, minimum)]
    fours = (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little")[:, 0] if bits == 5 else None
    nibbles = codes & 15
    parts = [
        *(_half(each) for each in (factor, factor_of_least)),
        *(*sixes, fours),
        *([] if fifth is None else [fifth]),
        (nibbles[:, ::2] | (nibbles[:, 1::2] << 4)).reshape(len(codes), -1),
    ]
    return np.concatenate(parts, axis=1)


def _q6_blocks(values: _Weight) -> _Bytes:
    """Return blocks of Q6_K: groups of 16 with scales."""
    groups = values.reshape(-1, 16, 16)
    factor, scale = _in_levels(np.abs(groups).max(2) / 31, 127)
    codes = _rounded(groups / (factor * scale)[..., None] + 32, 0, 63).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    parts = [
        (low[:, :, :2] | (low[:, :, 2:] << 4)),
        high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6),
        scale,
        _half(factor),
    ]
    return np.concatenate([each.reshape(len(codes), -1) for each in parts], axis=1)


def _in_levels(numbers: _Weight, most: int) -> tuple[_Weight, _Bytes]:
    """Return a factor of each row, exact in fp16, and whole numbers."""
    factor = (numbers.max(1, keepdims=True) / most).clip(min=1e-7).astype(np.float16)
    factor = factor.astype(np.float32)
    return factor, _rounded(numbers / factor, 1, most)


def _rounded(values: npt.NDArray[Any], least: int, most: int) -> _Bytes:
    return values.round().clip(least, most).astype(np.uint8)


def _half(factor: _Weight) -> _Bytes:
    return factor.astype("<f2").view(np.uint8)


def _add_tokenizer(writer: Any, path: Path) -> None:
    """Add a byte-level tokenizer, whose special token ends texts."""
    content = json.loads(path.read_text(encoding="utf-8"))
    ids: dict[str, int] = content["model"]["vocab"]
    special = {each["content"] for each in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if each in special else 1 for each in tokens])
    writer.add_token_merges([" ".join(each) for each in content["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)


def _add_gpt2_fields(writer: Any, config: dict[str, Any]) -> int:
    """Add the sizes of a GPT-2, and return its number of layers."""
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    return int(config["n_layer"])


def _add_llama_fields(writer: Any, config: dict[str, Any]) -> int:
    """Add the sizes of a Llama, and return its number of layers."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    return int(config["num_hidden_layers"])


def _weights(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, _Weight]]:
    """Yield names and weights, in the order of values that llama.cpp has."""
    from safetensors import safe_open

    with safe_open(checkpoint / "model.safetensors", framework="np") as file:
        for name in file.keys():  # noqa: SIM118  # not a mapping
            weight: _Weight = file.get_tensor(name).astype(np.float32)
            if name.endswith(_INPUT_FIRST):
                weight = np.ascontiguousarray(weight.T)
            elif name.endswith("q_proj.weight"):
                weight = _by_pairs(weight, config["num_attention_heads"])
            elif name.endswith("k_proj.weight"):
                weight = _by_pairs(weight, config["num_key_value_heads"])
            yield name, weight


def _by_pairs(weight: _Weight, heads: int) -> _Weight:
    """Put the two values that rotary positions turn together next to each other."""
    features, hidden = weight.shape
    halves = weight.reshape(heads, 2, features // heads // 2, hidden)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(features, hidden)
