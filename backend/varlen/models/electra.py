"""Checkpoints of ELECTRA, whose tables may have fewer features than its layers.

Source: Clark et al. 2020, arXiv:2003.10555.
"""

from varlen.models.checkpoint.masked_lm_layout import MaskedLMNames
from varlen.models.post_norm_family import PostNormFamily
from varlen.models.post_norm_names import FieldNames, HeadNames

ELECTRA = PostNormFamily(
    class_name="Electra",
    prefix="electra.",
    head=HeadNames(activation="gelu"),
    fields=FieldNames(embedding="embedding_size"),
    projection="embeddings_project",
    pretraining=("discriminator_predictions.", "generator_predictions.", "generator_lm_head."),
    masked_lm=MaskedLMNames(
        "generator_predictions.dense",
        "generator_predictions.LayerNorm",
        "generator_lm_head",
        ("generator_lm_head.bias",),
        "gelu",
    ),
    more_architectures=("ElectraForPreTraining",),
    # of heads that are not served
    harmless=frozenset("summary_activation summary_type summary_use_proj".split()),
    tokenizer_class="ElectraTokenizer",
)
