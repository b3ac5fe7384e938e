"""Encoders of published sizes with random weights: speed does not depend on what they learned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varlen_bench.peers.checkpoints import config_field, random_model
from varlen_bench.peers.exports import cached
from varlen_tools.convert_pickle import convert

# Beginning of the names of encoders with the heads of bge-m3.
_M3 = "m3-"
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
    "bert-base": ("BertConfig", {}),
    **{
        f"deberta-v3-{size}": (
            "DebertaV2Config",
            {
                "hidden_size": 768,
                "num_hidden_layers": layers,
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
        )
        for size, layers in (("small", 6), ("base", 12))
    },
    "distilbert-base": ("DistilBertConfig", {}),
    # its own special tokens are past the end of most vocabularies
    "modernbert-base": (
        "ModernBertConfig",
        dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id"), 0)
        | dict.fromkeys(("bos_token_id", "eos_token_id")),
    ),
    # bge-m3's layers and heads, with less of each; the last has all of them
    **{
        f"{_M3}{size}": (
            "XLMRobertaConfig",
            {
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": hidden // 64,
                "intermediate_size": 4 * hidden,
                "max_position_embeddings": 514,
                "type_vocab_size": 1,
            },
        )
        for size, hidden, layers in (("small", 384, 12), ("base", 768, 12), ("large", 1024, 24))
    },
    "mpnet-base": ("MPNetConfig", {"max_position_embeddings": 514}),
    "nomic-embed-text": ("NomicBertConfig", {}),
    "roberta-base": ("RobertaConfig", {"max_position_embeddings": 514, "type_vocab_size": 1}),
    "xlm-roberta-base": (
        "XLMRobertaConfig",
        {"max_position_embeddings": 514, "type_vocab_size": 1},
    ),
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
        if name.startswith(_M3):
            _save_heads(folder, fields["hidden_size"])

    return cached(f"random-{name}", make)


def _save_heads(folder: Path, hidden: int) -> None:
    """Save the heads of bge-m3 with random weights, and the modules of its dense vector."""
    import torch

    for name, features in (("sparse_linear", 1), ("colbert_linear", hidden)):
        torch.save(torch.nn.Linear(hidden, features).state_dict(), folder / f"{name}.pt")
    convert(folder)
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for kind, path in paths.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    pooling = folder / paths["Pooling"] / "config.json"
    pooling.parent.mkdir()
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True}), encoding="utf-8")
