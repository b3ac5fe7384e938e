"""The fields of config.json that all encoders share, all decoders, or all models with both."""

from varlen.errors import CheckpointError
from varlen.models.checkpoint import generation_config
from varlen.models.checkpoint.config_fields import FieldRules
from varlen.models.checkpoint.config_file import HARMLESS_FIELDS, Json, show

_READ = frozenset(("architectures", "model_type"))

# Releases of transformers before 5 save the defaults of generation in every config.json; an encoder generates nothing.
ENCODER = FieldRules(
    _READ | {"id2label", "num_labels"}, HARMLESS_FIELDS | generation_config.ALL_FIELDS, {}
)
# See docs/decisions/0017-decoder-checkpoints.md. Releases before 5 also kept the fields of generation_config.json here.
DECODER = FieldRules(
    _READ | {"is_causal"},
    HARMLESS_FIELDS
    | generation_config.REQUEST_FIELDS
    | generation_config.HARMLESS_FIELDS
    # a decoder is one either way; only a classifier reads labels
    | {"id2label", "is_decoder", "num_labels", "prefix"},
    {
        **generation_config.FIXED_FIELDS,
        "add_cross_attention": False,
        "is_encoder_decoder": False,
        "pruned_heads": {},
    },
)
# Fields of generation are read where there is no generation_config.json; see `generation_config`.
ENCODER_DECODER = FieldRules(
    _READ,
    HARMLESS_FIELDS | generation_config.TRANSLATE_FIELDS | {"prefix"},
    {
        "add_cross_attention": False,
        "is_decoder": False,
        "is_encoder_decoder": True,
        "pruned_heads": {},
    },
)


def is_causal(config: Json) -> bool:
    """Return whether the tokens of a decoder read only earlier ones.

    The masks of transformers 5 follow this field. Other forms of a config.json get it from `first_releases`.

    Raises:
        CheckpointError: it is neither true nor false.
    """
    given = config.get("is_causal", True)
    if not isinstance(given, bool):
        raise CheckpointError(f"config.json has is_causal {show(given)}; allowed: true, false")
    return given
