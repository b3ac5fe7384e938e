"""Input limits of a model of 12 tokens, whose arena fits its longest sequence."""

from varlen.intake.long_texts import InputLimits


def input_limits(max_text_bytes=4000):
    """Return limits of a model with 60 token ids and two token types."""
    return InputLimits(
        max_sequence_tokens=12,
        max_text_bytes=max_text_bytes,
        vocab_size=60,
        type_vocab_size=2,
        max_arena_tokens=12,
    )
