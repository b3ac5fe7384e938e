"""Checkpoints of the benchmarks: their limits, their loading, and random ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Attention = Literal["eager", "sdpa"]


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The sizes of an encoder."""

    name: str
    hidden: int
    layers: int
    heads: int
    features: int
    vocabulary: int = 30_522


BERT_BASE = EncoderShape("bert-base", hidden=768, layers=12, heads=12, features=3072)
MINILM = EncoderShape("minilm", hidden=384, layers=6, heads=12, features=1536)


def config_field(folder: Path, name: str) -> int:
    """Return a number of a checkpoint's config.json, such as `vocab_size`."""
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))[name])


def max_positions(folder: Path) -> int:
    """Return the longest sequence that a checkpoint has position embeddings for, in tokens."""
    return config_field(folder, "max_position_embeddings")


def save_random_checkpoint(
    shape: EncoderShape, folder: Path, positions: int, seed: int = 0
) -> None:
    """Save a BertModel with random weights, and an empty tokenizer, which varlen requires."""
    import torch
    from transformers import BertConfig, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.features,
        max_position_embeddings=positions,
    )
    BertModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({}), encoding="utf-8")


def load_bert(folder: Path, dtype: torch.dtype, device: torch.device, attention: Attention) -> Any:
    """Return transformers' BertModel of a checkpoint, ready for inference."""
    from transformers import BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = BertModel.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.eval().to(device)
