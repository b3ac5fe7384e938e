"""Engines whose caller runs their steps: OpenVINO GenAI, onnxruntime-genai and vLLM."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np

from varlen_bench.compare.passes import Ids, OnTokens, Submit
from varlen_bench.peers.engines import Cores, Precision

# Memory for keys and values, in GiB.
_CACHE_GIB = 2
# Gives a request to the engine: its number, prompt and length of its answer.
Add: TypeAlias = Callable[[int, Ids, int], None]
# Runs one step: the number of each request with new tokens, these tokens, and whether they are its last.
Step: TypeAlias = Callable[[], Iterable[tuple[int, Ids, bool]]]


@dataclass(eq=False, slots=True)
class _Request:
    prompt: Ids
    limit: int
    on_tokens: OnTokens
    done: Future[None] = field(default_factory=Future)


def step_in_thread(load: Callable[[], tuple[Add, Step]]) -> Submit:
    """Return a function that starts one request; a thread runs steps while requests run.

    Tokens have the moment when their step ended. An error fails the requests that run, and all later ones.

    Args:
        load: loads the engine, in the thread that runs its steps: threads of OpenMP belong to the thread that calls.
    """
    loaded: Future[None] = Future()
    arrived: SimpleQueue[_Request] = SimpleQueue()
    running: dict[int, _Request] = {}
    numbers = count()

    def run_step(add: Add, step: Step) -> None:
        # without requests, wait for one
        while not running or not arrived.empty():
            request = arrived.get()
            number = next(numbers)
            running[number] = request
            add(number, request.prompt, request.limit)
        delivered = list(step())
        moment = time.perf_counter()
        for number, tokens, is_last in delivered:
            running[number].on_tokens(0, tokens, moment)
            if is_last:
                running.pop(number).done.set_result(None)

    def run() -> None:
        try:
            add, step = load()
        except BaseException as error:  # engines exit the program too
            loaded.set_exception(error)
            return
        loaded.set_result(None)
        try:
            while True:
                run_step(add, step)
        except Exception as error:  # whatever an engine raises
            for request in running.values():
                request.done.set_exception(error)
            # later ones would wait for ever
            while True:
                arrived.get().done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    loaded.result()

    def submit(prompt: Ids, limit: int, on_tokens: OnTokens) -> Future[None]:
        request = _Request(prompt, limit, on_tokens)
        arrived.put(request)
        return request.done

    return submit


def load_openvino(
    checkpoint: Path, precision: Precision, cores: Cores, *, running: int, step_tokens: int
) -> tuple[Add, Step]:
    """Return the functions of a ContinuousBatchingPipeline that add a request and run a step.

    int8 and int4 are the bits of weights, and products have the type that OpenVINO chooses. Keys and values are 8-bit,
    its default.
    """
    import openvino
    import openvino_genai

    limits = openvino_genai.SchedulerConfig()
    limits.cache_size = _CACHE_GIB
    limits.max_num_seqs = running
    limits.max_num_batched_tokens = step_tokens
    limits.dynamic_split_fuse = True
    limits.enable_prefix_caching = False
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": cores.total}
    if precision not in ("int8", "int4"):
        options["INFERENCE_PRECISION_HINT"] = "bf16" if precision == "bf16" else "f32"
    with TemporaryDirectory(prefix="varlen-bench-") as folder:
        weights = precision if precision in ("int8", "int4") else "fp32"
        _export_openvino(checkpoint, folder, weights)
        engine: Any = openvino_genai.ContinuousBatchingPipeline(folder, limits, "CPU", options)
    handles: dict[int, Any] = {}

    def add(number: int, prompt: Ids, limit: int) -> None:
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        options = openvino_genai.GenerationConfig(
            max_new_tokens=limit, ignore_eos=True, do_sample=False
        )
        handles[number] = engine.add_request(number, ids, options)

    def step() -> Iterator[tuple[int, Ids, bool]]:
        engine.step()
        for number, handle in list(handles.items()):
            is_last = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            tokens: list[int] = []
            while handle.can_read():
                (output,) = handle.read().values()
                tokens += output.generated_ids
            if is_last:
                del handles[number]
            yield number, tokens, is_last

    return add, step


def _export_openvino(checkpoint: Path, folder: str, weights: str) -> None:
    """Write model and tokenizer in OpenVINO's format, in a process that ends with its memory.

    Args:
        weights: format of the weights, "fp32", "int8" or "int4".
    """
    program = Path(sys.executable).with_name("optimum-cli")
    command = [str(program), "export", "openvino", "--model", str(checkpoint)]
    command += ["--task", "text-generation-with-past", "--weight-format", weights, folder]
    subprocess.run(command, check=True)


def load_onnxruntime_genai(
    checkpoint: Path, precision: Precision, cores: Cores, *, running: int, step_tokens: int
) -> tuple[Add, Step]:
    """Return the functions of onnxruntime-genai's engine that add a request and run a step.

    int8 and int4 are weights with a scale for each block of 32. Paged attention, and a limit of tokens for a step, are
    for GPUs only.
    """
    del step_tokens
    import onnxruntime_genai

    og: Any = onnxruntime_genai
    with TemporaryDirectory(prefix="varlen-bench-") as folder:
        _export_onnx(checkpoint, Path(folder), precision, running, cores.total)
        engine = og.Engine(og.Model(folder))
    # a token and an end for each request
    events = engine.create_event_buffer(2 * running)
    numbers: dict[Any, int] = {}

    def add(number: int, prompt: Ids, limit: int) -> None:
        request = engine.create_request()
        numbers[request] = number
        options = og.TurnOptions(request)
        options.set_do_sample(False)
        options.set_max_generated_tokens(limit)
        # it never chooses the end token before
        options.set_min_generated_tokens(limit)
        request.begin_turn(np.array(prompt, dtype=np.int32), options)

    def step() -> Iterator[tuple[int, Ids, bool]]:
        for event in engine.run(events):
            if event.finish_reason == og.FinishReason.FAILED:
                raise RuntimeError(f"a request failed: {event.error_code}")
            is_last = event.finish_reason != og.FinishReason.NONE
            yield numbers[event.request], [event.token], is_last
            if is_last:
                del numbers[event.request]
                event.request.close()

    return add, step


def _export_onnx(
    checkpoint: Path,
    folder: Path,
    precision: Precision,
    running: int,
    threads: int,
) -> None:
    """Write model and settings in the format of onnxruntime-genai."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(checkpoint)]
    command += ["-o", str(folder), "-p", precision, "-e", "cpu", "-c", str(folder / "cache")]
    subprocess.run(command, check=True)
    path = folder / "genai_config.json"
    settings = json.loads(path.read_text())
    settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    settings["engine"] = {"static_batching": {"max_batch_size": running}}
    path.write_text(json.dumps(settings))


