"""The fields of config.json that models with an encoder and a decoder share."""

from varlen.models.checkpoint import config_file, translate_config
from varlen.models.checkpoint.config_fields import FieldRules

# Fields of generation are read where there is no generation_config.json; see `translate_config`.
RULES = FieldRules(
    read=frozenset("architectures model_type".split()),
    harmless=config_file.HARMLESS_FIELDS | translate_config.ALL_FIELDS | {"prefix"},
    fixed={
        "add_cross_attention": False,
        "cross_attention_hidden_size": None,
        "is_decoder": False,
        "is_encoder_decoder": True,
        "pruned_heads": {},
    },
)
