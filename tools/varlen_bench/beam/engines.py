"""The worker process of a system that translates: three engines.

A process imports only the libraries of its engine. An answer is the best of `BEAMS` beams, without the end token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from varlen_bench.beam.systems import BEAMS
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
from varlen_bench.compare.systems import System
from varlen_bench.compare.worker import starter
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.worker import run_worker
from varlen_bench.peers.checkpoints import config_field, load_generator
from varlen_bench.peers.engines import Cores, Precision, ctranslate2_options

if TYPE_CHECKING:
    from varlen.config import DType

# Translates a batch: sources, and the most tokens of each answer.
Translate: TypeAlias = Callable[[Sequence[Ids], Sequence[int]], list[list[int]]]

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
    from varlen.in_process.generator import Generator
    from varlen.request.generation import GenerationOptions
    from varlen.request.request import GeneratedPart

    end = config_field(checkpoint, "eos_token_id")
    generator = Generator.from_pretrained(
        checkpoint,
        device="cpu",
        dtype=cast("DType", system.precision),
        threads=cores.total,
        max_running_sequences=_RUNNING,
    )

    def submit(source: Ids, limit: int, on_tokens: OnTokens) -> Future[Any]:
        def on_part(_: int, part: GeneratedPart) -> None:
            tokens = [token for token in part.token_ids if token != end]
            on_tokens(0, tokens, time.perf_counter())

        options = GenerationOptions(max_tokens=limit, num_beams=BEAMS)
        return generator.submit(source, options, on_part)

    return submit


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

    from varlen_bench.beam.export import END, export_ctranslate2

    folder = scratch / f"ctranslate2-{precision}"
    export_ctranslate2(checkpoint, folder, precision)
    options = ctranslate2_options(precision, cores)
    translator: Any = ctranslate2.Translator(str(folder), **options)
    end = config_field(checkpoint, "eos_token_id")

    def run(sources: Sequence[Ids], limits: Sequence[int]) -> list[list[int]]:
        answers = translator.translate_batch(
            [[END if token == end else str(token) for token in ids] for ids in sources],
            beam_size=BEAMS,
            length_penalty=1.0,
            # it has one limit for all rows
            max_decoding_length=max(limits),
            max_input_length=0,
        )
        pairs = zip(answers, limits, strict=True)
        return [[int(word) for word in answer.hypotheses[0][:limit]] for answer, limit in pairs]

    return run


start = starter(load_iteration, load_batches, figures, "sentences")

if __name__ == "__main__":
    run_worker(start)
