"""The families of post-norm encoders, by `model_type`."""

from collections.abc import Mapping

from varlen.models.albert_checkpoint import ALBERT
from varlen.models.bert_checkpoint import BERT
from varlen.models.distilbert_checkpoint import DISTILBERT
from varlen.models.electra_checkpoint import ELECTRA
from varlen.models.gte_checkpoint import GTE
from varlen.models.mpnet_checkpoint import MPNET
from varlen.models.nomic_bert_checkpoint import NOMIC_BERT
from varlen.models.post_norm_family import PostNormFamily
from varlen.models.roberta_checkpoint import ROBERTA

POST_NORM_FAMILIES: Mapping[str, PostNormFamily] = {
    "bert": BERT,
    **ROBERTA,
    "distilbert": DISTILBERT,
    "electra": ELECTRA,
    "albert": ALBERT,
    "mpnet": MPNET,
    "nomic_bert": NOMIC_BERT,
    "gte": GTE,
}
