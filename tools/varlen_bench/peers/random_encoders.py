"""Encoders of published sizes with random weights: speed does not depend on what they learned."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varlen_bench.peers.checkpoints import config_field, random_model
from varlen_bench.peers.exports import cached

# Files of a tokenizer; CTranslate2 reads the second.
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
# Class of the configuration in transformers, and its fields that differ from the class's defaults.
_ENCODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "albert-base": (
        "AlbertConfig",
        {
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "hidden_act": "gelu_new",
        },
    ),
    "deberta-v3-small": (
        "DebertaV2Config",
        {
            "hidden_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "distilbert-base": ("DistilBertConfig", {}),
    # its own special tokens are past the end of most vocabularies
    "modernbert-base": (
        "ModernBertConfig",
        dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id"), 0)
        | dict.fromkeys(("bos_token_id", "eos_token_id")),
    ),
    "mpnet-base": ("MPNetConfig", {"max_position_embeddings": 514}),
    "nomic-embed-text": ("NomicBertConfig", {}),
    "roberta-base": ("RobertaConfig", {"max_position_embeddings": 514, "type_vocab_size": 1}),
}
RANDOM_ENCODERS = tuple(_ENCODERS)


def random_encoder(name: str, tokenizer: Path) -> Path:
    """Return the folder of a random encoder; it is made once.

    Args:
        name: one of `RANDOM_ENCODERS`.
        tokenizer: a checkpoint whose tokenizer and vocabulary it gets.
    """

    def make(folder: Path) -> None:
        config, fields = _ENCODERS[name]
        fields = {**fields, "vocab_size": config_field(tokenizer, "vocab_size")}
        model = random_model(config.replace("Config", "Model"), config, **fields)
        model.save_pretrained(folder)
        for file in _TOKENIZER:
            shutil.copy(tokenizer / file, folder)

    return cached(f"random-{name}", make)
