"""Input limits of a model of 12 tokens, whose arena fits its longest sequence."""

from varlen.intake import InputLimits


class FakeArena:
    """An arena for sequences up to a length, at a hundred bytes per token."""

    def __init__(self, max_tokens):
        self.max_tokens = max_tokens
        self.capacity = self.bytes_needed(max_tokens)

    def bytes_needed(self, tokens):
        return 100 * tokens


def input_limits(max_text_bytes=4000):
    """Return limits of a model with 60 token ids and two token types."""
    return InputLimits(
        max_sequence_tokens=12,
        max_text_bytes=max_text_bytes,
        vocab_size=60,
        type_vocab_size=2,
        arena=FakeArena(12),
    )
