"""Random models in the form of the library gliner2, and their answers.

The arithmetic is in plain torch.

`compare_gliner2.py` compares this statement of the arithmetic with the library itself, which does not install beside
the transformers of these tests. Sources: `layers.py`, `models/span/model.py`, `processor.py`,
`processing/word_splitter.py`, `inference/runtime.py` and `inference/candidate_decoder.py` of gliner2 2.1.0.
"""

import json
import re
import unicodedata
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import nn

from tests.checkpoints import LETTERS, SPECIAL_TOKENS, WEIGHTS, save_checkpoint, write_file

ADDED = (
    *("[SEP_STRUCT]", "[SEP_TEXT]", "[P]", "[C]", "[E]", "[R]", "[L]"),
    *("[EXAMPLE]", "[OUTPUT]", "[DESCRIPTION]"),
)
MOST_COUNT = 20
MARK_OF = {"structures": "[C]", "entities": "[E]", "relations": "[R]", "classifications": "[L]"}
# no planes but these have marks
PLANES = (*range(0x20000), *range(0xE0000, 0xE1000))
MARKS = "".join(chr(x) for x in PLANES if unicodedata.category(chr(x)).startswith("M"))
LETTER = rf"[\w{MARKS}\u200c\u200d]"
# A schema of every kind of task.
SCHEMA = {
    "structures": {
        "river": {
            "fields": [
                {"name": "name", "dtype": "str", "description": "the name"},
                {"name": "at"},
                {"name": "kind", "choices": ["small", "Very large"], "dtype": "str"},
                {"name": "of", "choices": ["water", "words"], "threshold": 0.2},
            ]
        },
        "cat": {"fields": [{"name": "place"}, {"name": "color", "choices": ["red", "blue"]}]},
    },
    "entities": {
        "person": "a name",
        "x": {"dtype": "str", "threshold": 0.4},
        "number 42": {},
    },
    "relations": {"sat on": "who sat where", "is": {"threshold": 0.45}},
    "classifications": [
        {"task": "mood", "labels": ["good", "bad", "the cat"]},
        {
            "task": "topic",
            "labels": {"river": "of water", "cat": "", "bank": "of money"},
            "multi_label": True,
            "cls_threshold": 0.45,
            "top_k": 2,
            "prompt": "what is it",
            "examples": [["a river", "river"], ["a cat", "cat"]],
        },
        {"task": "shape", "labels": ["x", "y"], "class_act": "sigmoid"},
    ],
}
# Its parts, by name.
PARTS = {key: {key: value} for key, value in SCHEMA.items()}
WORD = re.compile(
    r"(?:https?://[^\s]+|www\.[^\s]+)|[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}|@[a-z0-9_]+"
    rf"|{LETTER}+(?:[-_]{LETTER}+)*|\S",
    re.IGNORECASE,
)


def save_gliner2(
    folder, kind="DebertaV2Model", *, seed=0, counts=True, scale=1.4, encoder=None, **fields
):
    """Save a random model, and return its folder.

    Args:
        folder: may not exist yet.
        kind: class of the encoder.
        seed: seed of the weights of the head.
        counts: whether it finds that texts have spans.
        scale: scale of the weights of the head.
        encoder: fields of the encoder's configuration.
        fields: fields of config.json.
    """
    folder = Path(folder)
    vocabulary = len(SPECIAL_TOKENS) + len(LETTERS)
    made = save_checkpoint(
        folder / "encoder_config", kind, vocab_size=vocabulary + len(ADDED), **(encoder or {})
    )
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    write_file(
        folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    )
    settings = {
        "model_type": "extractor",
        "architectures": ["SpanExtractorModel"],
        "model_name": "encoder",
        "counting_layer": "count_lstm",
        "token_pooling": "first",
        "max_width": 4,
        **fields,
    }
    write_file(folder, "config.json", settings)
    hidden = json.loads((made / "config.json").read_text())["hidden_size"]
    head = Head(hidden, settings["counting_layer"])
    torch.manual_seed(seed)
    for parameter in head.parameters():
        # large enough that scores differ, small enough that no probability is 0 or 1
        nn.init.normal_(
            parameter, std=scale * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
        )
    with torch.no_grad():
        head.count_pred[2].bias[0] += -100 if counts else 100
    tensors = {f"encoder.{name}": tensor for name, tensor in load_file(made / WEIGHTS).items()}
    (made / WEIGHTS).unlink()
    save_file(tensors | head.state_dict(), folder / WEIGHTS)
    return folder


