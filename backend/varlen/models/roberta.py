"""Checkpoints of RoBERTa and of its multilingual and French forms, XLM-RoBERTa and CamemBERT.

Their position table begins with rows for padding: the first token has the row after the row of `pad_token_id`.
Source: Liu et al. 2019, arXiv:1907.11692; Conneau et al. 2020, arXiv:1911.02116; Martin et al. 2020,
arXiv:1911.03894.
"""

from varlen.models.checkpoint.masked_lm_layout import MaskedLMNames
from varlen.models.post_norm_family import PostNormFamily
from varlen.models.post_norm_names import HeadNames


def _family(class_name: str) -> PostNormFamily:
    return PostNormFamily(
        class_name=class_name,
        prefix="roberta.",
        head=HeadNames(),
        first_position=None,
        pretraining=("lm_head.",),
        masked_lm=MaskedLMNames(
            "lm_head.dense",
            "lm_head.layer_norm",
            "lm_head.decoder",
            ("lm_head.bias", "lm_head.decoder.bias"),
            "gelu",
        ),
        tokenizer_class=f"{class_name}Tokenizer",
    )


# By `model_type`.
ROBERTA = {
    "roberta": _family("Roberta"),
    "xlm-roberta": _family("XLMRoberta"),
    "camembert": _family("Camembert"),
}
