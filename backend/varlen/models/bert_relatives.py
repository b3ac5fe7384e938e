"""BERT and its relatives: names of tensors and fields, and parts of layers.

A relative is a row; `post_norm_family` loads all of them. Names of JinaBERT, jina-embeddings-v3 and NomicBERT come from
the code and files of their authors on the hub.
"""

from collections.abc import Mapping
from dataclasses import replace

from varlen.models.checkpoint.family import BERT_MASKED_LM, Family, MaskedLMNames
from varlen.models.post_norm_family import (
    DISTANCE_BUCKETS,
    ExpertNames,
    FieldNames,
    HeadNames,
    LayerNames,
    PostNormEncoder,
    PostNormFamily,
)

_LM_HEAD = MaskedLMNames(
    "lm_head.dense",
    "lm_head.layer_norm",
    "lm_head.decoder",
    ("lm_head.bias", "lm_head.decoder.bias"),
    "gelu",
)
# Devlin et al. 2018, arXiv:1810.04805.
_BERT = PostNormFamily(
    class_name="Bert",
    prefix="bert.",
    head=HeadNames(dense="bert.pooler.dense", output="classifier"),
    pretraining=("cls.",),
    masked_lm=BERT_MASKED_LM,
    more_architectures=("BertForPreTraining",),
)
# All layers share their weights, and tables have fewer features than layers: Lan et al. 2019, arXiv:1909.11942.
_ALBERT = PostNormFamily(
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
# Sanh et al. 2019, arXiv:1910.01108.
_DISTILBERT = PostNormFamily(
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
# Tables may have fewer features than layers: Clark et al. 2020, arXiv:2003.10555.
_ELECTRA = PostNormFamily(
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
# Rotary positions and gated feed-forward parts: Zhang et al. 2024, arXiv:2407.19669.
_GTE = PostNormFamily(
    class_name="Gte",
    prefix="gte.",
    first_prefix="new.",
    least_types=0,
    head=HeadNames(dense="gte.pooler.dense", output="classifier"),
    layer=LayerNames(
        qkv=("attention.qkv_proj",),
        attention_output="attention.o_proj",
        attention_norm="attn_ln",
        up=("mlp.up_gate_proj",),
        gate="second",
        down="mlp.down_proj",
        output_norm="mlp_ln",
        without_bias=("mlp.up_gate_proj",),
    ),
    default_theta=160_000.0,
    pretraining=("lm_head.",),
    masked_lm=MaskedLMNames(
        "lm_head.dense",
        "lm_head.norm",
        "lm_head.decoder",
        ("lm_head.decoder.bias",),
        "gelu",
    ),
    tokenizer_class="XLMRobertaTokenizer",
)
# Relative positions add a bias to the scores of all layers: Song et al. 2020, arXiv:2004.09297.
_MPNET = PostNormFamily(
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
    masked_lm=_LM_HEAD,
    # transformers computes with as many buckets whatever this is
    fixed={"relative_attention_num_buckets": DISTANCE_BUCKETS},
    tokenizer_class="MPNetTokenizer",
)


def _roberta(class_name: str) -> PostNormFamily:
    # The position table begins with rows for padding: the first token has the row after the row of `pad_token_id`.
    # Liu et al. 2019, arXiv:1907.11692; Conneau et al. 2020, arXiv:1911.02116 (XLM-RoBERTa); Martin et al. 2020,
    # arXiv:1911.03894 (CamemBERT).
    return PostNormFamily(
        class_name=class_name,
        prefix="roberta.",
        head=HeadNames(),
        first_position=None,
        pretraining=("lm_head.",),
        masked_lm=_LM_HEAD,
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
_XLM_ROBERTA = replace(_roberta("XLMRoberta"), other_layer=_FLASH, other_embedding_norm="emb_ln")
_ROBERTA = {
    "roberta": _roberta("Roberta"),
    "xlm-roberta": _XLM_ROBERTA,
    "camembert": _roberta("Camembert"),
    # Rotary positions, and adapters for tasks: Sturua et al. 2024, arXiv:2409.10173, and
    # jinaai/xlm-roberta-flash-implementation on the hub.
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
_GATE_AND_UP = ("mlp.fc12", "mlp.fc11")

# Rotary positions, gated feed-forward parts, no biases beside norms: Nussbaum et al. 2024, arXiv:2402.01613;
# nomic-ai/nomic-bert-2048 on the hub.
_NOMIC_BERT = PostNormFamily(
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
    masked_lm=replace(BERT_MASKED_LM, norm="cls.predictions.transform.layer_norm"),
)

# Every second layer has experts in the form of megablocks, two tensors of all; the others have biases and no gate.
# Its config.json says `nomic_bert` too; `first_releases` writes this beginning of its classes' names. Nussbaum,
# Duderstadt 2025, arXiv:2502.07972.
_MOE_CLASS_NAME = "NomicBertMoe"
_NOMIC_BERT_MOE = replace(
    _NOMIC_BERT,
    class_name=_MOE_CLASS_NAME,
    more_architectures=("NomicBertMoeForPreTraining",),
    layer=replace(_NOMIC_BERT.layer, up=("mlp.fc1",), without_bias=()),
    fields=FieldNames(),
    experts=ExpertNames(
        router="mlp.router.layer",
        up="mlp.experts.mlp.w1",
        down="mlp.experts.mlp.w2",
        bias="mlp.experts.bias",
        number="num_experts",
        count="moe_top_k",
        every="moe_every_n_layers",
    ),
)
_JINA = LayerNames(
    up=("mlp.gated_layers",),
    gate="first",
    down="mlp.wo",
    output_norm="mlp.layernorm",
    without_bias=("mlp.gated_layers",),
)
_NORMED_JINA = LayerNames(
    up=("mlp.up_gated_layer",),
    gate="second",
    down="mlp.down_layer",
    output_norm="layer_norm_2",
    without_bias=("mlp.up_gated_layer",),
    query_norm="attention.self.layer_norm_q",
    key_norm="attention.self.layer_norm_k",
    second_norm="layer_norm_1",
)

# jina-embeddings-v2 and its rerankers: scores fall with the distance of two tokens (ALiBi, in both directions), and
# feed-forward parts have gates. config.json says `bert`; the beginning of its classes' names tells it from BERT. The
# tensors of jina-embeddings-v2-base-code and its relatives tell that they norm queries and keys too. Günther et al.
# 2023, arXiv:2310.19923; jinaai/jina-bert-implementation and jinaai/jina-bert-v2-qk-post-norm on the hub.
_JINA_CLASS_NAME = "JinaBert"
_JINA_BERT: Family[PostNormEncoder] = replace(
    replace(
        _BERT,
        class_name=_JINA_CLASS_NAME,
        layer=_JINA,
        other_layer=_NORMED_JINA,
        has_alibi=True,
        more_architectures=(),
        fixed={"position_embedding_type": "alibi"},
    ).family,
    # norms over the features of all heads, and slopes of each
    is_divisible=False,
)

RELATIVES: Mapping[str, PostNormFamily] = {
    "bert": _BERT,
    **_ROBERTA,
    "distilbert": _DISTILBERT,
    "electra": _ELECTRA,
    "albert": _ALBERT,
    "mpnet": _MPNET,
    "nomic_bert": _NOMIC_BERT,
    "gte": _GTE,
}
# The relatives that share a `model_type`, by the beginning of their classes' names.
RELATIVES_BY_NAME: Mapping[str, Family[PostNormEncoder]] = {
    _JINA_CLASS_NAME: _JINA_BERT,
    _MOE_CLASS_NAME: _NOMIC_BERT_MOE.family,
}
