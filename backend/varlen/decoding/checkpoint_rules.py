"""What a checkpoint says about choosing tokens: rules of beam search, and defaults of requests."""

from collections.abc import Mapping

from varlen.decoding.token_edits import TokenRules
from varlen.errors import CheckpointError
from varlen.models.checkpoint_folder import Checkpoint


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


def search_defaults(checkpoint: Checkpoint, max_sequence_tokens: int) -> Mapping[str, object]:
    """Return a checkpoint's own options for requests; none for the task `generate`."""
    if checkpoint.translate is None:
        return {}
    given = checkpoint.translate.defaults
    # beside the first token, which begins every target
    longest = max_sequence_tokens - 1
    return {
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
