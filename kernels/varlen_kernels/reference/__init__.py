# mypy: implicit-reexport
# ruff: noqa: F401  # the ops
"""Every op in plain torch: the specification of the kernels, and the CPU path.

All tokens of a batch are in one `[tokens, ...]` tensor, sequence after sequence; `cu_seqlens`
`[batch + 1]` int32 holds the start of each sequence and the end of the last. Each op computes in fp32 for
every dtype, writes into `out=` if it is given, and returns the tensor it wrote. `ops.IN_PLACE` lists the ops
whose `out` may be one of their arguments.
"""

from varlen_kernels.reference.attention import attention_tiles, attention_varlen
from varlen_kernels.reference.beam import beam_step
from varlen_kernels.reference.beam_search import advance_searches, follow_beams
from varlen_kernels.reference.heads import norm_heads, rotary
from varlen_kernels.reference.linear_layers import (
    activate,
    activate_gate,
    linear,
    linear_activate,
    tanh,
)
from varlen_kernels.reference.logit_edits import edit_logits
from varlen_kernels.reference.norm import (
    add_layer_norm,
    embed,
    embed_layer_norm,
    layer_norm,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
)
from varlen_kernels.reference.paged import (
    append_kv,
    attention_paged,
    copy_blocks,
    paged_tiles,
)
from varlen_kernels.reference.pooling import first_tokens, pool, select_rows, to_fp32
from varlen_kernels.reference.ranks import all_reduce, gather_columns, local_ids
from varlen_kernels.reference.sampling import sample_tokens
from varlen_kernels.reference.vocabulary import term_weights, top_terms
from varlen_kernels.vector_ops import concat, normalize_rows
