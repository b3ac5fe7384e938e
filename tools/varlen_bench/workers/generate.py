"""The process of a system that generates: seven engines, and the systems made of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

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
from varlen_bench.peers.checkpoints import load_generator, save_gptq
from varlen_bench.peers.engines import Cores, Precision, ctranslate2_options
from varlen_bench.peers.trained import DRAFT
from varlen_bench.workers.llamacpp import load_llamacpp
from varlen_bench.workers.stepped import (
    load_onnxruntime_genai,
    load_openvino,
    load_vllm,
    step_in_thread,
)

if TYPE_CHECKING:
    from varlen.config import DType
    from varlen.in_process.generator import Generator
    from varlen.request.request import GeneratedPart

OURS, REQUEST_LEVEL = "varlen-fp32", "varlen-fp32-batches"
DRAFTING, MODEL_DRAFTING = "varlen-fp32-ngram", "varlen-fp32-draft"

SYSTEMS = by_name(
    System(OURS, "varlen", "fp32", "engine"),
    System("varlen-bf16", "varlen", "bf16", "engine"),
    System("varlen-int8", "varlen", "int8", "engine"),
    System("varlen-int4", "varlen", "int4", "engine"),
    System("varlen-gptq-int8", "varlen", "int8", "engine", is_stored=True),
    System("varlen-gptq-int4", "varlen", "int4", "engine", is_stored=True),
    System(DRAFTING, "varlen", "fp32", "engine", drafts="ngram"),
    System("varlen-bf16-ngram", "varlen", "bf16", "engine", drafts="ngram"),
    System(MODEL_DRAFTING, "varlen", "fp32", "engine", drafts="draft_model"),
    System("varlen-bf16-draft", "varlen", "bf16", "engine", drafts="draft_model"),
    System(REQUEST_LEVEL, "varlen", "fp32", "arrival"),
    System("transformers-fp32-arrival", "transformers", "fp32", "arrival"),
    System("transformers-fp32-sorted", "transformers", "fp32", "sorted"),
    System("transformers-fp32-continuous", "transformers", "fp32", "engine"),
    System("ctranslate2-fp32-sorted", "ctranslate2", "fp32", "sorted"),
    System("ctranslate2-fp32-per-core", "ctranslate2", "fp32", "sorted", per_core=True),
    System("ctranslate2-int8-sorted", "ctranslate2", "int8", "sorted"),
    System("ctranslate2-int8-per-core", "ctranslate2", "int8", "sorted", per_core=True),
    System("openvino-fp32", "openvino-genai", "fp32", "engine"),
    System("openvino-bf16", "openvino-genai", "bf16", "engine"),
    System("openvino-int8", "openvino-genai", "int8", "engine"),
    System("openvino-int4", "openvino-genai", "int4", "engine"),
    System("onnxruntime-fp32", "onnxruntime-genai", "fp32", "engine"),
    System("onnxruntime-int8", "onnxruntime-genai", "int8", "engine"),
    System("onnxruntime-int4", "onnxruntime-genai", "int4", "engine"),
    System("llamacpp-fp32", "llamacpp", "fp32", "engine"),
    System("llamacpp-bf16", "llamacpp", "bf16", "engine"),
    System("llamacpp-int8", "llamacpp", "int8", "engine"),
    System("llamacpp-int4", "llamacpp", "int4", "engine"),
    System("vllm-fp32", "vllm", "fp32", "engine"),
    System("vllm-bf16", "vllm", "bf16", "engine"),
)

# Most requests that run at the same time, and most tokens of a step of other engines.
_RUNNING, _STEP_TOKENS = 64, 512


def load_batches(system: System, checkpoint: Path, scratch: Path, cores: Cores) -> RunBatch:
    """Return a function that generates one batch."""
    if system.engine == "varlen":
        return partial(run_together, _load_varlen(checkpoint, system, cores))
    if system.engine == "transformers":
        return _transformers_batches(checkpoint, cores)
    return _ctranslate2_batches(checkpoint, scratch, system.precision, cores)


def load_iteration(system: System, checkpoint: Path, cores: Cores) -> Submit:
    """Return a function that starts one request."""
    if system.engine == "varlen":
        return _load_varlen(checkpoint, system, cores)
    if system.engine == "transformers":
        return _transformers_continuous(checkpoint, cores)
    loaders = {
        "vllm": load_vllm,
        "llamacpp": load_llamacpp,
        "openvino-genai": load_openvino,
        "onnxruntime-genai": load_onnxruntime_genai,
    }
    load = loaders[system.engine]
    limits = {"running": _RUNNING, "step_tokens": _STEP_TOKENS}
    return step_in_thread(partial(load, checkpoint, system.precision, cores, **limits))


def figures(answers: Sequence[Answer], requests: Requests) -> dict[str, Cell]:
    """Return the figures of a pass; times in milliseconds.

    `per_token`: from arrival to the last token, by the number of tokens, as in Orca. `gap`: between two tokens.

    Raises:
        RuntimeError: an answer has not as many tokens as were asked for.
    """
    counts = [len(answer.tokens) for answer in answers]
    if counts != requests.limits:
        raise RuntimeError(f"generated {sum(counts)} tokens; expected {sum(requests.limits)}")
    end = max(answer.moments[-1] for answer in answers)
    first = [answer.moments[0] - answer.due for answer in answers]
    whole = [(answer.moments[-1] - answer.due) / len(answer.tokens) for answer in answers]
    gaps = [after - before for answer in answers for before, after in pairwise(answer.moments)]
    return {
        "tokens_per_second": sum(counts) / (end - answers[0].due),
        **percentiles_ms("ttft", first),
        **percentiles_ms("per_token", whole),
        **percentiles_ms("gap", gaps),
    }


def _load_varlen(checkpoint: Path, system: System, cores: Cores) -> Submit:
    # random prompts share nothing
    settings: dict[str, Any] = {"max_running_sequences": _RUNNING, "prefix_cache": False}
    settings["speculation"] = system.drafts
    if system.drafts == "draft_model":
        settings["draft_model"] = f"../{DRAFT.name}"
    options: dict[str, Any] = {"temperature": system.temperature, "seed": 0, "ignore_eos": True}
    if not system.is_stored:
        return load_varlen(checkpoint, system.precision, cores, settings, **options)
    with TemporaryDirectory(prefix="varlen-gptq-") as scratch:
        folder, bits = Path(scratch, "codes"), int(system.precision.removeprefix("int"))
        save_gptq(checkpoint, folder, bits=bits, group=32)
        return load_varlen(folder, "auto", cores, settings, **options)


def load_varlen(
    checkpoint: Path,
    precision: DType | Precision,
    cores: Cores,
    settings: dict[str, Any],
    *,
    end: int | None = None,
    **options: Any,
) -> VarlenRequests:
    """Return what starts requests of varlen.

    Args:
        end: token that is no part of an answer.
        options: fields of GenerationOptions.
    """
    from varlen.in_process.generator import Generator

    generator = Generator.from_pretrained(
        checkpoint, device="cpu", dtype=cast("DType", precision), threads=cores.total, **settings
    )
    return VarlenRequests(generator, options, end)


@dataclass(frozen=True, slots=True)
class VarlenRequests:
    """Starts requests of varlen: a `Submit`, and a `Counted`."""

    generator: Generator
    options: dict[str, Any]
    end: int | None

    def __call__(self, prompt: Ids, count: int, on_tokens: OnTokens) -> Future[Any]:
        """Start one request."""
        return self.submit_all([prompt], count, on_tokens)

    def submit_all(self, prompts: Sequence[Ids], limit: int, on_tokens: OnTokens) -> Future[Any]:
        """Start requests that have one limit."""
        from varlen.request.generation import GenerationOptions

        def on_part(row: int, part: GeneratedPart) -> None:
            moment, tokens = time.perf_counter(), part.token_ids
            on_tokens(
                row, tokens if self.end is None else [x for x in tokens if x != self.end], moment
            )

        options = GenerationOptions(max_tokens=limit, **self.options)
        return self.generator.submit_all(prompts, options, on_part)

    def counts(self) -> dict[str, int]:
        """Return the drafted tokens so far, and those that were chosen."""
        counts = self.generator.snapshot()
        return {
            "drafted_tokens": counts.drafted_tokens,
            "accepted_tokens": counts.accepted_tokens,
        }


def _load_transformers(checkpoint: Path, cores: Cores) -> Any:
    model = load_generator("AutoModelForCausalLM", checkpoint, cores.total)
    # no token ends an answer
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _transformers_batches(checkpoint: Path, cores: Cores) -> RunBatch:
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    model = _load_transformers(checkpoint, cores)

    class Lengths(StoppingCriteria):  # type: ignore[misc]
        """Reports the token of each step; a row is done at its own length."""

        def __init__(self, counts: Sequence[int], on_tokens: OnTokens) -> None:
            self.counts, self.on_tokens, self.step = torch.tensor(counts), on_tokens, 0

        def __call__(self, input_ids: Any, _: Any, **__: Any) -> Any:
            moment = time.perf_counter()
            self.step += 1
            for row, token in enumerate(input_ids[:, -1].tolist()):
                if self.step <= self.counts[row]:
                    self.on_tokens(row, [token], moment)
            return self.step >= self.counts

    @torch.inference_mode()
    def run(prompts: Sequence[Ids], counts: Sequence[int], on_tokens: OnTokens) -> None:
        longest = max(map(len, prompts))
        # padding on the left, as generation needs it
        ids = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(counts),
            stopping_criteria=StoppingCriteriaList([Lengths(counts, on_tokens)]),
        )

    return run


def _transformers_continuous(checkpoint: Path, cores: Cores) -> Submit:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _load_transformers(checkpoint, cores)
    longest = model.config.max_position_embeddings
    options = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(
        # the largest number of tokens that run together, as in varlen
        num_blocks=max(8, _RUNNING * longest // 256),
        max_batch_tokens=_STEP_TOKENS,
        max_requests_per_batch=_RUNNING,
        allow_block_sharing=False,
    )
    manager = model.init_continuous_batching(options, pages)
    manager.start()
    started: dict[str, tuple[OnTokens, Future[None]]] = {}
    is_started = threading.Condition()

    def deliver() -> None:
        while True:
            result = manager.get_result(timeout=1.0)
            if result is None or not result.is_finished():
                continue
            with is_started:
                while result.request_id not in started:
                    is_started.wait()
                on_tokens, done = started.pop(result.request_id)
            if result.error:
                done.set_exception(RuntimeError(result.error))
                continue
            for token, moment in zip(result.generated_tokens, result.timestamps, strict=True):
                on_tokens(0, [token], moment)
            done.set_result(None)

    threading.Thread(target=deliver, daemon=True).start()

    def submit(prompt: Ids, count: int, on_tokens: OnTokens) -> Future[None]:
        done: Future[None] = Future()
        name = manager.add_request(list(prompt), max_new_tokens=count, record_timestamps=True)
        with is_started:
            started[name] = on_tokens, done
            is_started.notify()
        return done

    return submit


def _ctranslate2_batches(
    checkpoint: Path, scratch: Path, precision: Precision, cores: Cores
) -> RunBatch:
    import ctranslate2
    from tokenizers import Tokenizer

    from varlen_bench.peers.exports import convert_ctranslate2

    folder = scratch / f"ctranslate2-{precision}"
    convert_ctranslate2(checkpoint, folder, precision)
    generator: Any = ctranslate2.Generator(str(folder), **ctranslate2_options(precision, cores))
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def run(prompts: Sequence[Ids], counts: Sequence[int], on_tokens: OnTokens) -> None:
        left = list(counts)

        def on_step(step: Any) -> bool:
            row: int = step.batch_id
            left[row] -= 1
            if left[row] >= 0:
                on_tokens(row, [step.token_id], time.perf_counter())
            return left[row] <= 0

        generator.generate_batch(
            [[tokenizer.id_to_token(token) for token in ids] for ids in prompts],
            beam_size=1,
            include_prompt_in_result=False,
            # the end token is never chosen
            min_length=max(counts),
            max_length=max(counts),
            callback=on_step,
        )

    return run


start = starter(load_iteration, load_batches, figures, "tokens")

if __name__ == "__main__":
    run_worker(start)
