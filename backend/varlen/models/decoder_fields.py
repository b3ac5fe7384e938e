"""The fields of config.json that decoders of every family share; see docs/decisions/0017-decoder-checkpoints.md."""

from collections.abc import Mapping

from varlen.models import config_file, generation_config

# Fields that every decoder reads.
READ_FIELDS = frozenset("architectures model_type tie_word_embeddings vocab_size".split())
# Fields that are served with one value, which is what transformers assumes where they are absent. Releases
# before 5 also kept the fields of generation_config.json here.
FIXED_FIELDS: Mapping[str, object] = {
    **generation_config.FIXED_FIELDS,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "pruned_heads": {},
}
# Fields that change no logit and no hidden state.
HARMLESS_FIELDS = (
    config_file.HARMLESS_FIELDS
    | generation_config.REQUEST_FIELDS
    | generation_config.HARMLESS_FIELDS
    # a decoder is one either way; labels are read by heads, and none is served here
    | frozenset("id2label is_decoder num_labels prefix".split())
)
