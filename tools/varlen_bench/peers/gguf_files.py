"""Decoder checkpoints in llama.cpp's format, GGUF.

llama.cpp's own converter refuses tokenizers that it does not know. These files have none: prompts are token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_Weight = npt.NDArray[np.float32]
# Weights of GPT-2's linear layers have the input first.
_INPUT_FIRST = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Write the fp32 weights of a GPT2LMHeadModel or LlamaForCausalLM.

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
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    kind = gguf.MODEL_ARCH.GPT2 if family == "gpt2" else gguf.MODEL_ARCH.LLAMA
    names: Any = gguf.get_tensor_name_map(kind, layers)
    for stored, weight in _weights(checkpoint, config):
        name = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"llama.cpp has no name for {stored}")
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
