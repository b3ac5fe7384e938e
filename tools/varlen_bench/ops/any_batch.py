"""Every op with a kernel at the shape of BERT-base, for sequences of any lengths.

Only the sizes that a server varies from batch to batch are arguments.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch

from varlen_bench.ops import beam, kv_blocks, padded, rows, sampling, sequences
from varlen_bench.ops.call import OpCall

# Returns the call for the lengths of a batch.
AnyBatch: TypeAlias = Callable[[list[int], torch.dtype], OpCall]

ANY_BATCH: dict[str, AnyBatch] = {
    "embed_layer_norm": lambda lengths, dtype: rows.embed_layer_norm(
        sum(lengths), 768, dtype, vocabulary=1000, positions=512
    ),
    "embed": lambda lengths, dtype: rows.embed(
        sum(lengths), 768, dtype, vocabulary=1000, positions=512
    ),
    "activate": lambda lengths, dtype: rows.activate(sum(lengths), 3072, dtype),
    "linear_activate": lambda lengths, dtype: rows.linear_activate(sum(lengths), 16, 3072, dtype),
    "activate_gate": lambda lengths, dtype: rows.activate_gate(sum(lengths), 3072, dtype),
    "add_layer_norm": lambda lengths, dtype: rows.add_layer_norm(sum(lengths), 768, dtype),
    "layer_norm": lambda lengths, dtype: rows.layer_norm(sum(lengths), 768, dtype),
    "residual_layer_norm": lambda lengths, dtype: rows.residual_layer_norm(
        sum(lengths), 768, dtype
    ),
    "rms_norm": lambda lengths, dtype: rows.rms_norm(sum(lengths), 768, dtype),
    "residual_rms_norm": lambda lengths, dtype: rows.residual_rms_norm(sum(lengths), 768, dtype),
    "norm_heads": lambda lengths, dtype: rows.norm_heads(sum(lengths), 12, 4, 64, dtype),
    "rotary": lambda lengths, dtype: rows.rotary(sum(lengths), 12, 4, 64, dtype),
    "masked_softmax": lambda lengths, dtype: padded.masked_softmax(
        lengths, max(lengths), 12, dtype
    ),
    "append_kv": lambda lengths, dtype: kv_blocks.append_kv(sum(lengths), 12, 4, 64, dtype),
    # the last half of each sequence is new: a decode step if all have one token
    "attention_paged": lambda lengths, dtype: kv_blocks.attention_paged(
        [(length + 1) // 2 for length in lengths], lengths, 12, 4, 64, dtype
    ),
    "paged_tiles": lambda lengths, dtype: kv_blocks.paged_tiles(
        [(length + 1) // 2 for length in lengths], lengths, 12, 4, 64, dtype
    ),
    "attention_tiles": lambda lengths, dtype: sequences.attention_tiles(lengths, 12, 64, dtype),
    "attention_varlen": lambda lengths, dtype: sequences.attention_varlen(lengths, 12, 64, dtype),
    "pool": lambda lengths, dtype: sequences.pool(lengths, 768, dtype),
    "term_weights": lambda lengths, dtype: sequences.term_weights(lengths, 768, 3000, dtype),
    "first_tokens": lambda lengths, dtype: sequences.first_tokens(lengths, 768, dtype),
    "unpack": lambda lengths, dtype: padded.unpack(lengths, 768, dtype),
    "pack": lambda lengths, dtype: padded.pack(lengths, 768, dtype),
    "beam_step": lambda lengths, dtype: beam.beam_step(
        len(lengths), 4, 1000, dtype, edits=max(lengths), has_finished=True
    ),
    "sample_tokens": lambda lengths, dtype: sampling.sample_tokens(
        len(lengths), 500, dtype, top_k=50, top_p=0.9
    ),
}
