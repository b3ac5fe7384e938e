"""Compares the library gliner with `tests.gliner_models` and with our encoder, on random models.

`python -m tests.compare_gliner FOLDER`, with a Python that has gliner and what these tests need; its requirement of an
older transformers need not hold (`pip install --no-deps gliner`). Prints a line for each model: the largest difference
of logits, the number of spans, and how many of them differ.
"""

import sys
import warnings
from pathlib import Path

import torch

from tests.gliner_models import Gliner, save_gliner, thresholds_of
from varlen import Encoder

TEXTS = [
    "the cat, sat on the river-bank at 5.",
    "a",
    "river, the river! is it 42? the cat's river_bank - no",
    "0123456789 river, cat " * 6,
    "e@mail.com, +49-30-12345; the (cat)",
]
LABELS = [["cat"], ["person name", "the river", "x", "number 42"], ["Email", "phone_number", "cat"]]
MODELS = {
    "spans": {},
    "spans, projection": {"hidden_size": 16},
    "spans, no LSTM": {"num_rnn_layers": 0},
    "spans, 2 layers": {"num_rnn_layers": 2},
    "spans, last token": {"subtoken_pooling": "last"},
    "spans, label's token": {"embed_ent_token": False},
    "spans, ModernBERT": {"kind": "ModernBertModel"},
    "spans, BERT": {"kind": "BertModel"},
    "words": {"span_mode": "token_level"},
    "words, projection": {"span_mode": "token_level", "hidden_size": 16},
    "words, ModernBERT": {"kind": "ModernBertModel", "span_mode": "token_level"},
    "labels apart": {"labels_kind": "BertModel", "seed": 4},
    "labels apart, projections": {"labels_kind": "BertModel", "hidden_size": 16, "seed": 1},
    "labels apart, ModernBERT": {
        "kind": "ModernBertModel",
        "labels_kind": "BertModel",
        "encoder": {"max_position_embeddings": 256},
        "seed": 1,
    },
    "labels apart, DeBERTa": {"labels_kind": "DebertaV2Model", "labels": {"hidden_size": 12}},
    "labels apart, words": {"labels_kind": "BertModel", "span_mode": "token_level", "seed": 2},
}
FORMS = [
    {"flat_ner": flat_ner, "multi_label": multi_label}
    for flat_ner in (True, False)
    for multi_label in (True, False)
]


def compare(name, folder):
    """Print how far the answers to all texts, labels and forms are apart."""
    from gliner import GLiNER

    library = GLiNER.from_pretrained(str(folder), load_tokenizer=True)
    oracle, furthest, spans, others = Gliner(folder), 0.0, 0, 0
    seen = []

    def keep(_, __, ___, output):
        seen.append(output.logits)

    library.model.register_forward_hook(keep, with_kwargs=True)
    with Encoder.from_pretrained(folder, dtype="fp32", device="cpu", warmup_seconds=0) as encoder:
        for labels in LABELS:
            limits = thresholds_of(oracle, TEXTS, labels)
            for form in [{**form, "threshold": limit} for form in FORMS for limit in limits]:
                seen.clear()
                found = library.inference(TEXTS, labels, batch_size=1, **form)
                ours = encoder.extract(TEXTS, labels, **form)
                for text, logits, theirs, mine in zip(TEXTS, seen, found, ours, strict=True):
                    stated = oracle.logits(text, labels)
                    inside = stated > -torch.inf
                    difference = (logits[0] - stated)[inside].abs().max()
                    furthest = max(furthest, float(difference / stated[inside].abs().max()))
                    wanted = [
                        tuple(each[k] for k in ("start", "end", "text", "label")) for each in theirs
                    ]
                    got = [(each.start, each.end, each.text, each.label) for each in mine]
                    near = [each[:4] for each in oracle.entities(text, labels, **form)]
                    spans += len(wanted)
                    others += len(set(wanted) ^ set(got)) + len(set(wanted) ^ set(near))
                    others += got != wanted
    print(
        f"{name}: largest relative difference of logits {furthest:.1e}; {spans} spans, {others} differ",
        flush=True,
    )


def main(folder):
    """Compare every model."""
    warnings.simplefilter("ignore")
    for number, (name, fields) in enumerate(MODELS.items()):
        compare(name, save_gliner(Path(folder, str(number)), **{"seed": number, **fields}))


if __name__ == "__main__":
    main(sys.argv[1])
