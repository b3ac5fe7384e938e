"""Every op with a kernel at the shape of BERT-base, for sequences of any lengths.

Only the sizes that a server varies from batch to batch are arguments.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch

from varlen_bench.ops import (
    beam_searches,
    chosen_tokens,
    kv_blocks,
    logit_edits,
    padded,
    rows,
    sequences,
)
from varlen_bench.ops.call import OpCall

# Returns the call for the lengths of a batch.
AnyBatch: TypeAlias = Callable[[list[int], torch.dtype], OpCall]


def _of_tokens(make: Callable[..., OpCall], *sizes: int, **tables: int) -> AnyBatch:
    return lambda lengths, dtype: make(sum(lengths), *sizes, dtype, **tables)


def _of_lengths(make: Callable[..., OpCall], *sizes: int) -> AnyBatch:
    return lambda lengths, dtype: make(lengths, *sizes, dtype)


def _of_halves(make: Callable[..., OpCall], *sizes: int) -> AnyBatch:
    # half of each sequence is new: a decode step if all have one token
    return lambda lengths, dtype: make([-(-n // 2) for n in lengths], lengths, *sizes, dtype)


ANY_BATCH: dict[str, AnyBatch] = {
    "embed_layer_norm": _of_tokens(rows.embed_layer_norm, 768, vocabulary=1000, positions=512),
    "embed": _of_tokens(rows.embed, 768, vocabulary=1000, positions=512),
    "activate": _of_tokens(rows.activate, 3072),
    "linear_activate": _of_tokens(rows.linear_activate, 16, 3072),
    "activate_gate": _of_tokens(rows.activate_gate, 3072),
    "add_layer_norm": _of_tokens(rows.add_layer_norm, 768),
    "layer_norm": _of_tokens(rows.layer_norm, 768),
    "residual_layer_norm": _of_tokens(rows.residual_layer_norm, 768),
    "rms_norm": _of_tokens(rows.rms_norm, 768),
    "residual_rms_norm": _of_tokens(rows.residual_rms_norm, 768),
    "norm_heads": _of_tokens(rows.norm_heads, 12, 4, 64),
    "rotary": _of_tokens(rows.rotary, 12, 4, 64),
    "masked_softmax": lambda lengths, dtype: padded.masked_softmax(
        lengths, max(lengths), 12, dtype
    ),
    "append_kv": _of_tokens(kv_blocks.append_kv, 12, 4, 64, rotated=True, normed=True),
    "copy_blocks": lambda lengths, dtype: kv_blocks.copy_blocks(len(lengths), 2, 4, 64, dtype),
    "attention_paged": _of_halves(kv_blocks.attention_paged, 12, 4, 64),
    "paged_tiles": _of_halves(kv_blocks.paged_tiles, 12, 4, 64),
    "attention_tiles": _of_lengths(sequences.attention_tiles, 12, 64),
    "attention_varlen": _of_lengths(sequences.attention_varlen, 12, 64),
    "pool": _of_lengths(sequences.pool, 768),
    "term_weights": _of_lengths(sequences.term_weights, 768, 3000),
    "first_tokens": _of_lengths(sequences.first_tokens, 768),
    "unpack": _of_lengths(padded.unpack, 768),
    "pack": _of_lengths(padded.pack, 768),
    "beam_step": lambda lengths, dtype: chosen_tokens.beam_step(
        len(lengths), 4, 1000, dtype, edits=max(lengths), has_finished=True
    ),
    "follow_beams": lambda lengths, dtype: beam_searches.follow_beams(
        len(lengths), 4, -(-max(lengths) // 16), dtype
    ),
    "advance_searches": lambda lengths, dtype: beam_searches.advance_searches(
        len(lengths), 4, 1000, dtype
    ),
    "edit_logits": lambda lengths, dtype: logit_edits.edit_logits(
        len(lengths), max(lengths), 500, dtype
    ),
    "sample_tokens": lambda lengths, dtype: chosen_tokens.sample_tokens(
        len(lengths), 500, dtype, top_k=50, top_p=0.9
    ),
}
