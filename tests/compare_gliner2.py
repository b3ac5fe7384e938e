"""Compares the library gliner2 with `tests.gliner2_models` and with our encoder, on random models.

`python -m tests.compare_gliner2 FOLDER`, with a Python that has gliner2 and what these tests need (`pip install
--no-deps gliner2`). Prints a line for each model: the largest difference of logits, the number of spans, and how many
of them differ; then the number of answers to schemas, and how many differ.
"""

import sys
import warnings
from pathlib import Path

import torch

from tests.gliner2_models import (
    PARTS,
    SCHEMA,
    Gliner2,
    as_read,
    assert_same,
    clear_of_scores,
    save_gliner2,
    settings_of,
)
from tests.gliner_models import thresholds_of
from varlen import Encoder

TEXTS = [
    "the cat, sat on the river-bank at 5.",
    "a",
    "River, the river! is it 42? the Cat's river_bank - no",
    "0123456789 river, cat " * 6,
    "e@mail.com, +49-30-12345; the (cat) see https://river.example/a?b=c and www.cat.org @cat!",
]
LABELS = [["cat"], ["person name", "the river", "x", "number 42"], ["Email", "phone_number", "cat"]]
LONG = {"max_position_embeddings": 512}
MODELS = {
    "DeBERTa": {},
    "DeBERTa, v2": {"counting_layer": "count_lstm_v2"},
    "DeBERTa, no spans": {"counts": False},
    "DeBERTa, spans of 8": {"max_width": 8},
    "ModernBERT": {"kind": "ModernBertModel", "encoder": LONG},
    "ModernBERT, v2": {
        "kind": "ModernBertModel",
        "counting_layer": "count_lstm_v2",
        "encoder": LONG,
    },
    "BERT": {"kind": "BertModel", "encoder": LONG},
}


def compare(name, folder):
    """Print how far the answers to all texts and labels are apart."""
    from gliner2 import GLiNER2

    library = GLiNER2.from_pretrained(str(folder))
    oracle, furthest, spans, others, seen = Gliner2(folder), 0.0, 0, 0, []
    score = library.compute_span_scores_batched

    def keep(*args, **options):
        result = score(*args, **options)
        seen.extend(result)
        return result

    library.compute_span_scores_batched = keep
    with Encoder.from_pretrained(folder, dtype="fp32", device="cpu", warmup_seconds=0) as encoder:
        for labels in LABELS:
            for text in TEXTS:
                seen.clear()
                library.extract_entities(text, labels)
                stated = oracle.logits(text, labels)
                inside = stated > -torch.inf
                if seen:
                    # `[labels, words, width]`
                    difference = (seen[0].permute(1, 2, 0) - stated)[inside].abs().max()
                    furthest = max(furthest, float(difference / stated[inside].abs().max()))
                else:
                    others += int(inside.sum())
            limits = [0.5]
            if all(seen_ := [bool((oracle.logits(t, labels) > -torch.inf).any()) for t in TEXTS]):
                limits += thresholds_of(oracle, TEXTS, labels)
            assert len(set(seen_)) == 1
            for limit in limits:
                for flat, policy in ((True, None), (False, "nested")):
                    ours = encoder.extract(TEXTS, labels, threshold=limit, flat_ner=flat)
                    for text, mine in zip(TEXTS, ours, strict=True):
                        found = library.extract_entities(
                            text,
                            labels,
                            threshold=limit,
                            include_spans=True,
                            include_confidence=True,
                            overlap_policy=policy,
                        )
                        read = as_read(text)
                        wanted = sorted(
                            (each["start"], min(each["end"], len(text)), label)
                            for label, entities in found["entities"].items()
                            for each in entities
                            if each["start"] < len(text)
                        )
                        assert all(
                            read[each["start"] : each["end"]] == each["text"]
                            for entities in found["entities"].values()
                            for each in entities
                        )
                        got = sorted((each.start, each.end, each.label) for each in mine)
                        stated = oracle.entities(text, labels, threshold=limit, flat_ner=flat)
                        near = sorted((each[0], each[1], each[3]) for each in stated)
                        spans += len(wanted)
                        others += len(set(wanted) ^ set(got)) + len(set(wanted) ^ set(near))
    print(
        f"{name}: largest relative difference of logits {furthest:.1e}; {spans} spans, {others} differ",
        flush=True,
    )


def as_ours(answer, schema):
    """Return an answer of the library with nothing written as ours writes it."""
    made = dict(answer)
    for name in schema.get("structures", {}):
        made[name] = made[name] or []
    if "entities" in schema:
        names = settings_of(schema["entities"])
        made["entities"] = {
            name: made["entities"].get(name) or (None if each.get("dtype") == "str" else [])
            for name, each in names.items()
        }
    if "relations" in schema:
        # a description becomes a part of the name
        found = made["relation_extraction"]
        made["relation_extraction"] = {
            name: found.get(f"{name}: {own.get('description')}", found[name])
            for name, own in settings_of(schema["relations"]).items()
        }
        # without a relation it is a task of its own
        for name, own in settings_of(schema["relations"]).items():
            made.pop(f"{name}: {own.get('description')}", None)
    return made


def differs(found, wanted):
    """Return whether two answers differ by more than rounding."""
    try:
        assert_same(found, wanted)
    except AssertionError:
        return True
    return False


def compare_schemas(name, folder):
    """Print how many answers to schemas differ, of ours and of the statement."""
    from gliner2 import GLiNER2
    from gliner2.inference.schema import Schema

    library, oracle = GLiNER2.from_pretrained(str(folder)), Gliner2(folder)
    texts = [as_read(text) for text in TEXTS]
    number, ours, stated, values = 0, 0, 0, 0
    with Encoder.from_pretrained(folder, dtype="fp32", device="cpu", warmup_seconds=0) as encoder:
        for given in (SCHEMA, *PARTS.values()):
            for threshold, flat, policy in ((0.5, True, None), (0.6, False, "nested")):
                form = {"threshold": threshold, "flat_ner": flat}
                schema, form["threshold"] = clear_of_scores(oracle, texts, given, threshold)
                mine = encoder.extract_schema(texts, schema, **form)
                for text, found in zip(texts, mine, strict=True):
                    answer = library.extract(
                        text,
                        Schema.from_dict(schema),
                        threshold=form["threshold"],
                        include_confidence=True,
                        include_spans=True,
                        overlap_policy=policy,
                    )
                    wanted = as_ours(answer, schema)
                    number += 1
                    values += str(wanted).count("confidence")
                    ours += differs(found, wanted)
                    stated += differs(oracle.extract(text, schema, **form), wanted)
    print(
        f"{name}: {number} answers to schemas with {values} values; ours differ in {ours}, the statement in {stated}",
        flush=True,
    )


def main(folder):
    """Compare every model."""
    warnings.simplefilter("ignore")
    for number, (name, fields) in enumerate(MODELS.items()):
        made = save_gliner2(Path(folder, str(number)), seed=number, **fields)
        compare(name, made)
        made = save_gliner2(Path(folder, f"{number}s"), seed=number, scale=1.1, **fields)
        compare_schemas(name, made)


if __name__ == "__main__":
    main(sys.argv[1])
