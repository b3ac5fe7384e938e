"""The models of the server in the libraries that are installed: sentence-transformers, transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch

from varlen_bench.gpu_report.figures import Figure, figure
from varlen_bench.gpu_report.judge import load
from varlen_bench.gpu_report.served_models import BIG, Served
from varlen_bench.harness.summary import Spread
from varlen_bench.workloads import WORDS

# Texts of an encoder, tokens of an answer, prompts: on a GPU, and in a rehearsal.
_TEXTS, _NEW_TOKENS, _COUNTS = (2048, 16), (128, 4), ((64, 8, 1), (2,))
_PROMPT_TOKENS = 128
_LONE_PASSES = 20
# A peer with less time does not start: its model has to be loaded.
_LEAST_SECONDS = 5.0


def measure_peers(served: Served) -> Iterator[Figure]:
    """Yield the speed of peers; the note of one that fails is its figure's name."""
    peers: list[tuple[str, Callable[[Served, str], Iterator[Figure]]]] = [
        ("minilm", _sentence_transformers),
        ("gpt2_small", _generate),
        ("llama_1b", _generate),
        (BIG, _search),
        ("bert_base", _sentence_transformers),
    ]
    for name, measure in peers:
        if not served.budget.allows(_LEAST_SECONDS):
            print(served.budget.spent_note)
            return
        try:
            yield from measure(served, name)
        except Exception as error:  # other peers may run
            yield figure("peer", name, f"failed: {error!r}"[:200], None, "")


def _sentence_transformers(served: Served, name: str) -> Iterator[Figure]:
    from sentence_transformers import SentenceTransformer

    row = partial(figure, "peer", f"{name} sentence-transformers")
    model = SentenceTransformer(str(served.repository / name / "1"), device=served.device)
    model.to(torch.float32 if served.is_small else torch.bfloat16)
    numbers = random.Random(0)
    texts = [
        " ".join(numbers.choices(WORDS, k=numbers.randint(5, 240)))
        for _ in range(_TEXTS[served.is_small])
    ]
    for size in (64, 256):
        model.encode(texts[:size], batch_size=size)
        began = perf_counter()
        model.encode(texts, batch_size=size)
        # it sorts the whole list by length
        yield row(f"batches of {size}", len(texts) / (perf_counter() - began), "texts/s")
    alone = []
    for text in texts[:_LONE_PASSES]:
        began = perf_counter()
        model.encode([text])
        alone.append(1000 * (perf_counter() - began))
    yield row("one text", Spread.of(alone).median, "ms")


def _generate(served: Served, name: str) -> Iterator[Figure]:
    model = load("AutoModelForCausalLM", served.repository / name / "1", served, _dtype(served))
    for count in _COUNTS[served.is_small]:
        yield from _static(served, name, model, count)
    if not served.is_small:
        # it takes the memory that is free
        yield from _continuous(served, name, model, _COUNTS[0][0])


def _search(served: Served, name: str) -> Iterator[Figure]:
    model = load("AutoModelForSeq2SeqLM", served.repository / name / "1", served, _dtype(served))
    yield from _static(served, name, model, 2 if served.is_small else 16, num_beams=4)


def _dtype(served: Served) -> str:
    return "float32" if served.is_small else "bfloat16"


@torch.inference_mode()
def _static(served: Served, name: str, model: Any, count: int, **options: Any) -> Iterator[Figure]:
    """Yield one batch of `generate`, whose prompts have one length."""
    new = _NEW_TOKENS[served.is_small]
    ids = torch.randint(2, 240, (count, _PROMPT_TOKENS), device=served.device)
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    model.generate(ids, max_new_tokens=2, **given)
    began = perf_counter()
    found = model.generate(ids, min_new_tokens=new, max_new_tokens=new, **given)
    # the tokens on the host are the end of the work
    found.tolist()
    spent = perf_counter() - began
    yield figure("peer", f"{name} generate x{count}", "tokens/s", count * new / spent, "1/s")


def _continuous(served: Served, name: str, model: Any, count: int) -> Iterator[Figure]:
    """Yield transformers' continuous batching."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=_NEW_TOKENS[served.is_small],
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        use_cuda_graph=True,
    )
    prompts = torch.randint(2, 240, (count, _PROMPT_TOKENS)).tolist()
    model.generate_batch(inputs=prompts[:2], generation_config=config)
    began = perf_counter()
    found = model.generate_batch(inputs=prompts, generation_config=config)
    spent = perf_counter() - began
    tokens = sum(len(each.generated_tokens) for each in found.values())
    yield figure("peer", f"{name} continuous batching x{count}", "tokens/s", tokens / spent, "1/s")
