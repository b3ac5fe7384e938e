"""Three engines behind two functions: batches, or requests that come at any time.

A process imports only the libraries of its engine. An answer is the best of `BEAMS` beams, without the end token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from varlen_bench.beam.systems import BEAMS
from varlen_bench.harness.generating import Precision, System

if TYPE_CHECKING:
    from varlen.generator import Generation

Ids: TypeAlias = Sequence[int]
# Translates a batch: sources, and the most tokens of each answer.
RunBatch: TypeAlias = Callable[[Sequence[Ids], Sequence[int]], list[list[int]]]
# Starts one request.
Submit: TypeAlias = Callable[[Ids, int], "Future[list[int]]"]

# Beams that run at the same time: those of 32 requests.
_RUNNING = 128


def load_batches(system: System, checkpoint: Path, scratch: Path, *, threads: int) -> RunBatch:
    """Return a function that translates one batch."""
    if system.engine == "varlen":
        submit = load_iteration(checkpoint, threads=threads)

        def run(sources: Sequence[Ids], limits: Sequence[int]) -> list[list[int]]:
            """Submit a batch and wait for its last answer: batches at the level of requests."""
            running = [submit(ids, limit) for ids, limit in zip(sources, limits, strict=True)]
            return [each.result() for each in running]

        return run
    if system.engine == "transformers":
        return _transformers(checkpoint, threads)
    return _ctranslate2(checkpoint, scratch, system.precision, threads)


def load_iteration(checkpoint: Path, *, threads: int) -> Submit:
    """Return a function that starts one request of varlen."""
    from varlen.generator import Generator
    from varlen.request.generation import GenerationOptions

    (end,) = _special(checkpoint, "eos_token_id")
    generator = Generator.from_pretrained(
        checkpoint, device="cpu", dtype="fp32", threads=threads, max_running_sequences=_RUNNING
    )

    def submit(source: Ids, limit: int) -> Future[list[int]]:
        answer: Future[list[int]] = Future()

        def finish(done: Future[list[Generation]]) -> None:
            error = done.exception()
            if error:
                answer.set_exception(error)
            else:
                (best,) = done.result()
                answer.set_result([token for token in best.token_ids if token != end])

        options = GenerationOptions(max_tokens=limit, num_beams=BEAMS)
        generator.submit(source, options).add_done_callback(finish)
        return answer

    return submit


def _transformers(checkpoint: Path, threads: int) -> RunBatch:
    import torch
    from transformers import AutoModelForSeq2SeqLM, StoppingCriteria, StoppingCriteriaList
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.eval()
    end, pad = _special(checkpoint, "eos_token_id", "pad_token_id")

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


def _ctranslate2(checkpoint: Path, scratch: Path, precision: Precision, threads: int) -> RunBatch:
    import ctranslate2

    from varlen_bench.beam.export import END, export_ctranslate2

    folder = scratch / f"ctranslate2-{precision}"
    export_ctranslate2(checkpoint, folder, precision)
    translator: Any = ctranslate2.Translator(
        str(folder),
        device="cpu",
        compute_type="int8" if precision == "int8" else "float32",
        inter_threads=1,
        intra_threads=threads,
    )
    (end,) = _special(checkpoint, "eos_token_id")

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


def _special(checkpoint: Path, *names: str) -> list[int]:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return [int(config[name]) for name in names]
