"""What a checkpoint says about translating: token ids, suppressed tokens and defaults of beam search.

It is in generation_config.json, or in config.json where there is no such file, as transformers reads them. A field that
would change the result and is not served is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from varlen.errors import CheckpointError
from varlen.models.checkpoint import generation_config
from varlen.models.checkpoint.config_file import (
    Json,
    check_fields,
    read_flag,
    read_int,
    read_number,
    read_optional_object,
    show,
)

READ_FIELDS = frozenset(
    # token ids
    "bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id eos_token_id"
    " force_bos_token_to_be_generated forced_bos_token_id forced_eos_token_id pad_token_id suppress_tokens"
    # defaults of requests
    " early_stopping length_penalty max_length max_new_tokens min_length min_new_tokens no_repeat_ngram_size"
    " num_beams num_return_sequences renormalize_logits repetition_penalty".split()
)
# Fields that change no result: of sampling, which is off, and of what else is returned.
HARMLESS_FIELDS = (generation_config.HARMLESS_FIELDS - READ_FIELDS) | frozenset(
    "temperature top_k top_p top_h min_p typical_p epsilon_cutoff eta_cutoff low_memory".split()
)
# Fields that change results, and the one value that changes none.
FIXED_FIELDS: Mapping[str, object] = {
    **{
        name: value
        for name, value in generation_config.FIXED_FIELDS.items()
        if name not in READ_FIELDS
    },
    "diversity_penalty": 0.0,
    "do_sample": False,
    "dola_layers": None,
    "max_time": None,
    "num_beam_groups": 1,
    "penalty_alpha": 0.0,
    "stop_strings": None,
}
ALL_FIELDS = READ_FIELDS | HARMLESS_FIELDS | FIXED_FIELDS.keys()

_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class TargetTokens:
    """Token ids with a meaning in targets.

    Attributes:
        start: the first input of the decoder, which is not part of the result.
        forced_first: the first token of every target, if it is forced: the language, for instance.
        forced_last: tokens that end a target of the greatest length, any one of them; empty if none is forced.
        suppressed: more of them, unless a request says otherwise.
        suppressed_first: the tokens that no target begins with; after a forced first token, the second is meant.
    """

    start: int
    eos: tuple[int, ...]
    pad: int | None
    forced_first: int | None
    forced_last: tuple[int, ...]
    bad_words: tuple[int, ...]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TranslateDefaults:
    """Defaults of a request's options, with transformers' names and meanings.

    Attributes:
        min_new_tokens, max_new_tokens: lengths of targets in tokens, with the eos token and without the start; None
            where the checkpoint does not say it.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    num_return_sequences: int = 1
    min_new_tokens: int = 0
    max_new_tokens: int | None = None
    renormalize_logits: bool = False


@dataclass(frozen=True, slots=True)
class TranslateSettings:
    """What the checkpoint says about translating."""

    tokens: TargetTokens
    defaults: TranslateDefaults

    @property
    def masked_tokens(self) -> tuple[int, ...]:
        """Tokens whose logits are -inf: bad words, if the other probabilities are normalised without them."""
        return self.tokens.bad_words if self.defaults.renormalize_logits else ()


def read_translate_settings(folder: Path, config: Json, *, vocab_size: int) -> TranslateSettings:
    """Return the settings of a checkpoint.

    Raises:
        CheckpointError: a value is wrong or missing, or a field that changes results is not served.
    """
    fields, name = read_optional_object(folder, _FILE), _FILE
    if not fields:
        fields, name = {key: config[key] for key in ALL_FIELDS & config.keys()}, "config.json"
    check_fields(fields, name, known=READ_FIELDS | HARMLESS_FIELDS, fixed=FIXED_FIELDS)
    # without null, which means that the default applies
    fields = {key: value for key, value in fields.items() if value is not None}
    tokens = _read_tokens(fields, config, name, vocab_size)
    return TranslateSettings(tokens, _read_defaults(fields, name))


def _read_tokens(fields: Json, config: Json, name: str, vocab_size: int) -> TargetTokens:
    def ids(key: str) -> tuple[int, ...]:
        value = fields.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in listed):
            raise CheckpointError(
                f"{name} has {key} {show(value)}; allowed: token ids below {vocab_size}"
            )
        return tuple(listed)

    def one(key: str) -> int | None:
        found = ids(key)
        if len(found) > 1:
            raise CheckpointError(f"{name} has {key} {show(fields[key])}; allowed: one token id")
        return found[0] if found else None

    # ids that only config.json has count too
    for key in ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"):
        if config.get(key) is not None:
            fields.setdefault(key, config[key])
    start, eos = one("decoder_start_token_id"), ids("eos_token_id")
    start = one("bos_token_id") if start is None else start
    if start is None or not eos:
        missing = "decoder_start_token_id" if start is None else "eos_token_id"
        raise CheckpointError(
            f"{name} has no {missing}, which translating needs; set it as the model was trained"
        )
    forced_first = one("forced_bos_token_id")
    # an old name
    if read_flag(fields, "force_bos_token_to_be_generated", default=False, name=name):
        forced_first = one("bos_token_id")
    # as in transformers, an eos token is not a bad word
    bad_words = {*_read_bad_words(fields, name, vocab_size)} - {*eos}
    return TargetTokens(
        start=start,
        eos=eos,
        pad=one("pad_token_id"),
        forced_first=forced_first,
        forced_last=ids("forced_eos_token_id"),
        bad_words=tuple(sorted(bad_words)),
        suppressed=tuple(sorted(set(ids("suppress_tokens")))),
        suppressed_first=tuple(sorted(set(ids("begin_suppress_tokens")))),
    )


def _read_bad_words(fields: Json, name: str, vocab_size: int) -> list[int]:
    words = fields.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(
        isinstance(word, list)
        and len(word) == 1
        and type(word[0]) is int
        and 0 <= word[0] < vocab_size
        for word in words
    ):
        raise CheckpointError(
            f"{name} has bad_words_ids {show(words)}; allowed: lists of one token id below {vocab_size}"
        )
    return [word[0] for word in words]


def _read_defaults(fields: Json, name: str) -> TranslateDefaults:
    def count(key: str, default: int, *, lowest: int) -> int:
        return read_int(fields, key, default=default, lowest=lowest, name=name)

    early_stopping: bool | Literal["never"] = "never"
    if fields.get("early_stopping") != "never":
        early_stopping = read_flag(fields, "early_stopping", default=False, name=name)
    # lengths that count the start token too
    shortest = count("min_length", 0, lowest=0) - 1
    longest = count("max_length", 2, lowest=2) - 1 if "max_length" in fields else None
    if "max_new_tokens" in fields:
        longest = count("max_new_tokens", 1, lowest=1)
    return TranslateDefaults(
        num_beams=count("num_beams", 1, lowest=1),
        length_penalty=read_number(
            fields, "length_penalty", default=1.0, above=-float("inf"), name=name
        ),
        early_stopping=early_stopping,
        no_repeat_ngram_size=count("no_repeat_ngram_size", 0, lowest=0),
        repetition_penalty=read_number(fields, "repetition_penalty", default=1.0, name=name),
        num_return_sequences=count("num_return_sequences", 1, lowest=1),
        min_new_tokens=max(shortest, count("min_new_tokens", 0, lowest=0)),
        max_new_tokens=longest,
        renormalize_logits=read_flag(fields, "renormalize_logits", default=False, name=name),
    )
