# mypy: implicit-reexport
# ruff: noqa: F401, F403, F821  # the ops
"""Every op of `reference` for CUDA GPUs.

An op is a Triton kernel, or plain torch where torch runs it in one fast kernel. Names and signatures match
`reference`, which specifies each op.
"""

import torch

from varlen_kernels.reference.every_op import *

# isort: split
from varlen_kernels.triton.activation import activate, activate_gate
from varlen_kernels.triton.append_kv import append_kv, copy_blocks
from varlen_kernels.triton.attention_paged import attention_paged
from varlen_kernels.triton.attention_tiles import attention_tiles, paged_tiles
from varlen_kernels.triton.attention_varlen import attention_varlen
from varlen_kernels.triton.beam import beam_step
from varlen_kernels.triton.beam_search import advance_searches, follow_beams
from varlen_kernels.triton.few_rows import (
    linear,
    linear_activate,
    linear_residual,
    norm_append_kv,
    norm_linear,
    norm_next_tokens,
)
from varlen_kernels.triton.groups import linear_groups
from varlen_kernels.triton.logit_edits import edit_logits
from varlen_kernels.triton.norms import (
    add_layer_norm,
    embed,
    embed_layer_norm,
    layer_norm,
    norm_heads,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
    rotary,
)
from varlen_kernels.triton.pooling import first_tokens, pool, term_weights
from varlen_kernels.triton.sampling import sample_tokens
from varlen_kernels.triton.softmax import attention_padded, masked_softmax

# one process has no ranks; `fused_ranks` has these for several
del all_reduce, gather_columns, local_ids
# adapters are on CPUs
del add_adapters
# lengths of sequences are read on the host
del bidirectional_lstm, span_scores, word_scores
# they run beside those
del count_labels, gru_states

# cuBLAS may else add up the parts of a product in its dtype, and then an answer depends on how a product was split
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
