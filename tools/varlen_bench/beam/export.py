"""A Marian checkpoint as CTranslate2 reads it; the words of its vocabulary are token ids."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from varlen_bench.peers.checkpoints import save_word_tokenizer
from varlen_bench.peers.engines import Precision
from varlen_bench.peers.exports import convert_ctranslate2

END, _PAD = "</s>", "<pad>"


def export_ctranslate2(checkpoint: Path, folder: Path, precision: Precision) -> None:
    """Write the CTranslate2 folder of a MarianMTModel.

    CTranslate2 takes the last token for the padding, which starts answers and is never generated. So the padding token
    and the last one change places.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    end, pad, count = config["eos_token_id"], config["pad_token_id"], config["vocab_size"]
    order = list(range(count))
    order[pad], order[-1] = order[-1], order[pad]
    weights = load_file(checkpoint / "model.safetensors")
    for name, weight in weights.items():
        if "shared" in name or "embed_tokens" in name or name == "lm_head.weight":
            weights[name] = weight[order].contiguous()
    weights["final_logits_bias"] = weights["final_logits_bias"][:, order].contiguous()
    moved = dict.fromkeys(("pad_token_id", "decoder_start_token_id"), count - 1)
    words = [str(token) for token in order]
    words[order.index(end)], words[-1] = END, _PAD
    with TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch)
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(config | moved), encoding="utf-8")
        save_word_tokenizer(words, made)
        convert_ctranslate2(made, folder, precision)
