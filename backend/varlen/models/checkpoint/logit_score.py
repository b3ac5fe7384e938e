"""The module LogitScore of sentence-transformers: a language model that answers yes or no.

The score is the difference of two logits of the next token, such as of "yes" and "no": one output of a linear layer
whose weights are the difference of two rows of the output matrix.
"""

from dataclasses import dataclass
from pathlib import Path

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_file import Json, check_fields, read_int, read_object, show

_FORMATS = ("flat", "structured")


@dataclass(frozen=True, slots=True)
class LogitScore:
    """How scores are made, and how a pair becomes the messages of a chat.

    Attributes:
        true_token: the token whose logit is the score.
        false_token: the token whose logit is subtracted from it, if there is one.
        system: text of the first message; empty without one.
        has_parts: whether the content of a message is a list of parts, not a text.
    """

    true_token: int
    false_token: int | None
    system: str
    has_parts: bool


def read_logit_score(folder: Path, path: str, transformer: Json, system: str) -> LogitScore:
    """Return the settings of the module.

    Args:
        path: path of the module's folder, relative to the checkpoint.
        transformer: content of sentence_bert_config.json.
        system: the default prompt of the model.

    Raises:
        CheckpointError: a file is damaged, or asks for something that is not served.
    """
    name = f"{path}/config.json"
    config = read_object(folder, name)
    known = ("true_token_id", "false_token_id")
    check_fields(config, name, known=known, fixed={"module_input_name": "causal_logits"})
    has_false = config.get("false_token_id") is not None
    return LogitScore(
        read_int(config, "true_token_id", lowest=0, name=name),
        read_int(config, "false_token_id", lowest=0, name=name) if has_false else None,
        system,
        _message_format(transformer) == "structured",
    )


def _message_format(transformer: Json) -> str:
    """Return the form of messages that sentence_bert_config.json names."""
    modalities = transformer.get("modality_config")
    messages = modalities.get("message") if isinstance(modalities, dict) else None
    form = messages.get("format") if isinstance(messages, dict) else None
    if not isinstance(form, str) or form not in _FORMATS:
        raise CheckpointError(
            f"sentence_bert_config.json has messages of the format {show(form)}; allowed: {', '.join(_FORMATS)}"
        )
    return form


def check_score_tokens(score: LogitScore, vocab_size: int) -> None:
    """Raise CheckpointError unless the model has logits of the two tokens."""
    for token in (score.true_token, score.false_token):
        if token is not None and token >= vocab_size:
            raise CheckpointError(
                f"the module LogitScore names the token {token}; this model has tokens below {vocab_size}"
            )