def load_vllm(
    checkpoint: Path, precision: Precision, cores: Cores, *, running: int, step_tokens: int
) -> tuple[Add, Step]:
    """Return the functions of vLLM's engine that add a request and run a step.

    It runs in this process.
    """
    # Intel's OpenMP, as vLLM's manual advises: loaded before the one of torch, it replaces it
    ctypes.CDLL(str(Path(sys.prefix, "lib", "libiomp5.so")), ctypes.RTLD_GLOBAL)
    # read when vllm is imported
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": _cpus(cores),
    }
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine: Any = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(checkpoint),
            dtype="bfloat16" if precision == "bf16" else "float32",
            max_num_seqs=running,
            max_num_batched_tokens=step_tokens,
            # random prompts share nothing
            enable_prefix_caching=False,
            generation_config="vllm",
            disable_log_stats=True,
        )
    )

    def add(number: int, prompt: Ids, limit: int) -> None:
        options = SamplingParams(
            temperature=0.0,
            max_tokens=limit,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, options)

    def step() -> Iterator[tuple[int, Ids, bool]]:
        for output in engine.step():
            yield int(output.request_id), output.outputs[0].token_ids, output.finished

    return add, step


def _cpus(cores: Cores) -> str:
    """Return the numbers of the CPUs that an engine uses, comma-separated."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[: cores.total]))
