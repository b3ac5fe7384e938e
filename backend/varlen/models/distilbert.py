"""Checkpoints of DistilBERT. Source: Sanh et al. 2019, arXiv:1910.01108."""

from varlen.models.checkpoint.masked_lm_layout import MaskedLMNames
from varlen.models.post_norm_family import PostNormFamily
from varlen.models.post_norm_names import FieldNames, HeadNames, LayerNames

DISTILBERT = PostNormFamily(
    class_name="DistilBert",
    prefix="distilbert.",
    head=HeadNames("pre_classifier", "classifier", "relu"),
    layer=LayerNames(
        name="transformer.layer.{}",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        attention_output="attention.out_lin",
        attention_norm="sa_layer_norm",
        up=("ffn.lin1",),
        down="ffn.lin2",
        output_norm="output_layer_norm",
    ),
    fields=FieldNames(
        hidden="dim",
        inner="hidden_dim",
        layers="n_layers",
        heads="n_heads",
        types="",
        activation="activation",
        norm_eps="",
    ),
    pretraining=("vocab_",),
    masked_lm=MaskedLMNames(
        "vocab_transform",
        "vocab_layer_norm",
        "vocab_projector",
        ("vocab_projector.bias",),
    ),
    # sinusoidal_pos_embds chooses how training begins; the table is stored either way
    harmless=frozenset({"sinusoidal_pos_embds"}),
    tokenizer_class="DistilBertTokenizer",
)
