"""Three engines behind two functions: batches, or requests that come at any time.

A process imports only the libraries of its engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from varlen_bench.harness.generating import Precision, System

Ids: TypeAlias = Sequence[int]
# Gets the number of a prompt, a token, and the moment of it by time.perf_counter.
OnToken: TypeAlias = Callable[[int, int, float], None]
# Generates a batch to its end: prompts, and the number of tokens of each.
RunBatch: TypeAlias = Callable[[Sequence[Ids], Sequence[int], OnToken], None]
# Starts one request; the future is done after its last token.
Submit: TypeAlias = Callable[[Ids, int, OnToken], "Future[None]"]

_RUNNING = 64


def load_batches(system: System, checkpoint: Path, scratch: Path, *, threads: int) -> RunBatch:
    """Return a function that generates one batch."""
    if system.engine == "varlen":
        return partial(_run_together, _varlen(checkpoint, system.precision, threads))
    if system.engine == "transformers":
        return _transformers_batches(checkpoint, threads)
    return _ctranslate2_batches(checkpoint, scratch, system.precision, threads)


def load_iteration(system: System, checkpoint: Path, *, threads: int) -> Submit:
    """Return a function that starts one request."""
    if system.engine == "varlen":
        return _varlen(checkpoint, system.precision, threads)
    return _transformers_continuous(checkpoint, threads)


def _varlen(checkpoint: Path, precision: Precision, threads: int) -> Submit:
    from varlen.generator import Generator
    from varlen.request.generation import GenerationOptions
    from varlen.request.request import GeneratedPart

    generator = Generator.from_pretrained(
        checkpoint,
        device="cpu",
        dtype="bf16" if precision == "bf16" else "fp32",
        threads=threads,
        max_running_sequences=_RUNNING,
        # random prompts share nothing
        prefix_cache=False,
    )

    def submit(prompt: Ids, count: int, on_token: OnToken) -> Future[None]:
        def on_part(_: int, part: GeneratedPart) -> None:
            moment = time.perf_counter()
            for token in part.token_ids:
                on_token(0, token, moment)

        options = GenerationOptions(max_tokens=count, temperature=0.0, ignore_eos=True)
        done: Future[None] = Future()
        answer = generator.submit(prompt, options, on_part)
        answer.add_done_callback(partial(_finish, done))
        return done

    return submit


def _finish(done: Future[None], answer: Future[Any]) -> None:
    error = answer.exception()
    done.set_exception(error) if error else done.set_result(None)


def _run_together(
    submit: Submit, prompts: Sequence[Ids], counts: Sequence[int], on_token: OnToken
) -> None:
    """Submit a batch and wait for its last request: batches at the level of requests."""

    def token_of(row: int) -> OnToken:
        return lambda _, token, moment: on_token(row, token, moment)

    pairs = zip(prompts, counts, strict=True)
    running = [submit(ids, count, token_of(row)) for row, (ids, count) in enumerate(pairs)]
    wait(running)
    for each in running:
        each.result()


def _load_transformers(checkpoint: Path, threads: int, attention: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation=attention
    )
    # no token ends an answer
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def _transformers_batches(checkpoint: Path, threads: int) -> RunBatch:
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    model = _load_transformers(checkpoint, threads, "sdpa")

    class Lengths(StoppingCriteria):  # type: ignore[misc]
        """Reports the token of each step; a row is done at its own length."""

        def __init__(self, counts: Sequence[int], on_token: OnToken) -> None:
            self.counts, self.on_token, self.step = torch.tensor(counts), on_token, 0

        def __call__(self, input_ids: Any, _: Any, **__: Any) -> Any:
            moment = time.perf_counter()
            self.step += 1
            for row, token in enumerate(input_ids[:, -1].tolist()):
                if self.step <= self.counts[row]:
                    self.on_token(row, token, moment)
            return self.step >= self.counts

    @torch.inference_mode()
    def run(prompts: Sequence[Ids], counts: Sequence[int], on_token: OnToken) -> None:
        longest = max(map(len, prompts))
        # padding on the left, as generation needs it
        ids = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(counts),
            stopping_criteria=StoppingCriteriaList([Lengths(counts, on_token)]),
        )

    return run


def _transformers_continuous(checkpoint: Path, threads: int) -> Submit:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _load_transformers(checkpoint, threads, "sdpa")
    longest = model.config.max_position_embeddings
    options = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(
        # the largest number of tokens that run together, as in varlen
        num_blocks=max(8, _RUNNING * longest // 256),
        max_batch_tokens=512,
        max_requests_per_batch=_RUNNING,
        allow_block_sharing=False,
    )
    manager = model.init_continuous_batching(options, pages)
    manager.start()
    started: dict[str, tuple[OnToken, Future[None]]] = {}
    is_started = threading.Condition()

    def deliver() -> None:
        while True:
            result = manager.get_result(timeout=1.0)
            if result is None or not result.is_finished():
                continue
            with is_started:
                while result.request_id not in started:
                    is_started.wait()
                on_token, done = started.pop(result.request_id)
            if result.error:
                done.set_exception(RuntimeError(result.error))
                continue
            for token, moment in zip(result.generated_tokens, result.timestamps, strict=True):
                on_token(0, token, moment)
            done.set_result(None)

    threading.Thread(target=deliver, daemon=True).start()

    def submit(prompt: Ids, count: int, on_token: OnToken) -> Future[None]:
        done: Future[None] = Future()
        name = manager.add_request(list(prompt), max_new_tokens=count, record_timestamps=True)
        with is_started:
            started[name] = on_token, done
            is_started.notify()
        return done

    return submit


def _ctranslate2_batches(
    checkpoint: Path, scratch: Path, precision: Precision, threads: int
) -> RunBatch:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer

    folder = scratch / f"ctranslate2-{precision}"
    quantization = "int8" if precision == "int8" else None
    TransformersConverter(str(checkpoint)).convert(str(folder), quantization=quantization)
    generator: Any = ctranslate2.Generator(
        str(folder),
        device="cpu",
        compute_type="int8" if precision == "int8" else "float32",
        inter_threads=1,
        intra_threads=threads,
    )
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def run(prompts: Sequence[Ids], counts: Sequence[int], on_token: OnToken) -> None:
        left = list(counts)

        def on_step(step: Any) -> bool:
            row: int = step.batch_id
            left[row] -= 1
            if left[row] >= 0:
                on_token(row, step.token_id, time.perf_counter())
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
