"""Small random checkpoints in the form of public ones, whose config.json is in hub_configs.jsonl.

A line of that file follows the config.json of the public checkpoint that it names, with all its fields, or names one
that is like it but for sizes. `layout` is what it has beside config.json, see `corpus.Layout`. The lines were written
by hand: a path, a version or a single field may differ from a revision at the hub.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from varlen.models.checkpoint.first_releases import to_native

VOCABULARY = 96
LONGEST = 64
_LAYERS, _HEADS = 2, 2


@dataclass(frozen=True, slots=True)
class Width:
    """Features of a small model.

    Attributes:
        hidden: features of a token.
        head: features of a head where config.json names them, unlike `hidden` by heads.
    """

    hidden: int = 16
    head: int = 10

    def sizes(self) -> dict[str, int]:
        """Return by name the small size that replaces a field's, where the file has one."""
        hidden, inner = self.hidden, self.hidden * 3 // 2
        return {
            **dict.fromkeys("hidden_size d_model n_embd dim pooler_hidden_size".split(), hidden),
            **dict.fromkeys("intermediate_size hidden_dim d_ff n_inner".split(), inner),
            **dict.fromkeys("encoder_ffn_dim decoder_ffn_dim".split(), inner),
            **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers".split(), _LAYERS),
            **dict.fromkeys("encoder_layers decoder_layers num_decoder_layers".split(), _LAYERS),
            **dict.fromkeys("num_attention_heads n_head n_heads num_heads".split(), _HEADS),
            **dict.fromkeys("encoder_attention_heads decoder_attention_heads".split(), _HEADS),
            **dict.fromkeys(("n_positions", "max_trained_positions"), LONGEST),
            "max_window_layers": _LAYERS,
            "original_max_position_embeddings": LONGEST // 2,
            "cross_attention_hidden_size": hidden,
            "head_dim": self.head,
            "d_kv": self.head,
            "local_attention": 16,
            "position_buckets": 16,
            "attention_head_size": hidden // _HEADS,
        }


SMALL = Width()


def read_hub_entries() -> dict[str, dict[str, Any]]:
    """Return what the file has of each checkpoint, by name: `config`, `layout`, `refused`."""
    lines = Path(__file__).with_name("hub_configs.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry.pop("name"): entry for entry in entries}


def read_hub_configs() -> dict[str, dict[str, Any]]:
    """Return the entries of checkpoints with a config.json of their own, by name."""
    return {name: each for name, each in read_hub_entries().items() if "config" in each}


def shrunk(
    config: dict[str, Any], vocabulary: int = VOCABULARY, width: Width = SMALL
) -> dict[str, Any]:
    """Return a config.json with all its fields, and with small sizes and token ids."""
    small: dict[str, Any] = {}
    sizes = width.sizes()
    for name, value in config.items():
        if name in sizes and value is not None:
            small[name] = sizes[name]
        elif name.endswith(("_token_id", "_token_ids", "_words_ids")):
            small[name] = _small_ids(value, vocabulary)
        else:
            small[name] = value
    small |= dict.fromkeys({"vocab_size", "decoder_vocab_size"} & small.keys(), vocabulary)
    if "num_key_value_heads" in config:
        # as many as query heads, or fewer
        is_grouped = config["num_key_value_heads"] < config["num_attention_heads"]
        small["num_key_value_heads"] = 1 if is_grouped else _HEADS
    if "embedding_size" in config:
        is_narrow = config["embedding_size"] < config["hidden_size"]
        small["embedding_size"] = 10 if is_narrow else width.hidden
    if "max_position_embeddings" in config:
        # rows before the row of the first token
        extra = config["max_position_embeddings"] % 16
        small["max_position_embeddings"] = LONGEST + extra
    if "layer_types" in config:
        small["layer_types"] = config["layer_types"][:_LAYERS]
    for part in ("encoder", "decoder"):
        if isinstance(config.get(part), dict):
            small[part] = shrunk(config[part], vocabulary, width)
    if small.get("rope_scaling"):
        small["rope_scaling"] = _shrunk_scaling(config, width)
    return small


def _shrunk_scaling(config: dict[str, Any], width: Width) -> dict[str, Any]:
    """Return `rope_scaling` with a small length, and with the factors of small heads."""
    scaling = dict(config["rope_scaling"])
    if "original_max_position_embeddings" in scaling:
        scaling["original_max_position_embeddings"] = LONGEST // 2
    for name in {"short_factor", "long_factor"} & scaling.keys():
        rotated = int(width.hidden // _HEADS * config.get("partial_rotary_factor", 1.0))
        scaling[name] = scaling[name][: rotated // 2]
    return scaling


def save_hub_checkpoint(
    folder: Path, config: dict[str, Any], tokenizer: Path, class_of: Callable[[str], Any]
) -> Path:
    """Save random weights for a config.json of the hub; return a folder that transformers reads.

    Args:
        folder: gets the checkpoint, with the small config.json as it is.
        config: the small config.json.
        tokenizer: tokenizer.json of at most as many tokens as config.json says.
        class_of: the class of a name in `architectures`, as transformers' classes are.

    Returns:
        A folder with the same weights, whose config.json transformers has written. The first releases of NomicBERT and
        GTE have no other form that transformers reads.
    """
    native = to_native(config)
    # which changes what it is given
    settings = transformers.AutoConfig.for_model(**deepcopy(native))
    torch.manual_seed(0)
    kind = class_of(architecture_of(native, settings))
    model = kind._from_config(settings, dtype=torch.float32)
    hidden = getattr(settings, "hidden_size", SMALL.hidden)
    # transformers initializes biases to zero and norms to one, which would hide mistakes
    with torch.no_grad():
        for parameter in model.parameters():
            scale = hidden**-0.5 if parameter.ndim > 1 else 0.2
            noise = torch.randn_like(parameter) * scale
            made = noise if parameter.ndim > 1 else parameter + noise
            parameter.copy_(made.to(stored_dtype(native)))
    written = folder / "written"
    model.save_pretrained(written)
    (written / "generation_config.json").unlink(missing_ok=True)
    shutil.copy(written / "model.safetensors", folder)
    shutil.copy(tokenizer, folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return written


def stored_dtype(config: dict[str, Any]) -> torch.dtype:
    """Return the dtype to which weights of a small model are rounded."""
    name = config.get("torch_dtype") or config.get("dtype")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(name), torch.float32)


def architecture_of(native: dict[str, Any], settings: transformers.PretrainedConfig) -> str:
    """Return the class in config.json, else the model without a head."""
    if "architectures" in native:
        return str(native["architectures"][0])
    return str(transformers.models.auto.modeling_auto.MODEL_MAPPING[type(settings)].__name__)


def _small_ids(value: Any, vocabulary: int) -> Any:
    if isinstance(value, list):
        return [_small_ids(each, vocabulary) for each in value]
    return value % vocabulary if isinstance(value, int) else value
