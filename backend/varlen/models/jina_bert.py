"""Checkpoints of JinaBERT: jina-embeddings-v2 and its rerankers.

Scores fall with the distance of two tokens (ALiBi, in both directions), and feed-forward parts have gates. Their
config.json says `bert`, and `first_releases` reads it. jina-embeddings-v2-base-code and its relatives also normalize
queries and keys, which only their tensors tell.
Source: Günther et al. 2023, arXiv:2310.19923; jinaai/jina-bert-implementation and jinaai/jina-bert-v2-qk-post-norm on
the Hugging Face hub.
"""

from dataclasses import replace

from varlen.models.bert import BERT
from varlen.models.checkpoint.family import Family
from varlen.models.post_norm_layers import PostNormEncoder
from varlen.models.post_norm_names import LayerNames

_PLAIN = LayerNames(
    up=("mlp.gated_layers",),
    gate="first",
    down="mlp.wo",
    output_norm="mlp.layernorm",
    without_bias=("mlp.gated_layers",),
)
_NORMED = LayerNames(
    up=("mlp.up_gated_layer",),
    gate="second",
    down="mlp.down_layer",
    output_norm="layer_norm_2",
    without_bias=("mlp.up_gated_layer",),
    query_norm="attention.self.layer_norm_q",
    key_norm="attention.self.layer_norm_k",
    second_norm="layer_norm_1",
)

# Beginning of the names of its architectures, which tells it from BERT.
CLASS_NAME = "JinaBert"
FAMILY: Family[PostNormEncoder] = replace(
    replace(
        BERT,
        class_name=CLASS_NAME,
        layer=_PLAIN,
        other_layer=_NORMED,
        has_alibi=True,
        more_architectures=(),
        fixed={"position_embedding_type": "alibi"},
    ).family,
    # norms over the features of all heads, and slopes of each
    is_divisible=False,
)
