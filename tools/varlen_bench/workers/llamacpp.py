"""llama.cpp in its environment: its library runs batches, and this module batches requests in steps.

A step has a token of each running sequence and then tokens of prompts, as llama.cpp's server makes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from varlen_bench.compare.passes import Ids
from varlen_bench.peers.checkpoints import config_field
from varlen_bench.peers.engines import Cores, Precision
from varlen_bench.peers.gguf_files import write_gguf
from varlen_bench.workers.stepped import Add, Step


@dataclass(eq=False, slots=True)
class _Sequence:
    """A request that runs."""

    number: int
    # its sequence in the KV cache
    place: int
    # tokens that are not in the cache yet
    waiting: list[int]
    # tokens of the answer that are missing
    left: int
    cached: int = 0


def load_llamacpp(
    checkpoint: Path, precision: Precision, cores: Cores, *, running: int, step_tokens: int
) -> tuple[Add, Step]:
    """Return the functions of llama.cpp's library that add a request and run a step.

    int8 and int4 are Q8_0 and Q4_0, weights with a scale for each block of 32. Keys and values are fp16, its default.
    """
    import llama_cpp

    llama: Any = llama_cpp
    with TemporaryDirectory(prefix="varlen-bench-") as folder:
        model = _load_model(llama, checkpoint, precision, Path(folder))
    options = llama.llama_context_default_params()
    options.n_ctx = running * config_field(checkpoint, _positions_field(checkpoint))
    options.n_batch = options.n_ubatch = step_tokens
    options.n_seq_max = running
    options.n_threads = options.n_threads_batch = cores.total
    context = llama.llama_init_from_model(model, options)
    if not context:
        raise RuntimeError("llama.cpp has no memory for its KV cache")
    memory = llama.llama_get_memory(context)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(step_tokens, 0, 1)
    places = list(range(running))
    waiting: list[_Sequence] = []
    active: list[_Sequence] = []

    def add(number: int, prompt: Ids, limit: int) -> None:
        waiting.append(_Sequence(number, -1, list(prompt), limit))

    def step() -> Iterator[tuple[int, Ids, bool]]:
        while waiting and places:
            sequence = waiting.pop(0)
            sequence.place = places.pop()
            active.append(sequence)
        outputs = _fill(batch, active, step_tokens)
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama.cpp could not run a batch")
        for sequence, row in outputs:
            logits = llama.llama_get_logits_ith(context, row)
            token = int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())
            sequence.waiting.append(token)
            sequence.left -= 1
            if not sequence.left:
                llama.llama_memory_seq_rm(memory, sequence.place, -1, -1)
                places.append(sequence.place)
                active.remove(sequence)
            yield sequence.number, [token], not sequence.left

    return add, step


def _fill(batch: Any, active: list[_Sequence], most: int) -> list[tuple[_Sequence, int]]:
    """Fill a batch, and return sequences that get a token, with their rows of logits."""
    outputs, row = [], 0
    # sequences that decode have one token
    for sequence in sorted(active, key=lambda each: len(each.waiting) > 1):
        count = min(len(sequence.waiting), most - row)
        for token in sequence.waiting[:count]:
            batch.token[row] = token
            batch.pos[row] = sequence.cached
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence.place
            batch.logits[row] = 0
            sequence.cached += 1
            row += 1
        del sequence.waiting[:count]
        if count and not sequence.waiting:
            batch.logits[row - 1] = 1
            outputs.append((sequence, row - 1))
    batch.n_tokens = row
    return outputs


def _load_model(llama: Any, checkpoint: Path, precision: Precision, folder: Path) -> Any:
    """Return a model with weights of this precision; the files are in memory after that."""
    kinds = {
        "bf16": llama.LLAMA_FTYPE_MOSTLY_BF16,
        "int8": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
        "int4": llama.LLAMA_FTYPE_MOSTLY_Q4_0,
    }
    path = folder / "model.gguf"
    write_gguf(checkpoint, path)
    if precision != "fp32":
        source, path = path, folder / f"{precision}.gguf"
        options = llama.llama_model_quantize_default_params()
        options.ftype = kinds[precision]
        paths = str(source).encode(), str(path).encode()
        if llama.llama_model_quantize(*paths, ctypes.byref(options)):
            raise RuntimeError(f"llama.cpp could not write {precision} weights")
    options = llama.llama_model_default_params()
    options.use_mmap = False
    model = llama.llama_model_load_from_file(str(path).encode(), options)
    if not model:
        raise RuntimeError("llama.cpp could not load the model")
    return model


def _positions_field(checkpoint: Path) -> str:
    text = (checkpoint / "config.json").read_text(encoding="utf-8")
    return "n_positions" if '"n_positions"' in text else "max_position_embeddings"
