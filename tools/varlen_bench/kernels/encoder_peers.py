"""Transformers' BertModel on the same batch: padded, cut into parts in order of arrival or by length."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor

from varlen.request import Prompt
from varlen_bench.kernels.case import Call, Compile, Inputs, Peer
from varlen_bench.kernels.grid import EncoderShape

Order = Literal["arrival", "sorted"]
Attention = Literal["eager", "sdpa"]

# Order, and the number of parts: padding costs the less the more there are, and a part fills the GPU less.
_PARTS: tuple[tuple[Order, int], ...] = (
    ("sorted", 4),
    ("sorted", 8),
    ("arrival", 1),
    ("arrival", 4),
)
# torch.compile runs once for the shape of each part.
_COMPILED: tuple[Order, int] = ("sorted", 4)
_COMPILE_SECONDS = 180.0


def save_random_checkpoint(
    shape: EncoderShape, folder: Path, positions: int, seed: int = 0
) -> None:
    """Save a BertModel of that shape with random weights, and as much of a tokenizer as varlen asks for."""
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


def load_model(folder: Path, dtype: torch.dtype, device: torch.device, attention: Attention) -> Any:
    """Return transformers' model."""
    from transformers import BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = BertModel.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.eval().to(device)


@torch.inference_mode()
def exact_vectors(folder: Path, sequences: list[Prompt], device: torch.device) -> Tensor:
    """Return the normalised mean-pooled vectors in float64, `[sequences, hidden]`."""
    model = load_model(folder, torch.float64, device, "eager")
    parts = _split(sequences, "sorted", min(8, len(sequences)))
    forward = _PaddedForward(model, sequences, parts, device)
    return forward.in_order(forward.run(), {})


def encoder_peers(
    folder: Path,
    sequences: list[Prompt],
    dtype: torch.dtype,
    device: torch.device,
    compile_model: Compile,
) -> tuple[Peer, ...]:
    """Return transformers with either attention in each way to batch, and one of them compiled."""
    models: dict[Attention, Any] = {}

    def model(attention: Attention) -> Any:
        if attention not in models:
            models[attention] = load_model(folder, dtype, device, attention)
        return models[attention]

    def peer(attention: Attention, order: Order, count: int, *, compiled: bool = False) -> Peer:
        parts = _split(sequences, order, min(count, len(sequences)))
        places = _places(parts, device)

        def build(_: Compile) -> Call:
            loaded = model(attention)
            run = compile_model(loaded) if compiled else loaded
            forward = _PaddedForward(run, sequences, parts, device)
            return lambda inputs: forward.run()  # noqa: ARG005  # a Call

        kind = f"{attention}-compile" if compiled else attention
        return Peer(
            f"{kind}-{order}-{count}",
            build,
            lambda result, _: _reorder(result, places),
            compile_seconds=_COMPILE_SECONDS if compiled else 0.0,
        )

    attentions: tuple[Attention, ...] = ("sdpa", "eager")
    peers = [peer(attention, *how) for attention in attentions for how in _PARTS]
    return (*peers, peer("sdpa", *_COMPILED, compiled=True))


class _PaddedForward:
    """A padded model over parts whose inputs are on the device already."""

    def __init__(
        self,
        model: Callable[..., Any],
        sequences: list[Prompt],
        parts: list[list[int]],
        device: torch.device,
    ) -> None:
        self._model = model
        self._inputs = [_pad([sequences[i] for i in part], device) for part in parts]
        self._places = _places(parts, device)

    def run(self) -> Tensor:
        """Return the vectors of all parts, in their order."""
        return torch.cat([self._pool(ids, mask) for ids, mask in self._inputs])

    def in_order(self, result: object, inputs: Inputs) -> Tensor:  # noqa: ARG002  # a `read`
        """Return the vectors in order of arrival."""
        return _reorder(result, self._places)

    def _pool(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        kept = mask[..., None].to(hidden.dtype)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = (hidden * kept).sum(1, dtype=wide)
        return F.normalize(sums / mask.sum(1, keepdim=True), dim=1)


def _split(sequences: list[Prompt], order: Order, count: int) -> list[list[int]]:
    """Return indices in `count` parts of about as many sequences."""
    indices = list(range(len(sequences)))
    if order == "sorted":
        indices.sort(key=lambda i: -sequences[i].num_tokens)
    bounds = [round(part * len(indices) / count) for part in range(count + 1)]
    return [indices[begin:end] for begin, end in pairwise(bounds)]


def _places(parts: list[list[int]], device: torch.device) -> Tensor:
    """Return where each sequence stands after the parts are laid one after the other."""
    flat = torch.tensor([index for part in parts for index in part])
    return flat.argsort().to(device)


def _reorder(result: object, places: Tensor) -> Tensor:
    assert isinstance(result, Tensor)
    return result[places]


def _pad(sequences: list[Prompt], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids padded with 0 and the mask of real tokens, each `[sequences, longest]` int64."""
    longest = max(sequence.num_tokens for sequence in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : sequence.num_tokens] = torch.from_numpy(sequence.token_ids).long()
        mask[row, : sequence.num_tokens] = 1
    return ids.to(device), mask.to(device)
