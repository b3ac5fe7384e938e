"""Compares answers of a server with transformers in fp32 on the same GPU.

A model in bf16 may choose another token where two are nearly equal, so a token is right if its logit is nearly the
best one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from varlen_bench.gpu_report.figures import MUST_BE_0, Figure, figure
from varlen_bench.gpu_report.served_models import Served, Task, served_models
from varlen_bench.harness.accuracy import EQUAL_QUALITY

Kept: TypeAlias = dict[str, Any]
# A chosen token's logit is at most this far below the best one, in standard deviations of the logits; by dtype.
_GAP = {"bf16": 0.25, "fp32": 0.01}
# So much better may the score of transformers' search be: a search in bf16 may take another path.
_BETTER = {"bf16": 0.15, "fp32": 0.001}


def judge(served: Served) -> Iterator[Figure]:
    """Yield how far each answer is from transformers', and how many are wrong.

    Raises:
        OSError: the server has kept no answers.
    """
    kept = json.loads(served.answers.read_text(encoding="utf-8"))
    yield figure("judge", "all models", "models without answers", int(not kept), MUST_BE_0)
    models = served_models(served.device)
    # a product in fp32 is one
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, answers in kept.items():
        compare = _COMPARISONS[models[name].task]
        with torch.inference_mode():
            yield from compare(served, name, answers)


def load(kind: str, checkpoint: Path, served: Served, dtype: str = "float32") -> Any:
    """Return transformers' model of a checkpoint on the device."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = getattr(transformers, kind).from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    return model.eval().to(served.device)


def _encoder(served: Served, name: str, kept: Kept) -> Iterator[Figure]:
    from transformers import AutoTokenizer

    row = partial(figure, "judge", name)
    checkpoint = served.repository / name / "1"
    model, tokenizer = (
        load("AutoModel", checkpoint, served),
        AutoTokenizer.from_pretrained(checkpoint),
    )
    means = []
    for text in kept["inputs"]:
        batch = {
            key: value.to(served.device)
            for key, value in tokenizer(text, return_tensors="pt").items()
        }
        means.append(model(**batch).last_hidden_state[0].mean(0))
    expected = torch.nn.functional.normalize(torch.stack(means), dim=1).cpu()
    others = expected @ expected.T - 2 * torch.eye(len(expected))
    yield row("largest cosine of two texts", float(others.max()), "1 is equal")
    wrong = 0
    for form in ("answers", "alone"):
        found = torch.nn.functional.normalize(torch.tensor(kept[form]), dim=1)
        cosines = (found * expected[: len(found)]).sum(1)
        # not "<": the cosine of a zero vector is no number
        wrong += int((~(cosines > EQUAL_QUALITY)).sum())
        yield row(f"least cosine, {form}", float(cosines.min()), "1 is equal")
    yield row("wrong vectors", wrong, MUST_BE_0)


def _decoder(served: Served, name: str, kept: Kept) -> Iterator[Figure]:
    row = partial(figure, "judge", name)
    model = load("AutoModelForCausalLM", served.repository / name / "1", served)
    best, worst, count = 0, 0.0, 0
    for prompt, answer in zip(kept["inputs"], kept["answers"], strict=True):
        # each token after the tokens that the server has chosen
        ids = torch.tensor([prompt + answer], device=served.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        gaps = logits.max(1).values - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        best, count = best + int((gaps == 0).sum()), count + len(answer)
        worst = max(worst, float(gaps.max() / logits.std()))
    yield row("tokens that are the best in fp32", best / count, "1 is all")
    yield row("largest gap to the best logit", worst, "standard deviations")
    # not ">": it may be no number
    yield row("wrong tokens", int(not worst <= _GAP[served.dtype]), MUST_BE_0)
    drawn = sum(one != other for one, other in zip(*kept["drawn"], strict=True))
    yield row("drawn tokens that differ with one seed", drawn, MUST_BE_0)


def _translator(served: Served, name: str, kept: Kept) -> Iterator[Figure]:
    row = partial(figure, "judge", name)
    model = load("AutoModelForSeq2SeqLM", served.repository / name / "1", served)
    equal, better = 0, 0.0
    for source, (answer, score) in zip(kept["inputs"], kept["answers"], strict=True):
        found = model.generate(
            torch.tensor([source], device=served.device),
            num_beams=4,
            max_new_tokens=len(answer),
            return_dict_in_generate=True,
            output_scores=True,
        )
        equal += found.sequences[0, 1:].tolist() == answer
        better = max(better, float(found.sequences_scores[0]) - score)
    yield row("equal translations", equal / len(kept["inputs"]), "1 is all")
    yield row("transformers' score, better by up to", better, "log probability")
    yield row("wrong translations", int(not better <= _BETTER[served.dtype]), MUST_BE_0)


_COMPARISONS: dict[Task, Callable[[Served, str, Kept], Iterator[Figure]]] = {
    "embed": _encoder,
    "generate": _decoder,
    "translate": _translator,
}
