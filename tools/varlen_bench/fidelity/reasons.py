"""Why an engine's answer differs: the changes with which the original answers the same.

One or two changes are tried, with the original libraries: a reason is computed, not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from varlen_bench.fidelity.engines import generated, logits_of
from varlen_bench.fidelity.judge import judge

LENGTH, PROMPT, DEFAULT_PROMPT = (
    "texts are cut at another length",
    "the prompt is left out",
    "the default prompt is left out",
)
POOLING, DENSE, NORMALIZE = (
    "another pooling",
    "Dense modules are left out",
    "vectors have another length",
)
TYPES, ACTIVATION, SPECIAL = (
    "token types are left out",
    "probabilities, not logits",
    "special tokens are left out",
)
LOWER, STRIP = "texts become lower case first", "white space at the ends of texts is removed first"
NO_REASON = "no change that was tried explains it"
REASONS = (
    *(LENGTH, PROMPT, DEFAULT_PROMPT, POOLING, DENSE, NORMALIZE, TYPES, ACTIVATION, SPECIAL, LOWER),
    *(STRIP, NO_REASON),
)
_LENGTHS = range(2, 65)
_MOST_CHANGES = 2
# Changes by name, and what the original answers with them.
Variant: TypeAlias = tuple[list[str], Any]
Variants: TypeAlias = Callable[[Mapping[str, Any]], Iterator[Variant]]


def explain(
    folder: Path, task: str, requests: Mapping[str, Any], answers: Mapping[str, Any]
) -> dict[str, str]:
    """Return the reason of each kind of input whose answers differ from the original's.

    Args:
        folder: the checkpoint.
        requests, answers: `inputs` and perhaps `prompt`, and `rows`, by kind of input.
    """
    makers = {"embed": _of_vectors, "sparse_embed": _of_terms, "generate": _of_tokens}
    variants = makers.get(task, _of_logits)(folder, task)
    return {
        kind: _first(task, variants(requests[kind]), answer) for kind, answer in answers.items()
    }


def _first(task: str, variants: Iterator[Variant], answer: Mapping[str, Any]) -> str:
    for changes, rows in variants:
        with suppress(ValueError):
            if judge(task, {"rows": rows}, answer).result == "equal":
                return " and ".join(changes)
    return NO_REASON


def _few(*parts: Sequence[tuple[str, Any]]) -> list[tuple[list[str], tuple[Any, ...]]]:
    """Return combinations of at most two changes, single changes first."""
    found = []
    for each in product(*parts):
        changes = [name for name, _ in each if name]
        if 0 < len(changes) <= _MOST_CHANGES:
            found.append((changes, tuple(value for _, value in each)))
    return sorted(found, key=lambda each: len(each[0]))


def _lengths(own: int) -> list[tuple[str, int]]:
    return [("", own), *((LENGTH, each) for each in reversed(_LENGTHS) if each != own)]


def _of_vectors(folder: Path, _: str) -> Variants:
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    own = int(model.max_seq_length or _LENGTHS[-1])
    after = [module for name, module in model.named_children() if name not in ("0", "1")]
    dense = [module for module in after if type(module).__name__ == "Dense"]
    is_normal = any(type(module).__name__ == "Normalize" for module in after)
    modes = [("", str(model[1].pooling_mode))]
    modes += [
        (POOLING, mode) for mode in ("cls", "mean", "max", "lasttoken") if mode != modes[0][1]
    ]

    def variants(request: Mapping[str, Any]) -> Iterator[Variant]:
        name = request.get("prompt")
        left_out = PROMPT if name else DEFAULT_PROMPT
        prompts = [("", None), *([(left_out, "")] if name or model.default_prompt_name else [])]
        kept: dict[tuple[int, str, Any], Any] = {}
        for changes, (length, edit, prompt, mode, has_dense, is_unit) in _few(
            _lengths(own),
            [("", ""), (LOWER, LOWER), (STRIP, STRIP)],
            prompts,
            modes,
            [("", True), *([(DENSE, False)] if dense else [])],
            [("", is_normal), (NORMALIZE, not is_normal)],
        ):
            key = length, edit, prompt
            if key not in kept:
                model.max_seq_length = length
                kept[key] = None
                texts = [_edited(text, edit) for text in request["inputs"]]
                # more tokens than positions
                with suppress(IndexError, RuntimeError):
                    kept[key] = model.encode(
                        texts,
                        output_value=None,
                        prompt_name=None if prompt == "" else name,
                        prompt=prompt,
                    )
            features = kept[key]
            if features is not None:
                rows = [_pooled(each, mode) for each in features]
                for module in dense if has_dense else []:
                    rows = [
                        module({"sentence_embedding": row})["sentence_embedding"] for row in rows
                    ]
                if is_unit:
                    rows = [torch.nn.functional.normalize(row, dim=-1) for row in rows]
                yield changes, [row.tolist() for row in rows]

    return variants


def _edited(text: Any, edit: str) -> Any:
    """Return a text, or each text of a pair, after a change."""
    if isinstance(text, list):
        return [_edited(part, edit) for part in text]
    if edit == LOWER:
        return text.lower()
    return text.strip() if edit == STRIP else text


def _pooled(features: Mapping[str, Any], mode: str) -> Any:
    import torch

    mask = features["attention_mask"].bool()
    hidden = features["token_embeddings"][mask]
    if mode == "mean":
        return hidden.mean(dim=0)
    if mode == "weightedmean":
        weights = torch.arange(1, len(hidden) + 1)[:, None] / (len(hidden) * (len(hidden) + 1) / 2)
        return (hidden * weights).sum(dim=0)
    if mode == "max":
        return hidden.max(dim=0).values
    return hidden[-1 if mode == "lasttoken" else 0]


def _of_terms(folder: Path, _: str) -> Variants:
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(folder), device="cpu")
    own = int(model.max_seq_length or _LENGTHS[-1])

    def variants(request: Mapping[str, Any]) -> Iterator[Variant]:
        for changes, (length, edit) in _few(_lengths(own), [("", ""), (STRIP, STRIP)]):
            model.max_seq_length = length
            texts = [_edited(text, edit) for text in request["inputs"]]
            yield changes, model.encode(texts, convert_to_sparse_tensor=False)

    return variants


def _of_logits(folder: Path, task: str) -> Variants:
    import torch
    import transformers

    head = "TokenClassification" if task == "token_classify" else "SequenceClassification"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    loader = getattr(transformers, f"AutoModelFor{head}")
    network = loader.from_pretrained(folder, dtype=torch.float32).eval()
    own = min(int(tokenizer.model_max_length), _LENGTHS[-1])
    activations = [
        ("", lambda row: row),
        (ACTIVATION, torch.sigmoid),
        (ACTIVATION, lambda row: torch.softmax(row, dim=-1)),
    ]
    edits = [("", ""), (STRIP, STRIP)]
    kinds = [("", False)]
    if "token_type_ids" in tokenizer.model_input_names:
        kinds.append((TYPES, True))

    @torch.inference_mode()
    def answers(text: Any, length: int, has_no_types: bool, is_bare: bool) -> Any:
        def encode(*parts: Any, **settings: Any) -> Any:
            encoded = tokenizer(*parts, **settings)
            if has_no_types:
                encoded["token_type_ids"] = torch.zeros_like(encoded["token_type_ids"])
            return encoded

        cut = {"truncation": True, "max_length": length}
        return logits_of(encode, network, text, add_special_tokens=not is_bare, **cut)

    def variants(request: Mapping[str, Any]) -> Iterator[Variant]:
        kept: dict[tuple[int, bool, bool, str], Any] = {}
        for changes, (length, has_no_types, is_bare, edit, activation) in _few(
            _lengths(own), kinds, [("", False), (SPECIAL, True)], edits, activations
        ):
            key = length, has_no_types, is_bare, edit
            if key not in kept:
                kept[key] = None
                with suppress(Exception):
                    kept[key] = [
                        answers(_edited(each, edit), *key[:3]) for each in request["inputs"]
                    ]
            if kept[key] is not None:
                yield changes, [activation(row).tolist() for row in kept[key]]

    return variants


def _of_tokens(folder: Path, _: str) -> Variants:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    loader = transformers.AutoModelForCausalLM
    network = loader.from_pretrained(folder, dtype=torch.float32).eval()

    def variants(request: Mapping[str, Any]) -> Iterator[Variant]:
        yield (
            [SPECIAL],
            [
                generated(tokenizer, network, text, add_special_tokens=False)
                for text in request["inputs"]
            ],
        )

    return variants
