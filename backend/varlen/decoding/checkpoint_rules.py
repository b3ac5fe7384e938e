"""Rules of a checkpoint for beam search, and defaults of requests."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from varlen.config import GenerationDefaults
from varlen.decoding.token_edits import TokenRules
from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import show
from varlen.models.checkpoint.generation_config import read_sampling_fields
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.generation import OPTIONS, GenerationOptions


def search_rules(checkpoint: Checkpoint) -> TokenRules:
    """Return the rules of beam search of a checkpoint.

    Raises:
        CheckpointError: it forces one of several tokens at the end.
    """
    if checkpoint.translate is None:
        return TokenRules(end_ids=checkpoint.eos_token_ids)
    tokens = checkpoint.translate.tokens
    if len(tokens.forced_last) > 1:
        raise CheckpointError(
            f"forced_eos_token_id has {len(tokens.forced_last)} tokens; allowed: one"
        )
    return TokenRules(
        end_ids=tokens.eos,
        forced_first_id=tokens.forced_first,
        forced_last_id=next(iter(tokens.forced_last), None),
        banned_ids=tokens.bad_words,
        suppressed_ids=tokens.suppressed,
        first_suppressed_ids=tokens.suppressed_first,
    )


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """A checkpoint's own options for requests."""

    options: Mapping[str, object]
    max_new_tokens: int | None = None

    def read(self, parameters: Mapping[str, object]) -> GenerationOptions:
        """Return the checked options of a request, given by name.

        Raises:
            RequestError: see `GenerationOptions.from_parameters`.
        """
        options = GenerationOptions.from_parameters(parameters, self.options)
        most = self.max_new_tokens
        if most is None or options.max_tokens <= most:
            return options
        return replace(options, max_tokens=most, min_tokens=min(options.min_tokens, most))


def request_defaults(
    checkpoint: Checkpoint, max_sequence_tokens: int, source: GenerationDefaults
) -> RequestDefaults:
    """Return a checkpoint's own options for requests.

    Args:
        max_sequence_tokens: longest sequence of the served model.
        source: setting of the model; it does not concern translations.

    Raises:
        CheckpointError: generation_config.json has a value that no request may have.
    """
    if checkpoint.translate is None:
        return RequestDefaults({}) if source == "none" else _sampling_defaults(checkpoint)
    given = checkpoint.translate.defaults
    # beside the first token, which begins every target
    longest = max_sequence_tokens - 1
    return RequestDefaults(
        {
            "num_beams": given.num_beams,
            "n": given.num_return_sequences,
            "length_penalty": given.length_penalty,
            "early_stopping": given.early_stopping,
            "no_repeat_ngram_size": given.no_repeat_ngram_size,
            "repetition_penalty": given.repetition_penalty,
            "min_tokens": given.min_new_tokens,
            "max_tokens": min(given.max_new_tokens or longest, longest),
            "temperature": 0.0,
        }
    )


def _sampling_defaults(checkpoint: Checkpoint) -> RequestDefaults:
    given = read_sampling_fields(checkpoint.folder)
    for name, value in given.items():
        option = OPTIONS["max_tokens" if name == "max_new_tokens" else name]
        if not option.allows(option.from_json(value)):
            raise CheckpointError(
                f"generation_config.json has {name} {show(value)}; allowed: {option.allowed}. The setting"
                " generation_config: none leaves its defaults out"
            )
    # vLLM's names are other names of the same options here
    checked = GenerationOptions.from_parameters(given)
    options = {name: getattr(checked, name) for name in given if name != "max_new_tokens"}
    return RequestDefaults(options, checked.max_tokens if "max_new_tokens" in given else None)
