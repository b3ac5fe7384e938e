"""Checkpoints of multilingual GTE: rotary positions and gated feed-forward parts.

Source: Zhang et al. 2024, arXiv:2407.19669.
"""

from varlen.models.checkpoint.masked_lm_layout import MaskedLMNames
from varlen.models.post_norm_family import PostNormFamily
from varlen.models.post_norm_names import HeadNames, LayerNames

GTE = PostNormFamily(
    class_name="Gte",
    prefix="gte.",
    first_prefix="new.",
    least_types=0,
    head=HeadNames(dense="gte.pooler.dense", output="classifier"),
    layer=LayerNames(
        qkv=("attention.qkv_proj",),
        attention_output="attention.o_proj",
        attention_norm="attn_ln",
        up=("mlp.up_gate_proj",),
        gate="second",
        down="mlp.down_proj",
        output_norm="mlp_ln",
        without_bias=("mlp.up_gate_proj",),
    ),
    default_theta=160_000.0,
    pretraining=("lm_head.",),
    masked_lm=MaskedLMNames(
        "lm_head.dense",
        "lm_head.norm",
        "lm_head.decoder",
        ("lm_head.decoder.bias",),
        "gelu",
    ),
    tokenizer_class="XLMRobertaTokenizer",
)
