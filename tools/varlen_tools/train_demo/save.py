"""A checkpoint folder in Hugging Face form."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from varlen_tools.train_demo import gpt2, marian
from varlen_tools.train_demo.gpt2 import GPT2
from varlen_tools.train_demo.marian import Marian
from varlen_tools.train_demo.train import END_OF_TEXT
from varlen_tools.train_demo.train_dates import END, END_ID, PAD, PAD_ID, UNKNOWN
from varlen_tools.train_demo.transformer import Shape

WEIGHTS = "model.safetensors"
# As in OPUS-MT's checkpoints.
_BEAMS = 4
# A date in ISO form has 11 tokens.
_MAX_LENGTH = 32


def save_gpt2(folder: Path, model: GPT2, shape: Shape, tokenizer: Tokenizer) -> None:
    """Write a GPT2LMHeadModel with its tokenizer."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    files: dict[str, dict[str, object]] = {
        "config.json": _gpt2_config(shape, end),
        "generation_config.json": {
            "_from_model_config": True,
            "bos_token_id": end,
            "eos_token_id": end,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer",
            "add_prefix_space": False,
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "unk_token": END_OF_TEXT,
            "model_max_length": shape.positions,
        },
    }
    weights = {f"transformer.{name}": value for name, value in model.state_dict().items()}
    _write(folder, files, tokenizer, weights)


def _gpt2_config(shape: Shape, end_token: int) -> dict[str, object]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "dtype": "float32",
        "vocab_size": shape.vocabulary,
        "n_positions": shape.positions,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": gpt2.EPSILON,
        "initializer_range": gpt2.DEVIATION,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "bos_token_id": end_token,
        "eos_token_id": end_token,
    }


def save_marian(folder: Path, model: Marian, shape: Shape, tokenizer: Tokenizer) -> None:
    """Write a MarianMTModel with its tokenizer; it answers with four beams unless asked otherwise."""
    files: dict[str, dict[str, object]] = {
        "config.json": _marian_config(shape),
        "generation_config.json": {
            "bad_words_ids": [[PAD_ID]],
            "decoder_start_token_id": PAD_ID,
            "eos_token_id": END_ID,
            "forced_eos_token_id": END_ID,
            "max_length": _MAX_LENGTH,
            "num_beams": _BEAMS,
            "pad_token_id": PAD_ID,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "unk_token": UNKNOWN,
            "pad_token": PAD,
            "model_max_length": shape.positions,
        },
    }
    state = model.state_dict()
    weights = {"final_logits_bias": state.pop("final_logits_bias")}
    weights |= {f"model.{name}": value for name, value in state.items()}
    _write(folder, files, tokenizer, weights)


def _marian_config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "dtype": "float32",
        "vocab_size": shape.vocabulary,
        "decoder_vocab_size": shape.vocabulary,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": shape.positions,
        "d_model": shape.hidden,
        "encoder_layers": shape.layers,
        "decoder_layers": shape.layers,
        "encoder_attention_heads": shape.heads,
        "decoder_attention_heads": shape.heads,
        "encoder_ffn_dim": 4 * shape.hidden,
        "decoder_ffn_dim": 4 * shape.hidden,
        "activation_function": "swish",
        "scale_embedding": True,
        "init_std": marian.DEVIATION,
        "dropout": 0.0,
        "is_encoder_decoder": True,
        "pad_token_id": PAD_ID,
        "eos_token_id": END_ID,
        "decoder_start_token_id": PAD_ID,
        "forced_eos_token_id": END_ID,
    }


def _write(
    folder: Path,
    files: Mapping[str, Mapping[str, object]],
    tokenizer: Tokenizer,
    weights: dict[str, Tensor],
) -> None:
    """Write the files; the weights come last, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    partial = folder / f"{WEIGHTS}.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    # safetensors writes for its own user only, and the server may be another
    partial.chmod(0o644)
    partial.rename(folder / WEIGHTS)
