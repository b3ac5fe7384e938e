"""The models of a campaign."""

# A trained encoder, and a random one: with a response cache, with large answers, with a short queue.
ENCODER, CACHED, HIDDEN, CAPPED = "minilm", "cached", "hidden", "capped"
DECODER, TRANSLATOR = "tiny_gpt2", "tiny_dates"
# The decoder with a chat template that takes long for many messages.
CHAT = "chat"
ENCODERS = (ENCODER, CACHED, HIDDEN, CAPPED)
MODELS = (*ENCODERS, DECODER, TRANSLATOR)
