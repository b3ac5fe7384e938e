"""Checkpoints of RoBERTa and of its multilingual and French forms, XLM-RoBERTa and CamemBERT.

Their position table begins with rows for padding: the first token has the row after the row of `pad_token_id`.
jina-embeddings-v3 is an XLM-RoBERTa with rotary positions instead, and adapters for tasks.
Source: Liu et al. 2019, arXiv:1907.11692; Conneau et al. 2020, arXiv:1911.02116; Martin et al. 2020,
arXiv:1911.03894; Sturua et al. 2024, arXiv:2409.10173, and jinaai/xlm-roberta-flash-implementation on the Hugging Face
hub.
"""

from dataclasses import replace

from varlen.models.checkpoint.masked_lm_layout import MaskedLMNames
from varlen.models.post_norm_family import PostNormFamily
from varlen.models.post_norm_names import FieldNames, HeadNames, LayerNames


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


_FLASH = LayerNames(
    name="encoder.layers.{}",
    qkv=("mixer.Wqkv",),
    attention_output="mixer.out_proj",
    attention_norm="norm1",
    up=("mlp.fc1",),
    down="mlp.fc2",
    output_norm="norm2",
)
_XLM_ROBERTA = replace(_family("XLMRoberta"), other_layer=_FLASH, other_embedding_norm="emb_ln")
# By `model_type`.
ROBERTA = {
    "roberta": _family("Roberta"),
    "xlm-roberta": _XLM_ROBERTA,
    "camembert": _family("Camembert"),
    "jina_embeddings_v3": replace(
        _XLM_ROBERTA,
        class_name="JinaEmbeddingsV3",
        layer=_FLASH,
        embedding_norm="emb_ln",
        fields=FieldNames(default_norm_eps=1e-5),
        first_position=0,
        default_theta=20_000.0,
        has_adapters=True,
    ),
}
