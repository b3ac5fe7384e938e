"""The process of a system that translates: three engines, and the systems made of them.

An answer is the best of `BEAMS` beams, without the end token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from varlen_bench.compare.passes import (
    Answer,
    Ids,
    OnTokens,
    Requests,
    RunBatch,
    Submit,
    percentiles_ms,
    run_together,
)
from varlen_bench.compare.systems import System, by_name
from varlen_bench.compare.worker import starter
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.worker import run_worker
from varlen_bench.peers.checkpoints import config_field, load_generator, save_word_tokenizer
from varlen_bench.peers.engines import Cores, Precision, ctranslate2_options
from varlen_bench.workers.generate import load_varlen

# Translates a batch: sources, and the most tokens of each answer.
Translate: TypeAlias = Callable[[Sequence[Ids], Sequence[int]], list[list[int]]]

OURS, REQUEST_LEVEL = "varlen-fp32", "varlen-fp32-batches"
TRANSFORMERS = "transformers-fp32-sorted"
BEAMS = 4

SYSTEMS = by_name(
    System(OURS, "varlen", "fp32", "engine"),
    System("varlen-int8", "varlen", "int8", "engine"),
    System(REQUEST_LEVEL, "varlen", "fp32", "sorted"),
    System(TRANSFORMERS, "transformers", "fp32", "sorted"),
    System("ctranslate2-fp32-sorted", "ctranslate2", "fp32", "sorted"),
    System("ctranslate2-fp32-per-core", "ctranslate2", "fp32", "sorted", per_core=True),
    System("ctranslate2-int8-sorted", "ctranslate2", "int8", "sorted"),
    System("ctranslate2-int8-per-core", "ctranslate2", "int8", "sorted", per_core=True),
)

# Words of CTranslate2's vocabulary; the others are token ids.
_END, _PAD = "</s>", "<pad>"
# Beams that run at the same time: the beams of 32 requests.
_RUNNING = 128


def load_batches(system: System, checkpoint: Path, scratch: Path, cores: Cores) -> RunBatch:
    """Return a function that translates one batch; all answers come at its end."""
    if system.engine == "varlen":
        translate = _together(load_iteration(system, checkpoint, cores))
    elif system.engine == "transformers":
        translate = _transformers(checkpoint, cores)
    else:
        translate = _ctranslate2(checkpoint, scratch, system.precision, cores)

    def run(sources: Sequence[Ids], limits: Sequence[int], on_tokens: OnTokens) -> None:
        answers = translate(sources, limits)
        moment = time.perf_counter()
        for row, tokens in enumerate(answers):
            on_tokens(row, tokens, moment)

    return run


def load_iteration(system: System, checkpoint: Path, cores: Cores) -> Submit:
    """Return a function that starts one request of varlen."""
    end, settings = config_field(checkpoint, "eos_token_id"), {"max_running_sequences": _RUNNING}
    return load_varlen(checkpoint, system.precision, cores, settings, end=end, num_beams=BEAMS)


def figures(answers: Sequence[Answer], _: Requests) -> dict[str, Cell]:
    """Return the figures of a pass; latency in milliseconds from arrival to answer."""
    end = max(answer.end for answer in answers)
    return {
        "sentences_per_second": len(answers) / (end - answers[0].due),
        "tokens": sum(len(answer.tokens) for answer in answers),
        **percentiles_ms("latency", [answer.end - answer.due for answer in answers]),
    }


def _together(submit: Submit) -> Translate:
    """Return a function that submits a batch: batches at the level of requests."""

    def translate(sources: Sequence[Ids], limits: Sequence[int]) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in sources]
        run_together(submit, sources, limits, lambda row, ids, _: answers[row].extend(ids))
        return answers

    return translate


def _transformers(checkpoint: Path, cores: Cores) -> Translate:
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    model = load_generator("AutoModelForSeq2SeqLM", checkpoint, cores.total)
    end, pad = (config_field(checkpoint, name) for name in ("eos_token_id", "pad_token_id"))

    class Limits(StoppingCriteria):  # type: ignore[misc]
        """Ends the candidates of each row at its own length."""

        def __init__(self, limits: Sequence[int]) -> None:
            self.limits = torch.tensor(limits)

        def __call__(self, input_ids: Any, _: Any, **__: Any) -> Any:
            # candidates of all rows, each with its start token
            candidates = len(input_ids) // len(self.limits)
            return (input_ids.shape[1] - 1 >= self.limits).repeat_interleave(candidates)

    @torch.inference_mode()
    def run(sources: Sequence[Ids], limits: Sequence[int]) -> list[list[int]]:
        longest = max(map(len, sources))
        ids = torch.tensor([[*source] + [pad] * (longest - len(source)) for source in sources])
        lengths = torch.tensor([len(source) for source in sources])
        output = model.generate(
            input_ids=ids,
            attention_mask=(torch.arange(longest) < lengths[:, None]).long(),
            num_beams=BEAMS,
            max_new_tokens=max(limits),
            stopping_criteria=StoppingCriteriaList([Limits(limits)]),
        )
        return [[token for token in row if token not in (end, pad)] for row in output.tolist()]

    return run


def _ctranslate2(checkpoint: Path, scratch: Path, precision: Precision, cores: Cores) -> Translate:
    import ctranslate2

    folder = scratch / f"ctranslate2-{precision}"
    _export_ctranslate2(checkpoint, folder, precision)
    options = ctranslate2_options(precision, cores)
    translator: Any = ctranslate2.Translator(str(folder), **options)
    end = config_field(checkpoint, "eos_token_id")

    def run(sources: Sequence[Ids], limits: Sequence[int]) -> list[list[int]]:
        answers = translator.translate_batch(
            [[_END if token == end else str(token) for token in ids] for ids in sources],
            beam_size=BEAMS,
            length_penalty=1.0,
            # it has one limit for all rows
            max_decoding_length=max(limits),
            max_input_length=0,
        )
        pairs = zip(answers, limits, strict=True)
        return [[int(word) for word in answer.hypotheses[0][:limit]] for answer, limit in pairs]

    return run


def _export_ctranslate2(checkpoint: Path, folder: Path, precision: Precision) -> None:
    """Write the CTranslate2 folder of a MarianMTModel.

    CTranslate2 takes the last token for the padding, which starts answers and is never generated. So the padding token
    and the last one change places.
    """
    from safetensors.torch import load_file, save_file

    from varlen_bench.peers.exports import convert_ctranslate2

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
    words[order.index(end)], words[-1] = _END, _PAD
    with TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch)
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(config | moved), encoding="utf-8")
        save_word_tokenizer(words, made)
        convert_ctranslate2(made, folder, precision)


start = starter(load_iteration, load_batches, figures, "sentences")

if __name__ == "__main__":
    run_worker(start)
