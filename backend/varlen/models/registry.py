"""The families that are served, by the `model_type` of config.json.

Names of tensors and fields are the ones that Hugging Face transformers saves, unless a family's file says otherwise.
"""

from collections.abc import Callable, Mapping

from varlen.errors import CheckpointError
from varlen.models import (
    bart,
    bert_relatives,
    deberta,
    gemma,
    gpt2,
    llama,
    llama_relatives,
    modernbert,
    static,
    t5,
)
from varlen.models.blocks.model_types import DecoderModel, EncoderDecoderModel, EncoderModel
from varlen.models.checkpoint.config_file import Json, show
from varlen.models.checkpoint.family import Family
from varlen.models.static import STATIC

ENCODERS: Mapping[str, Family[EncoderModel]] = {
    **{name: each.family for name, each in bert_relatives.RELATIVES.items()},
    "modernbert": modernbert.FAMILY,
    "deberta": deberta.FIRST_FAMILY,
    "deberta-v2": deberta.FAMILY,
}
DECODERS: Mapping[str, Family[DecoderModel]] = {
    "gpt2": gpt2.FAMILY,
    **llama.FAMILIES,
    **gemma.FAMILIES,
    **llama_relatives.FAMILIES,
}
ENCODER_DECODERS: Mapping[str, Family[EncoderDecoderModel]] = {
    **bart.FAMILIES,
    **t5.FAMILIES,
    **gemma.ENCODER_DECODERS,
}
# By the beginning of their architecture, encoders that share a `model_type` with another family.
ENCODERS_BY_NAME: Mapping[str, Family[EncoderModel]] = {
    **t5.ENCODERS,
    **bert_relatives.RELATIVES_BY_NAME,
}

FAMILIES: Mapping[str, Family[object]] = {**ENCODERS, **DECODERS, **ENCODER_DECODERS}

# What makes config.json of the text part of a multimodal model, by its `model_type`.
TEXT_PARTS: Mapping[str, Callable[[Json], Json]] = {"gemma3": gemma.text_part}


def text_part(config: Json) -> Json:
    """Return config.json of the text part of a multimodal model, else unchanged.

    Raises:
        CheckpointError: its text part is not served.
    """
    name = config.get("model_type")
    part = TEXT_PARTS.get(name) if isinstance(name, str) else None
    return config if part is None else part(config)


def family_of(config: Json) -> Family[object]:
    """Return the family of a config.json; raise CheckpointError if none has its `model_type`."""
    name, architectures = config.get("model_type"), config.get("architectures")
    if name is None:
        raise CheckpointError(
            "config.json has no model_type, which names the architecture in a checkpoint of transformers; copy"
            f" config.json of the model that it was made of. This version serves: {', '.join([*FAMILIES, *TEXT_PARTS])}"
        )
    if name == STATIC:
        # no config.json of a library has this name
        return static.FAMILY
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"config.json has model_type {show(name)}; this version serves: {', '.join([*FAMILIES, *TEXT_PARTS])}"
        )
    first = str(first_name(architectures))
    own = (family for start, family in ENCODERS_BY_NAME.items() if first.startswith(start))
    return next(own, FAMILIES[name])


def first_name(names: object) -> object:
    """Return the first of several names in config.json, or a value that is no list."""
    return names[0] if isinstance(names, list) and names else names
