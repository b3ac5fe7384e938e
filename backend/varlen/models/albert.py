"""Checkpoints of ALBERT: all layers share their weights, and tables have fewer features than layers.

Source: Lan et al. 2019, arXiv:1909.11942.
"""

from varlen.models.checkpoint.masked_lm_layout import MaskedLMNames
from varlen.models.post_norm_family import PostNormFamily
from varlen.models.post_norm_names import FieldNames, HeadNames, LayerNames

ALBERT = PostNormFamily(
    class_name="Albert",
    prefix="albert.",
    head=HeadNames(dense="albert.pooler", output="classifier"),
    layer=LayerNames(
        name="encoder.albert_layer_groups.0.albert_layers.0",
        qkv=("attention.query", "attention.key", "attention.value"),
        attention_output="attention.dense",
        attention_norm="attention.LayerNorm",
        up=("ffn",),
        down="ffn_output",
        output_norm="full_layer_layer_norm",
    ),
    fields=FieldNames(embedding="embedding_size", default_activation="gelu_new"),
    projection="encoder.embedding_hidden_mapping_in",
    always_projects=True,
    pretraining=("predictions.", "sop_classifier."),
    masked_lm=MaskedLMNames(
        "predictions.dense",
        "predictions.LayerNorm",
        "predictions.decoder",
        ("predictions.bias", "predictions.decoder.bias"),
    ),
    more_architectures=("AlbertForPreTraining",),
    fixed={"inner_group_num": 1, "num_hidden_groups": 1},
    tokenizer_class="AlbertTokenizer",
)
