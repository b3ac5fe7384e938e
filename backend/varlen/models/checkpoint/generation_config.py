"""What generation_config.json says: end tokens, defaults of sampling, and what is refused.

Defaults apply as in vLLM; see docs/decisions/0077-generation-as-elsewhere.md. A field that would change the answer and
that no request option stands for is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import (
    Json,
    check_fields,
    read_flag,
    read_int,
    read_number,
    read_optional_object,
    show,
)

_FILE = "generation_config.json"

# Fields that are defaults of a request's options, and the limit of an answer, in vLLM.
SAMPLING_FIELDS = tuple("temperature top_k top_p min_p repetition_penalty max_new_tokens".split())
# Options that a request has; only the fields of vLLM are applied.
REQUEST_FIELDS = frozenset(
    "do_sample temperature top_k top_p min_p repetition_penalty max_length max_new_tokens min_length"
    " min_new_tokens num_return_sequences stop_strings max_time"
    # other ways to choose tokens, which a request of transformers asks for too
    " num_beams num_beam_groups early_stopping length_penalty diversity_penalty typical_p top_h epsilon_cutoff"
    " eta_cutoff penalty_alpha low_memory dola_layers".split()
)
HARMLESS_FIELDS = frozenset(
    # token ids; the last three are for models with an encoder, or for padding
    "bos_token_id eos_token_id pad_token_id decoder_start_token_id"
    # caches, speculation and what else is returned
    " use_cache cache_implementation cache_config max_cache_len use_mtp prefill_chunk_size compile_config"
    " disable_compile continuous_batching_config is_assistant num_assistant_tokens num_assistant_tokens_schedule"
    " assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit"
    " assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type output_attentions"
    " output_hidden_states output_scores output_logits return_dict_in_generate"
    # names and versions
    " _from_model_config transformers_version _commit_hash"
    # against NaN and infinities, which a served model has none of, and rounding
    " remove_invalid_values renormalize_logits".split()
)
# Fields that change tokens, and the one value that changes none.
FIXED_FIELDS: Mapping[str, object] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "no_repeat_ngram_size": 0,
    "sequence_bias": None,
    "suppress_tokens": None,
    "token_healing": False,
    "watermarking_config": None,
}
ALL_FIELDS = REQUEST_FIELDS | HARMLESS_FIELDS | FIXED_FIELDS.keys()


def read_end_tokens(folder: Path, config: Json) -> tuple[int, ...]:
    """Return the tokens that end a sequence: of generation_config.json, else of config.json.

    Raises:
        CheckpointError: a value is not a token id.
    """
    sources = ((_FILE, read_optional_object(folder, _FILE)), ("config.json", config))
    for name, fields in sources:
        value = fields.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise CheckpointError(f"{name} has eos_token_id {value!r}; allowed: token ids")
        return tuple(ids)
    return ()


def read_sampling_fields(folder: Path) -> Mapping[str, object]:
    """Return the fields of sampling in generation_config.json, without nulls; their values are not checked."""
    fields = read_optional_object(folder, _FILE)
    return {name: fields[name] for name in SAMPLING_FIELDS if fields.get(name) is not None}


def check_generation(folder: Path) -> None:
    """Raise CheckpointError if generation_config.json changes tokens in a way that is not served."""
    config = read_optional_object(folder, _FILE)
    check_fields(
        config,
        _FILE,
        known=REQUEST_FIELDS | HARMLESS_FIELDS,
        fixed=FIXED_FIELDS,
        remedy="; leave it out of the file",
    )


TRANSLATE_READ_FIELDS = frozenset(
    # token ids
    "bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id eos_token_id"
    " force_bos_token_to_be_generated forced_bos_token_id forced_eos_token_id pad_token_id suppress_tokens"
    # defaults of requests
    " early_stopping length_penalty max_length max_new_tokens min_length min_new_tokens no_repeat_ngram_size"
    " num_beams num_return_sequences renormalize_logits repetition_penalty".split()
)
# Fields that change no result: of sampling, which is off, and of what else is returned.
TRANSLATE_HARMLESS_FIELDS = (HARMLESS_FIELDS - TRANSLATE_READ_FIELDS) | frozenset(
    "temperature top_k top_p top_h min_p typical_p epsilon_cutoff eta_cutoff low_memory".split()
)
# Fields that change results, and the one value that changes none.
TRANSLATE_FIXED_FIELDS: Mapping[str, object] = {
    **{name: value for name, value in FIXED_FIELDS.items() if name not in TRANSLATE_READ_FIELDS},
    "diversity_penalty": 0.0,
    "do_sample": False,
    "dola_layers": None,
    "max_time": None,
    "num_beam_groups": 1,
    "penalty_alpha": 0.0,
    "stop_strings": None,
}
TRANSLATE_FIELDS = TRANSLATE_READ_FIELDS | TRANSLATE_HARMLESS_FIELDS | TRANSLATE_FIXED_FIELDS.keys()


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
        fields, name = {key: config[key] for key in TRANSLATE_FIELDS & config.keys()}, "config.json"
    check_fields(
        fields,
        name,
        known=TRANSLATE_READ_FIELDS | TRANSLATE_HARMLESS_FIELDS,
        fixed=TRANSLATE_FIXED_FIELDS,
    )
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
