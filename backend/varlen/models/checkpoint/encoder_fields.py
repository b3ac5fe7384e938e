"""The fields of config.json that encoders of every family share."""

from varlen.models.checkpoint import config_file, generation_config

# Fields that transformers reads, and that change no logit and no hidden state. Releases before 5 save the defaults of
# generation in every config.json; an encoder generates nothing.
HARMLESS_FIELDS = config_file.HARMLESS_FIELDS | generation_config.ALL_FIELDS