def projection(features, inner, out, dropout=True):
    """Return two layers; with dropout, a layer of it is between them."""
    between = [nn.ReLU(), nn.Identity()] if dropout else [nn.ReLU()]
    return nn.Sequential(nn.Linear(features, inner), *between, nn.Linear(inner, out))


class Mixer(nn.Module):
    """The layers of count_lstm_v2 behind the recurrent unit."""

    def __init__(self, hidden):
        super().__init__()
        self.in_projector = nn.Linear(hidden, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2)
        self.out_projector = nn.Sequential(
            nn.Linear(128 + hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
        )

    def forward(self, x):
        return self.out_projector(torch.cat([self.transformer(self.in_projector(x)), x], dim=-1))


class Head(nn.Module):
    """The layers behind an encoder, with the names of the library."""

    def __init__(self, hidden, counting_layer):
        super().__init__()
        spans = nn.Module()
        spans.project_start = projection(hidden, 4 * hidden, hidden)
        spans.project_end = projection(hidden, 4 * hidden, hidden)
        spans.out_project = projection(2 * hidden, 4 * hidden, hidden)
        self.span_rep = nn.Module()
        self.span_rep.span_rep_layer = spans
        self.classifier = projection(hidden, 2 * hidden, 1, dropout=False)
        self.count_pred = projection(hidden, 2 * hidden, MOST_COUNT, dropout=False)
        counts = nn.Module()
        counts.pos_embedding = nn.Embedding(MOST_COUNT, hidden)
        counts.gru = nn.GRU(hidden, hidden)
        if counting_layer == "count_lstm":
            counts.projector = projection(2 * hidden, 4 * hidden, hidden, dropout=False)
        else:
            counts.transformer = Mixer(hidden)
        self.count_embed = counts

    def count(self, task):
        """Return the number of things that labels describe."""
        return int(self.count_pred(task).argmax())

    def queries(self, labels, count):
        """Return what spans are multiplied with, `[count, labels, hidden]`."""
        counts = self.count_embed
        steps = counts.pos_embedding.weight[:count, None].expand(-1, len(labels), -1)
        states = counts.gru(steps.contiguous(), labels[None].contiguous())[0]
        if hasattr(counts, "transformer"):
            return counts.transformer(states + labels)
        return counts.projector(torch.cat([states, labels.expand_as(states)], dim=-1))

    def forward(self, words, queries, width):
        """Return the logits of one text, `[words, width, labels]`."""
        spans = self.span_rep.span_rep_layer
        starts, ends = spans.project_start(words), spans.project_end(words)
        first = torch.arange(len(words))[:, None].expand(-1, width)
        last = first + torch.arange(width)
        ends = ends[last.clamp(max=len(words) - 1)]
        found = spans.out_project(torch.cat([starts[first], ends], dim=-1).relu())
        scores = found @ queries.T
        return scores.masked_fill((last >= len(words))[..., None], -torch.inf)


class Gliner2:
    """A saved model in fp32, one text at a time."""

    def __init__(self, folder):
        folder = Path(folder)
        self.config = json.loads((folder / "config.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tensors = load_file(folder / WEIGHTS)
        of_encoder = {
            name.removeprefix("encoder."): tensor
            for name, tensor in tensors.items()
            if name.startswith("encoder.")
        }
        config = transformers.AutoConfig.from_pretrained(folder / "encoder_config")
        self.encoder = transformers.AutoModel.from_config(config).eval()
        self.encoder.load_state_dict(of_encoder, strict=False)
        self.head = Head(config.hidden_size, self.config["counting_layer"]).eval()
        self.head.load_state_dict(
            {name: each for name, each in tensors.items() if not name.startswith("encoder.")}
        )

    @torch.inference_mode()
    def scored(self, text, tasks, prefix=()):
        """Return the logits of each task: of its labels as classes, or of spans.

        Args:
            tasks: kind, title and names of labels of each.
            prefix: words before the text.

        Returns:
            `[labels]`, or `[count, words, width, labels]` with the words of the prefix.
        """
        words = [*prefix, *(match.group().lower() for match in WORD.finditer(as_read(text)))]
        before, starts = [], []
        for kind, title, names in tasks:
            before += ["[SEP_STRUCT]"] if before else []
            starts.append(len(before))
            before += ["(", "[P]", title, "("]
            before += [each for name in names for each in (MARK_OF[kind], name)]
            before += [")", ")"]
        before.append("[SEP_TEXT]")
        ids, places = [], []
        for part in [*before, *words]:
            places.append(len(ids))
            ids += self.tokenizer.encode(part, add_special_tokens=False).ids
        tokens = self.encoder(torch.tensor([ids])).last_hidden_state[0]
        of_words, width, found = places[len(before) :], self.config["max_width"], []
        for start, (kind, _, names) in zip(starts, tasks, strict=True):
            labels = tokens[[places[start + 4 + 2 * index] for index in range(len(names))]]
            if kind == "classifications":
                found.append(self.head.classifier(labels)[:, 0])
                continue
            count = self.head.count(tokens[places[start + 1]])
            scores = torch.full((count, len(words), width, len(names)), -torch.inf)
            if count:
                queries = self.head.queries(labels, count)
                made = self.head(tokens[of_words], queries.flatten(0, 1), width)
                scores = made.unflatten(-1, queries.shape[:2]).movedim(-2, 0)
            found.append(scores)
        return found

    def logits(self, text, labels):
        """Return the logits of spans of a text, `[words, width, labels]`."""
        (found,) = self.scored(text, [("entities", "entities", labels)])
        if len(found):
            return found[0]
        return torch.full(found.shape[1:], -torch.inf)

    def entities(self, text, labels, *, threshold=0.5, flat_ner=True):
        """Return start, end, text, label and score of each span."""
        scores = self.logits(text, labels).sigmoid()
        return sorted(
            (start, end, text[start:end], label, score)
            for number, label in enumerate(labels)
            for start, end, score in spans_of(text, scores[..., number], threshold, flat_ner)
        )

    def extract(self, text, schema, *, threshold=0.5, flat_ner=True):
        """Return what the library answers to a schema, with confidences and spans."""
        tasks, prefix = tasks_of(schema), prefix_of(schema)
        scored = self.scored(text, [task[:3] for task in tasks], prefix)
        answer, relations = {}, {}
        for (kind, _, names, name, settings), scores in zip(tasks, scored, strict=True):
            if kind == "classifications":
                answer[name] = classes_of(settings, names, scores)
                continue
            instances = []
            for probabilities in scores.sigmoid():
                values = {}
                for number, label in enumerate(names):
                    own = settings[label] if kind != "relations" else {"dtype": "str", **settings}
                    limit = own.get("threshold")
                    limit = threshold if limit is None else limit
                    column = probabilities[..., number]
                    if own.get("choices"):
                        values[label] = choices_of(own, prefix, column[:, 0], limit)
                        continue
                    spans = spans_of(text, column[len(prefix) :], limit, flat_ner)
                    made = [
                        {"text": text[a:b], "confidence": score, "start": a, "end": b}
                        for a, b, score in spans
                    ]
                    is_one = own.get("dtype") == "str"
                    values[label] = (made[0] if made else None) if is_one else made
                instances.append(values)
            if kind == "entities":
                none = {
                    label: None if settings[label].get("dtype") == "str" else [] for label in names
                }
                answer[name] = instances[0] if instances else none
            elif kind == "relations":
                relations[name] = [each for each in instances if each["head"] and each["tail"]]
            else:
                answer[name] = [each for each in instances if any(value for value in each.values())]
        return {**answer, "relation_extraction": relations} if relations else answer


def tasks_of(schema):
    """Return kind, title, names of labels, name and settings of each task."""
    tasks = []
    for name, structure in schema.get("structures", {}).items():
        fields = {each["name"]: each for each in structure["fields"]}
        texts = {key: each.get("description") or None for key, each in fields.items()}
        title = name + described(texts)
        tasks.append(("structures", title, list(fields), name, fields))
    if entities := settings_of(schema.get("entities", {})):
        title = "entities" + described(
            {key: each.get("description") for key, each in entities.items()}
        )
        tasks.append(("entities", title, list(entities), "entities", entities))
    for name, own in settings_of(schema.get("relations", {})).items():
        title = f"{name}: {own['description']}" if own.get("description") else name
        tasks.append(("relations", title, ["head", "tail"], name, own))
    for each in schema.get("classifications", []):
        labels = each["labels"]
        title = f"{each['task']}: {each['prompt']}" if each.get("prompt") else each["task"]
        title += described(labels) if isinstance(labels, dict) else ""
        title += "".join(
            f" [EXAMPLE] {text} [OUTPUT] {label}" for text, label in each.get("examples", ())
        )
        tasks.append(("classifications", title, list(labels), each["task"], each))
    return tasks


def settings_of(given):
    """Return the settings of labels by name, from a list of names or an object."""
    if isinstance(given, list):
        return {name: {} for name in given}
    return {
        name: {"description": each} if isinstance(each, str) else each
        for name, each in given.items()
    }


def described(texts):
    """Return the part of a title that describes labels."""
    return "".join(
        f" [DESCRIPTION] {name}: {text}" for name, text in texts.items() if text is not None
    )


def prefix_of(schema):
    """Return the words that show the choices of fields."""
    words = []
    for name, structure in schema.get("structures", {}).items():
        chosen = [each for each in structure["fields"] if each.get("choices")]
        if chosen:
            words += ["(", f"{name}:"]
            for number, each in enumerate(chosen):
                words += [","] if number else []
                words += [each["name"], "(", each["choices"][0]]
                words += [word for choice in each["choices"][1:] for word in ("|", choice)]
                words.append(")")
            words.append(")")
    return words


def classes_of(settings, names, logits):
    """Return the class of a text, or several."""
    is_multi = settings.get("multi_label", False)
    kind = settings.get("class_act") or "auto"
    is_softmax = kind == "softmax" or (kind == "auto" and not is_multi)
    scores = (logits.softmax(-1) if is_softmax else logits.sigmoid()).tolist()
    pairs = [
        {"label": label, "confidence": score} for label, score in zip(names, scores, strict=True)
    ]
    best = max(pairs, key=lambda each: each["confidence"])
    if not is_multi:
        return best
    limit = settings.get("cls_threshold", 0.5)
    chosen = [each for each in pairs if each["confidence"] >= limit] or [best]
    if settings.get("top_k"):
        chosen = sorted(chosen, key=lambda each: -each["confidence"])[: settings["top_k"]]
    return chosen


def choices_of(field, prefix, scores, limit):
    """Return the choices of a field, given the score of each word."""
    words = [word.lower() for word in prefix]
    found = [
        {"text": choice, "confidence": float(scores[words.index(choice.lower())])}
        for choice in field["choices"]
    ]
    kept = [each for each in found if each["confidence"] >= limit]
    if field.get("dtype") != "str":
        return kept
    return max(kept, key=lambda each: each["confidence"], default=None)


def spans_of(text, scores, threshold, flat_ner):
    """Return start, end and score of spans, the best first, given `[words, width]`."""
    words = [match.span() for match in WORD.finditer(as_read(text))]
    spans = [
        (words[i][0], words[i + k][1], float(scores[i, k]))
        for i, k in ((scores >= threshold) & (scores > 0)).nonzero().tolist()
    ]
    kept = []
    for span in sorted(spans, key=lambda each: -each[2]):
        if all(_fits(span, other, flat_ner) for other in kept):
            kept.append(span)
    # a sentence ends behind the text
    cut = [(start, min(end, len(text)), score) for start, end, score in kept]
    return [each for each in cut if each[0] < each[1]]


def as_read(text):
    """Return a text as the library reads it."""
    return text if text.endswith((".", "!", "?")) else text + "."


def _fits(span, other, flat_ner):
    """Return whether both spans of a label may be in an answer."""
    (a, b), (c, d) = span[:2], other[:2]
    if b <= c or d <= a:
        return True
    return not flat_ner and ((a <= c and d <= b) or (c <= a and b <= d))


def clear_of_scores(oracle, texts, schema, threshold=0.5):
    """Return a schema and a threshold with limits that no score is next to."""
    tasks, values = [each[:3] for each in tasks_of(schema)], []
    for text in texts:
        for (kind, *_), logits in zip(
            tasks, oracle.scored(text, tasks, prefix_of(schema)), strict=True
        ):
            values.append(logits.sigmoid().flatten())
            if kind == "classifications":
                values.append(logits.softmax(-1))
    ordered = torch.cat(values).unique().double()

    def moved(limit):
        near = ordered[(ordered - limit).abs() < 0.02]
        if len(near) < 2:
            return limit
        widest = near.diff().argmax()
        return float((near[widest] + near[widest + 1]) / 2)

    def copied(part):
        if isinstance(part, dict):
            return {
                key: moved(each) if key in ("threshold", "cls_threshold") else copied(each)
                for key, each in part.items()
            }
        return list(map(copied, part)) if isinstance(part, list) else part

    return copied(schema), moved(threshold)


def assert_same(found, wanted):
    """Compare answers to schemas; spans by their places, since equal scores have no order."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        if wanted and "start" in wanted[0]:
            found, wanted = (
                sorted(each, key=lambda x: (x["start"], x["end"])) for each in (found, wanted)
            )
        for mine, own in zip(found, wanted, strict=True):
            assert_same(mine, own)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-4)
    else:
        assert found == wanted
