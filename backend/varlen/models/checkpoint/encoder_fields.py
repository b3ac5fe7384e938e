"""The fields of config.json that encoders of every family share."""

from varlen.models.checkpoint import config_file, generation_config
from varlen.models.checkpoint.config_fields import FieldRules

# Releases of transformers before 5 save the defaults of generation in every config.json; an encoder generates nothing.
RULES = FieldRules(
    read=frozenset("architectures id2label model_type num_labels".split()),
    harmless=config_file.HARMLESS_FIELDS | generation_config.ALL_FIELDS,
    fixed={},
)
HARMLESS_FIELDS = RULES.harmless
