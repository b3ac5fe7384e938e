"""Small GGUF files: written byte by byte, or by llama.cpp's package from a checkpoint."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

_ARCHITECTURES = {"gemma3_text": "gemma3"}
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    """Return an entry of the metadata."""
    return text(name) + struct.pack("<I", kind) + value


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """Return the header of a tensor; shapes are rows first."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    fields: list[bytes], entries: list[bytes], data: bytes = b"", *, version: int = 3
) -> bytes:
    """Return a file; the data begin at a multiple of 32."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(entries), len(fields))
    header += b"".join([*fields, *entries])
    return header + b"\0" * (-len(header) % 32) + data


def save_gguf(
    folder: Path,
    path: Path,
    *,
    kind: str = "F32",
    tensors: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write a checkpoint of a decoder as llama.cpp's converter does, and return the path.

    Args:
        kind: type of matrices whose rows are whole blocks.
        tensors: more tensors, by name.
        more: metadata, by name, whose type follows from the value.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer: Any = gguf.GGUFWriter(path, architecture)
    _add_config(writer, config)
    _add_tokenizer(writer, Tokenizer.from_file(str(folder / "tokenizer.json")))
    types = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    for name, value in more.items():
        # the later one of two values
        writer.kv_data[0].pop(name, None)
        writer.add_key_value(name, value, types.get(type(value), gguf.GGUFValueType.STRING))
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names: Any = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for stored, weight in load_file(folder / "model.safetensors").items():
        name, values = names.get_name(stored, try_suffixes=(".weight", ".bias")), weight
        if architecture == "llama" and (heads := config.get(_HEADS.get(stored.split(".")[-2], ""))):
            halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        dtype = gguf.GGMLQuantizationType[kind]
        block = gguf.GGML_QUANT_SIZES[dtype][0]
        if values.ndim == 2 and values.shape[-1] % block == 0 and kind != "F32":
            stored_values = gguf.quants.quantize(np.ascontiguousarray(values), dtype)
            writer.add_tensor(name, stored_values, raw_dtype=dtype)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_config(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rotary = config.get("rope_parameters") or {}
    rotary = rotary.get("full_attention", rotary)
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rotary["rope_theta"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if rotary["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf_scaling(rotary["rope_type"]))
        writer.add_rope_scaling_factor(rotary["factor"])
    if rotary["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])
    share = rotary.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    writer.add_rope_dimension_count(int(size * share))


def gguf_scaling(name: str) -> Any:
    import gguf

    return gguf.RopeScalingType(name)


def _add_tokenizer(writer: Any, tokenizer: Tokenizer) -> None:
    """Add a byte-level tokenizer."""
    ids = tokenizer.get_vocab()
    special = {each.content for each in tokenizer.get_added_tokens_decoder().values()}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if each in special else 1 for each in tokens])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(each) for each in merges])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
