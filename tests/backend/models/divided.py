"""Models that several processes can hold together, as ranks or as stages."""

from tests.checkpoints import SMALL_DECODERS, SMALL_ENCODERS
from varlen.config import EngineConfig
from varlen.execution.packing import part_of_step, source_arrays, step_arrays
from varlen.execution.warm_up import _choosing, _chunk

UNDIVIDED = {"ModernBert", "Deberta", "DebertaV2", "Phi3", "Olmo2", "Olmo3", "T5Gemma"}
# Fields that give a small model four heads; a decoder eight, and two of keys, which four ranks hold twice.
HEADS = {"num_attention_heads": 4}
KEY_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 48}
BART = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
ENCODERS = {
    **{f"{name}Model": HEADS for name in ("Bert", *SMALL_ENCODERS) if name not in UNDIVIDED},
    "DistilBertModel": {"n_heads": 4},
    "T5EncoderModel": {"num_heads": 4},
    "BertForSequenceClassification": HEADS,
    # decoders that read whole sequences in one step
    "GPT2Model": {"n_head": 4},
    "LlamaForSequenceClassification": KEY_HEADS,
    "Qwen3Model": KEY_HEADS,
}
DECODERS = {
    **{
        f"{name}ForCausalLM": KEY_HEADS
        for name in SMALL_DECODERS
        if name not in ("GPT2", *UNDIVIDED)
    },
    "GPT2LMHeadModel": {"n_head": 4},
}
TRANSLATORS = {
    "BartForConditionalGeneration": BART,
    "MBartForConditionalGeneration": BART,
    "MarianMTModel": BART,
    "M2M100ForConditionalGeneration": BART,
    "T5ForConditionalGeneration": {"num_heads": 4},
    "MT5ForConditionalGeneration": {"num_heads": 4},
}
MODELS = {**ENCODERS, **DECODERS, **TRANSLATORS}
CONFIG = EngineConfig(device="cpu", dtype="fp32", warmup_seconds=0, max_running_sequences=4)


def logits_of(runner):
    """Return the logits of a step of a `Runner`, perhaps with a source text."""
    chunk = _choosing(_chunk(runner, 5, 7))._replace(token_ids=(2, 9, 4, 7, 5))
    if runner.info.has_sources:
        chunk = chunk._replace(encodes=(9, 8, 30, 12, 11, 40, 2))
    chunk = chunk._replace(samples=(chunk.sequence,))
    inputs = (arrays([chunk], runner.info.block_size) for arrays in (step_arrays, source_arrays))
    step = part_of_step(next(inputs), sources=next(inputs))
    return runner.run_part(step).clone()
