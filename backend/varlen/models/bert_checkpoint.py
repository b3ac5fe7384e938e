"""Checkpoints of BERT. Source: Devlin et al. 2018, arXiv:1810.04805."""

from varlen.models.post_norm_family import HeadNames, PostNormFamily

BERT = PostNormFamily(
    class_name="Bert",
    prefix="bert.",
    head=HeadNames(dense="bert.pooler.dense", output="classifier"),
    pretraining=("cls.",),
    more_architectures=("BertForPreTraining",),
)
