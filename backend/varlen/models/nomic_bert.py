"""Checkpoints of NomicBERT: rotary positions, gated feed-forward parts, and no biases beside norms.

Source: Nussbaum et al. 2024, arXiv:2402.01613.
"""

from varlen.models.checkpoint.masked_lm_layout import MaskedLMNames
from varlen.models.post_norm_family import PostNormFamily
from varlen.models.post_norm_names import FieldNames, HeadNames, LayerNames

_GATE_AND_UP = ("mlp.fc12", "mlp.fc11")

NOMIC_BERT = PostNormFamily(
    class_name="NomicBert",
    prefix="nomic_bert.",
    first_prefix="bert.",
    more_architectures=("NomicBertForPreTraining",),
    head=HeadNames(dense="nomic_bert.pooler.dense", output="classifier"),
    embedding_norm="emb_ln",
    layer=LayerNames(
        name="encoder.layers.{}",
        qkv=("attn.Wqkv",),
        attention_output="attn.out_proj",
        attention_norm="norm1",
        up=_GATE_AND_UP,
        down="mlp.fc2",
        output_norm="norm2",
        without_bias=("attn.Wqkv", "attn.out_proj", *_GATE_AND_UP, "mlp.fc2"),
    ),
    fields=FieldNames(default_activation="silu"),
    default_theta=1_000.0,
    pretraining=("cls.",),
    masked_lm=MaskedLMNames(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.layer_norm",
        "cls.predictions.decoder",
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ),
)
