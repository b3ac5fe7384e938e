"""The fields of config.json that decoders of every family share; see docs/decisions/0017-decoder-checkpoints.md."""

from varlen.models.checkpoint import config_file, generation_config
from varlen.models.checkpoint.config_fields import FieldRules

RULES = FieldRules(
    read=frozenset("architectures model_type".split()),
    harmless=config_file.HARMLESS_FIELDS
    | generation_config.REQUEST_FIELDS
    | generation_config.HARMLESS_FIELDS
    # a decoder is one either way; labels are read by a classifier alone
    | frozenset("id2label is_decoder num_labels prefix".split()),
    # releases of transformers before 5 also kept the fields of generation_config.json here
    fixed={
        **generation_config.FIXED_FIELDS,
        "add_cross_attention": False,
        "cross_attention_hidden_size": None,
        "is_causal": True,
        "is_encoder_decoder": False,
        "pruned_heads": {},
    },
)
