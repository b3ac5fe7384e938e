"""The fields of config.json that models with an encoder and a decoder share."""

from collections.abc import Mapping

from varlen.models.checkpoint import config_file, translate_config

# Fields that every such model reads.
READ_FIELDS = frozenset("architectures model_type tie_word_embeddings vocab_size".split())
# Fields that are served with one value, which is what transformers assumes where they are absent.
FIXED_FIELDS: Mapping[str, object] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": True,
    "pruned_heads": {},
}
# Fields that transformers reads, and that change no logit. Those of generation are read where there is no
# generation_config.json; see `translate_config`.
HARMLESS_FIELDS = (
    config_file.HARMLESS_FIELDS | translate_config.ALL_FIELDS | frozenset("prefix".split())
)
