"""Small random checkpoints in Hugging Face format, and edits of their files.

This module does not use varlen: transformers, tokenizers and safetensors write the checkpoints.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WEIGHTS = "model.safetensors"
# The transformers class whose checkpoints serve a task.
KIND_OF_TASK = {
    "embed": "BertModel",
    "sparse_embed": "BertForMaskedLM",
    "fill_mask": "BertForMaskedLM",
    "hidden": "BertModel",
    "classify": "BertForSequenceClassification",
    "rerank": "BertForSequenceClassification",
    "token_classify": "BertForTokenClassification",
}

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
# Three words, and word pieces for any other text.
LETTERS = ("the", "cat", "river", *_CHARACTERS, *(f"##{letter}" for letter in _CHARACTERS))
# One token each, so that the number of words in a text is its length.
WORDS = tuple(f"word{number}" for number in range(195))

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
_SMALL_ROBERTA = {**SMALL, "pad_token_id": 4, "max_position_embeddings": 69}
# By the beginning of the class's name, the fields of a small encoder that is no BERT.
SMALL_ENCODERS: Mapping[str, dict[str, Any]] = {
    "Roberta": _SMALL_ROBERTA,
    "XLMRoberta": {**_SMALL_ROBERTA, "type_vocab_size": 1},
    "Camembert": _SMALL_ROBERTA,
    "JinaEmbeddingsV3": {**SMALL, "type_vocab_size": 1, "pad_token_id": 4},
    "DistilBert": {
        "dim": 24,
        "n_layers": 2,
        "n_heads": 3,
        "hidden_dim": 40,
        "max_position_embeddings": 64,
    },
    "Electra": {**SMALL, "embedding_size": 10},
    "Albert": {**SMALL, "num_hidden_layers": 3, "embedding_size": 10},
    "MPNet": {**SMALL, "max_position_embeddings": 66},
    "NomicBert": SMALL,
    "ModernBert": {
        **SMALL,
        "num_hidden_layers": 4,
        "local_attention": 12,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
    },
    "Gte": {**SMALL, "type_vocab_size": 2},
    "DebertaV2": {
        **SMALL,
        "relative_attention": True,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
    },
    # after the longer name
    "Deberta": {
        **SMALL,
        "relative_attention": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
    },
    "EuroBert": {
        **SMALL,
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "mask_token_id": 4,
    },
}
_SMALL_LLAMA = {
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 52,
    "max_position_embeddings": 320,
    "head_dim": 6,
}
_SMALL_GEMMA2 = {
    **_SMALL_LLAMA,
    "head_dim": 8,
    "query_pre_attn_scalar": 5,
    "sliding_window": 7,
}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
# By the beginning of the class's name, the fields of a small decoder.
SMALL_DECODERS: Mapping[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 36, "n_layer": 3, "n_head": 3, "n_inner": 52, "n_positions": 320},
    "Llama": _SMALL_LLAMA,
    "Mistral": {**_SMALL_LLAMA, "sliding_window": None},
    "Qwen2": _SMALL_LLAMA,
    "Qwen3Moe": {
        **_SMALL_LLAMA,
        "head_dim": 10,
        "moe_intermediate_size": 20,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "Qwen3": {**_SMALL_LLAMA, "head_dim": 10},
    # the longest names first
    "Gemma3": {**_SMALL_GEMMA2, "num_hidden_layers": 4, "layer_types": _LAYER_TYPES},
    "Gemma2": _SMALL_GEMMA2,
    "Gemma": {**_SMALL_LLAMA, "num_key_value_heads": 1, "head_dim": 8},
    "Phi3": {**_SMALL_LLAMA, "pad_token_id": 0},
    "Granite": {
        **_SMALL_LLAMA,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "SmolLM3": {**_SMALL_LLAMA, "no_rope_layer_interval": 2, "pad_token_id": 0},
    "Olmo2": {**_SMALL_LLAMA, "num_key_value_heads": 6, "pad_token_id": 0},
    "Olmo3": {**_SMALL_LLAMA, "num_hidden_layers": 4, "sliding_window": 7, "pad_token_id": 0},
    "HunYuanDenseV1": {**_SMALL_LLAMA, "head_dim": 10, "pad_token_id": 0},
}
_SMALL_BART = {
    "d_model": 36,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 52,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_SMALL_T5 = {
    "d_model": 36,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "d_kv": 10,
    "d_ff": 52,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
# An encoder that is narrower than the decoder, with other heads.
_SMALL_T5GEMMA = {
    "hidden_size": 36,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "encoder": {**_SMALL_GEMMA2, "hidden_size": 24, "num_hidden_layers": 2, "head_dim": 6},
    "decoder": _SMALL_GEMMA2,
}
# By the beginning of the class's name, the fields of a small model with an encoder and a decoder.
SMALL_ENCODER_DECODERS: Mapping[str, dict[str, Any]] = {
    # the longest names first
    "T5Gemma": _SMALL_T5GEMMA,
    "Bart": _SMALL_BART,
    "MBart": _SMALL_BART,
    "Marian": {**_SMALL_BART, "forced_eos_token_id": 2},
    "M2M100": _SMALL_BART,
    "T5": _SMALL_T5,
    "MT5": _SMALL_T5,
}


def save_checkpoint(
    folder: Path,
    kind: str = "BertModel",
    *,
    words: Sequence[str] = LETTERS,
    files: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    model: Mapping[str, Any] | None = None,
    save: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Save a random checkpoint of the transformers class `kind` into `folder`, and return the folder.

    Args:
        folder: may not exist yet.
        kind: the class of an encoder, or of a model in `SMALL_DECODERS` or `SMALL_ENCODER_DECODERS`, whose tokenizer
            is byte-level.
        words: vocabulary of an encoder's tokenizer, after the special tokens.
        files: JSON files to add, by path; see `pooling_files`.
        dtype: dtype of the weights.
        model, save: more arguments of the class and of save_pretrained.
        config: fields of its configuration that differ from `SMALL` and the like.
    """
    small = {"Bert": SMALL, **SMALL_ENCODERS, **SMALL_DECODERS, **SMALL_ENCODER_DECODERS}
    family = next(name for name in small if kind.startswith(name))
    is_encoder = family == "Bert" or family in SMALL_ENCODERS
    tokenizer = _word_pieces((*SPECIAL_TOKENS, *words)) if is_encoder else _byte_pairs()
    settings = {"vocab_size": tokenizer.get_vocab_size(), **small[family], **config}
    # large enough that a wrong layer shows, small enough not to magnify rounding
    hidden = next(
        settings[name] for name in ("hidden_size", "n_embd", "d_model", "dim") if name in settings
    )
    if family == "T5Gemma":
        settings = _with_parts(settings, initializer_range=0.2)
    elif family not in ("T5", "MT5"):
        # T5 does this itself
        deviation = "init_std" if family in SMALL_ENCODER_DECODERS else "initializer_range"
        settings.setdefault(deviation, hidden**-0.5)
    if family in SMALL_DECODERS:
        settings = {"bos_token_id": 0, "eos_token_id": 0, **settings}
    torch.manual_seed(0)
    config_class = config_class_of(family)
    made = getattr(transformers, kind)(config_class(**settings), **(model or {}))
    # transformers initializes biases to zero and norms to one, which would hide mistakes
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        if hasattr(made, "final_logits_bias"):
            made.final_logits_bias.normal_()
    made.to(dtype).save_pretrained(folder, **(save or {}))
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (files or {}).items():
        write_file(folder, name, content)
    return folder


