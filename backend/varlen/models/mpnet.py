"""Checkpoints of MPNet: relative positions add a bias to the scores of all layers.

Source: Song et al. 2020, arXiv:2004.09297.
"""

from varlen.models.checkpoint.masked_lm_layout import MaskedLMNames
from varlen.models.post_norm_family import DISTANCE_BUCKETS, PostNormFamily
from varlen.models.post_norm_names import FieldNames, HeadNames, LayerNames

MPNET = PostNormFamily(
    class_name="MPNet",
    prefix="mpnet.",
    head=HeadNames(),
    layer=LayerNames(
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        attention_output="attention.attn.o",
        attention_norm="attention.LayerNorm",
    ),
    fields=FieldNames(types=""),
    distance_bias="encoder.relative_attention_bias",
    # transformers has this row whatever pad_token_id is
    first_position=2,
    pretraining=("lm_head.",),
    masked_lm=MaskedLMNames(
        "lm_head.dense",
        "lm_head.layer_norm",
        "lm_head.decoder",
        ("lm_head.bias", "lm_head.decoder.bias"),
        "gelu",
    ),
    # transformers computes with as many buckets whatever this is
    fixed={"relative_attention_num_buckets": DISTANCE_BUCKETS},
    tokenizer_class="MPNetTokenizer",
)
