"""Small random checkpoints in the form of public ones, whose config.json is in hub_configs.jsonl.

A line of that file follows the config.json of the public checkpoint that it names, with all its fields. The lines were
written by hand: a path, a version or a single field may differ from a revision at the hub.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints import WEIGHTS, write_file
from varlen.models.checkpoint.first_releases import to_native

from .oracle import class_of

VOCABULARY = 96
LONGEST = 64
_HIDDEN, _INNER, _LAYERS, _HEADS = 16, 24, 2, 2
# By name, the small size that replaces a field's, where the file has one.
_SIZES = {
    **dict.fromkeys("hidden_size d_model n_embd dim pooler_hidden_size".split(), _HIDDEN),
    **dict.fromkeys("intermediate_size hidden_dim encoder_ffn_dim d_ff n_inner".split(), _INNER),
    "decoder_ffn_dim": _INNER,
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers encoder_layers num_layers".split(), _LAYERS
    ),
    **dict.fromkeys("decoder_layers num_decoder_layers max_window_layers".split(), _LAYERS),
    **dict.fromkeys("num_attention_heads n_head n_heads num_heads".split(), _HEADS),
    **dict.fromkeys("encoder_attention_heads decoder_attention_heads".split(), _HEADS),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("n_positions", "max_trained_positions"), LONGEST),
    "head_dim": 10,
    "d_kv": 10,
    "local_attention": 16,
    "position_buckets": 16,
    "attention_head_size": _HIDDEN // _HEADS,
}


def read_hub_configs() -> dict[str, dict[str, Any]]:
    """Return `config` and perhaps `refused` of each checkpoint, by name."""
    lines = Path(__file__).with_name("hub_configs.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry.pop("name"): entry for entry in entries}


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with all its fields, and with small sizes and token ids."""
    small = {}
    for name, value in config.items():
        if name in _SIZES and value is not None:
            small[name] = _SIZES[name]
        elif name.endswith(("_token_id", "_token_ids", "_words_ids")):
            small[name] = _small_ids(value)
        else:
            small[name] = value
    if "num_key_value_heads" in config:
        # as many as query heads, or fewer
        is_grouped = config["num_key_value_heads"] < config["num_attention_heads"]
        small["num_key_value_heads"] = 1 if is_grouped else _HEADS
    if "embedding_size" in config:
        is_narrow = config["embedding_size"] < config["hidden_size"]
        small["embedding_size"] = 10 if is_narrow else _HIDDEN
    if "max_position_embeddings" in config:
        # rows before the row of the first token
        extra = config["max_position_embeddings"] % 16
        small["max_position_embeddings"] = LONGEST + extra
    if "layer_types" in config:
        small["layer_types"] = config["layer_types"][:_LAYERS]
    scaling = small.get("rope_scaling")
    if scaling and "original_max_position_embeddings" in scaling:
        small["rope_scaling"] = {**scaling, "original_max_position_embeddings": LONGEST // 2}
    return small


def save_hub_checkpoint(folder: Path, config: dict[str, Any], tokenizer: Path) -> Path:
    """Save random weights for a config.json of the hub; return a folder that transformers reads.

    Args:
        folder: gets the checkpoint, with the small config.json as it is.
        config: the small config.json.
        tokenizer: tokenizer.json of `VOCABULARY` tokens at most.

    Returns:
        A folder with the same weights, whose config.json transformers has written. The first releases of NomicBERT and
        GTE have no other form that transformers reads.
    """
    native = to_native(config)
    settings = transformers.AutoConfig.for_model(**native)
    torch.manual_seed(0)
    kind = class_of(architecture_of(native, settings))
    model = kind._from_config(settings, dtype=torch.float32)
    # transformers initializes biases to zero and norms to one, which would hide mistakes
    with torch.no_grad():
        for parameter in model.parameters():
            scale = _HIDDEN**-0.5 if parameter.ndim > 1 else 0.2
            noise = torch.randn_like(parameter) * scale
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    written = folder / "written"
    model.save_pretrained(written)
    (written / "generation_config.json").unlink(missing_ok=True)
    shutil.copy(written / WEIGHTS, folder)
    shutil.copy(tokenizer, folder)
    write_file(folder, "config.json", config)
    return written


def architecture_of(native: dict[str, Any], settings: transformers.PretrainedConfig) -> str:
    """Return the class in config.json, else the model without a head."""
    if "architectures" in native:
        return str(native["architectures"][0])
    return transformers.models.auto.modeling_auto.MODEL_MAPPING[type(settings)].__name__


def _small_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_small_ids(each) for each in value]
    return value % VOCABULARY if isinstance(value, int) else value
