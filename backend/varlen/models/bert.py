"""Checkpoints of BERT. Source: Devlin et al. 2018, arXiv:1810.04805."""

from varlen.models.checkpoint.masked_lm_layout import MaskedLMNames
from varlen.models.post_norm_family import PostNormFamily
from varlen.models.post_norm_names import HeadNames

BERT = PostNormFamily(
    class_name="Bert",
    prefix="bert.",
    head=HeadNames(dense="bert.pooler.dense", output="classifier"),
    pretraining=("cls.",),
    masked_lm=MaskedLMNames(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ),
    more_architectures=("BertForPreTraining",),
)