def _with_parts(settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the fields of a T5Gemma, whose parts have the tokens of the whole."""
    tokens = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    common = {name: settings[name] for name in tokens} | more
    parts = {name: {**common, **settings[name]} for name in ("encoder", "decoder")}
    return {name: value for name, value in settings.items() if name != "hidden_size"} | parts


def config_class_of(family: str) -> Any:
    """Return the configuration of texts of a family, such as Gemma3TextConfig."""
    of_text = getattr(transformers, f"{family}TextConfig", None)
    return of_text or getattr(transformers, f"{family}Config")


def pooling_files(**pooling: Any) -> dict[str, Any]:
    """Return the sentence-transformers files that select a pooling, given its fields."""
    modules = [module("Transformer"), module("Pooling", "1_Pooling")]
    return {"modules.json": modules, "1_Pooling/config.json": pooling}


def module(kind: str, path: str = "") -> dict[str, str]:
    """Return an entry of modules.json."""
    return {"name": kind, "path": path, "type": f"sentence_transformers.models.{kind}"}


def write_file(folder: Path, name: str, content: Any) -> None:
    """Write a file of a checkpoint: a string unchanged, anything else as JSON."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def set_fields(folder: Path, name: str, /, **fields: Any) -> None:
    """Set fields of a JSON file, which may be a new one."""
    path = folder / name
    before = json.loads(path.read_text()) if path.exists() else {}
    write_file(folder, name, before | fields)


def add_mask(folder: Path) -> None:
    """Let the tokenizer read `[MASK]` as its special token."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    mask = {"id": SPECIAL_TOKENS.index("[MASK]"), "content": "[MASK]", "special": True, **flags}
    set_fields(folder, "tokenizer.json", added_tokens=[mask])


def leave_only_a_pickle(folder: Path) -> None:
    """Give the weights the name of pickled ones."""
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def drop_field(folder: Path, name: str, field: str) -> None:
    """Remove a field from a JSON file."""
    content = json.loads((folder / name).read_text())
    del content[field]
    write_file(folder, name, content)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Let `change` edit the tensors of a checkpoint of one file."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def _byte_pairs() -> Tokenizer:
    """Return a byte-level tokenizer: one end token, all bytes, a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("c", "a"), ("Ġ", "ca"), ("Ġca", "t")]
    tokens = [END_OF_TEXT, *alphabet, *(first + second for first, second in merges)]
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _word_pieces(vocabulary: Sequence[str]) -> Tokenizer:
    """Return a lower-casing WordPiece tokenizer."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer
