"""Encoders of published sizes with random weights: speed does not depend on what they learned."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varlen_bench.peers.exports import cache_folder

_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
# Class of the configuration in transformers, and its fields that differ from the class's defaults.
_ENCODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "distilbert-base": ("DistilBertConfig", {}),
    "modernbert-base": ("ModernBertConfig", {}),
    "mpnet-base": ("MPNetConfig", {"vocab_size": 30_527, "max_position_embeddings": 514}),
    "nomic-embed-text": ("NomicBertConfig", {}),
    "roberta-base": (
        "RobertaConfig",
        {**_BASE, "vocab_size": 50_265, "max_position_embeddings": 514, "type_vocab_size": 1},
    ),
}
RANDOM_ENCODERS = tuple(_ENCODERS)


def random_encoder(name: str, tokenizer: Path) -> Path:
    """Return the folder of a random encoder; it is made once.

    Args:
        name: one of `RANDOM_ENCODERS`.
        tokenizer: a checkpoint whose tokenizer it gets; its vocabulary must not be larger.
    """
    folder = cache_folder() / f"random-{name}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / name
            _save(name, made)
            shutil.copy(tokenizer / "tokenizer.json", made)
            shutil.move(made, folder)
    return folder


def _save(name: str, folder: Path) -> None:
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    kind, fields = _ENCODERS[name]
    transformers.AutoModel.from_config(getattr(transformers, kind)(**fields)).save_pretrained(
        folder
    )
