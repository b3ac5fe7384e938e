"""What generation_config.json says: end tokens, defaults of sampling, and what is refused.

Defaults apply as in vLLM; see docs/decisions/0077-generation-as-elsewhere.md. A field that would change the answer and
that no request option stands for is refused by name.
"""

from collections.abc import Mapping
from pathlib import Path

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_file import Json, check_fields, read_optional_object

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
    check_fields(config, _FILE, known=REQUEST_FIELDS | HARMLESS_FIELDS, fixed=FIXED_FIELDS)
