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


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a GPT-2 model."""

    name: str
    hidden: int
    layers: int
    heads: int
    positions: int = 1024
    vocabulary: int = 50_257


GPT2_SMALL = DecoderShape("gpt2-small", hidden=768, layers=12, heads=12)


def save_random_decoder(shape: DecoderShape, folder: Path, seed: int = 0) -> None:
    """Save a GPT2LMHeadModel with random weights, and a tokenizer that splits text into bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.positions,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    # at the usual scale, random weights repeat one token whatever the prompt
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data *= 3
    model.save_pretrained(folder)
    known = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    # no text gives the others
    words = [*known, *(f"word{number}" for number in range(len(known), shape.vocabulary))]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(known[:1])
    tokenizer.save(str(folder / "tokenizer.json"))
    # CTranslate2 needs all three
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), known[0])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
