"""The fields of config.json that decoders of every family share; see docs/decisions/0017-decoder-checkpoints.md."""

from collections.abc import Mapping

from varlen.models.checkpoint import config_file, generation_config
from varlen.models.checkpoint.config_file import Json, read_num_labels
from varlen.tasks import Task

# The linear layer of a classifier.
SCORE = "score"
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
# Fields that transformers reads, and that change no logit and no hidden state.
HARMLESS_FIELDS = (
    config_file.HARMLESS_FIELDS
    | generation_config.REQUEST_FIELDS
    | generation_config.HARMLESS_FIELDS
    # a decoder is one either way; labels are read by a classifier alone
    | frozenset("id2label is_decoder num_labels prefix".split())
)


def score_shapes(config: Json, task: Task, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a classifier's tensors, by name.

    Args:
        config: content of config.json.
        task: of the checkpoint's architecture.
        hidden: features of a token.
    """
    if task not in ("classify", "token_classify"):
        return {}
    labels = read_num_labels(config)
    shapes: dict[str, tuple[int, ...]] = {f"{SCORE}.weight": (labels, hidden)}
    if task == "token_classify":
        shapes[f"{SCORE}.bias"] = (labels,)
    return shapes
