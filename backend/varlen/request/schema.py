"""What a request asks of GLiNER2: the tasks of a schema, their prompt and answers.

A task has labels: the fields of a structure, entities, the head and the tail of a relation, or classes. An instance is
one structure or relation of a text, which may have several; a model scores the labels of each.
Sources: the JSON form, the prompt and the answer follow the library gliner2 2.1.0 (`SchemaInput`,
`SchemaTransformer`, `ExtractorRuntimeMixin`); Zaratiana et al. 2025, arXiv:2507.18546.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from varlen.errors import RequestError
from varlen.parameter import read_json, refuse
from varlen.request.request import Float32Array
from varlen.request.spans import (
    DEFAULT_THRESHOLD,
    MAX_LABEL_CHARACTERS,
    MAX_LABEL_ROWS,
    Span,
    candidates,
    is_label,
    is_text,
    new_filter,
    sigmoid,
    word_bounds,
)

Kind: TypeAlias = Literal["structures", "entities", "relations", "classifications"]
Activation: TypeAlias = Literal["auto", "sigmoid", "softmax"]

# Numbers of instances that a model tells apart, from 0.
MOST_COUNT = 20
# Characters of a description, a prompt or an example.
_MOST_TEXT = 4096
SCHEMA_TEXT = (
    "a JSON object as `Schema.from_dict` of gliner2 takes it, with entities, classifications, structures or relations,"
    " or a text that holds one"
)
# The token before a label of each kind.
_MARKS: Mapping[Kind, str] = {
    "structures": "[C]",
    "entities": "[E]",
    "relations": "[R]",
    "classifications": "[L]",
}
_TASK, _BETWEEN, _END = "[P]", "[SEP_STRUCT]", "[SEP_TEXT]"
# Tokens that the tokenizer of a model has.
TOKENS = (*_MARKS.values(), _TASK, _BETWEEN, _END)
# The name of the task of entities, and of all relations in an answer.
_ENTITIES, _RELATIONS = "entities", "relation_extraction"
# What only models that score where spans begin and end read.
_OF_RECORDS = ("mode", "anchor", "occurrence_policy", "cardinality", "exclusive")


@dataclass(frozen=True, slots=True)
class Label:
    """A label of a task.

    Attributes:
        threshold: scores from it on count; None is the request's.
        is_one: whether the answer is its best span, or none; else all of them.
        choices: words that the answer has in place of spans.
        description: text for the prompt.
    """

    name: str
    threshold: float | None = None
    is_one: bool = False
    choices: tuple[str, ...] = ()
    description: str | None = None


@dataclass(frozen=True, slots=True)
class SchemaTask:
    """A task of a schema.

    Attributes:
        prompt: text behind its name in the prompt.
        examples: texts with their class, for the prompt.
        is_multi: whether a text may have several classes, each with a score from `threshold` on.
        top_k: most of several classes; None is all.
        activation: function that makes scores of logits.
    """

    kind: Kind
    name: str
    labels: tuple[Label, ...]
    prompt: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    is_multi: bool = False
    threshold: float = DEFAULT_THRESHOLD
    top_k: int | None = None
    activation: Activation = "auto"

    @property
    def numbers(self) -> Sequence[int]:
        if self.kind == "classifications":
            return (-1,)
        return range(1 if self.kind == "entities" else MOST_COUNT - 1)

    @property
    def title(self) -> str:
        """Its name in the prompt, with what describes its labels."""
        names = [each.name for each in self.labels]
        parts = [f"{self.name}: {self.prompt}" if self.prompt else self.name]
        parts += [
            f"[DESCRIPTION] {each.name}: {each.description}"
            for each in self.labels
            if each.description is not None
        ]
        parts += [
            f"[EXAMPLE] {text} [OUTPUT] {name}" for text, name in self.examples if name in names
        ]
        return " ".join(parts)

    @property
    def choice_words(self) -> list[str]:
        words: list[str] = []
        for each in self.labels:
            if each.choices:
                between = [word for choice in each.choices for word in ("|", choice)]
                words += [",", each.name, "(", *between[1:], ")"]
        return ["(", f"{self.name}:", *words[1:], ")"] if words else []


@dataclass(frozen=True, slots=True)
class Schema:
    """The tasks of a request, in the order of the prompt."""

    tasks: tuple[SchemaTask, ...]

    @classmethod
    def of_labels(cls, labels: Iterable[str]) -> Schema:
        return cls((SchemaTask("entities", _ENTITIES, tuple(map(Label, labels))),))

    @property
    def num_rows(self) -> int:
        """Labels of all instances."""
        return sum(len(each.labels) * len(each.numbers) for each in self.tasks)

    @property
    def choice_words(self) -> list[str]:
        return [word for each in self.tasks for word in each.choice_words]

    def rows(self) -> Iterator[tuple[SchemaTask, int, Label]]:
        """Yield task, number of the instance and label of each row of scores."""
        for task in self.tasks:
            for number in task.numbers:
                for label in task.labels:
                    yield task, number, label

    def prompt(self) -> PromptTexts:
        texts: list[str] = []
        instances: list[tuple[int, int, int]] = []
        marks: list[int] = []
        for task in self.tasks:
            texts += [_BETWEEN] if texts else []
            at, first = len(texts) + 1, len(texts) + 4
            texts += ["(", _TASK, task.title, "("]
            for label in task.labels:
                texts += [_MARKS[task.kind], label.name]
            own = list(range(first, len(texts), 2))
            texts += [")", ")"]
            for number in task.numbers:
                instances.append((at, number, len(own)))
                marks += own
        return PromptTexts([*texts, _END], instances, marks)


@dataclass(frozen=True, slots=True)
class PromptTexts:
    """The texts before the words of a prompt.

    Attributes:
        instances: place of the task among `texts`, number, and number of labels of each instance.
        marks: place of the mark of each label of all instances.
    """

    texts: list[str]
    instances: list[tuple[int, int, int]]
    marks: list[int]


@dataclass(frozen=True, slots=True)
class SchemaForm:
    """What a request asks of its texts.

    Attributes:
        threshold: scores from it on count, unless a label has its own.
        flat_ner: whether no two spans of a label share a word; else one may contain the other.
    """

    texts: tuple[str, ...]
    schema: Schema
    threshold: float = DEFAULT_THRESHOLD
    flat_ner: bool = True

    def spans(self, row: int, scores: Float32Array) -> list[Span]:
        """Return the entities of a row in the order of their beginnings.

        Args:
            scores: `[words · labels of all instances, columns]`, logits.

        Raises:
            RequestError: too many spans have scores from the threshold on.
        """
        places = [
            place for place, each in enumerate(self.schema.rows()) if each[0].kind == "entities"
        ]
        if not places:
            return []
        found = self._ranked(row, scores)
        spans = [each for place in places for each in found.get(place, ())]
        # of equal beginnings the best one first
        return sorted(sorted(spans, key=lambda each: -each.score), key=lambda each: each.start)

    def result(self, row: int, scores: Float32Array) -> dict[str, Any]:
        """Return what the schema asks of a row, by name, as gliner2 does."""
        found, logits = self._ranked(row, scores), self._logits(scores)
        words = [word.lower() for word in self.schema.choice_words]
        answer: dict[str, Any] = {}
        relations: dict[str, list[Any]] = {}
        place = 0
        for task in self.schema.tasks:
            size, instances = len(task.labels), []
            for number, _ in enumerate(task.numbers):
                first = place + number * size
                if logits[0, first, 0] == -np.inf:
                    # neither this one nor a later one is there
                    break
                values = {
                    label.name: self._choice(label, words, logits[:, at])
                    if label.choices
                    else _spans_of(label, found.get(at, []))
                    for at, label in enumerate(task.labels, first)
                }
                instances.append(values)
            if task.kind == "classifications":
                answer[task.name] = _classes(task, logits[0, place : place + size, 0])
            elif task.kind == "entities":
                none = {label.name: _spans_of(label, []) for label in task.labels}
                answer[task.name] = instances[0] if instances else none
            elif task.kind == "relations":
                relations[task.name] = [each for each in instances if all(each.values())]
            else:
                answer[task.name] = [each for each in instances if any(each.values())]
            place += size * len(task.numbers)
        return {**answer, _RELATIONS: relations} if relations else answer

    def _logits(self, scores: Float32Array) -> Float32Array:
        """Return the logits of a row, `[words, labels of all instances, columns]`."""
        return scores.reshape(-1, self.schema.num_rows, scores.shape[1])

    def _ranked(self, row: int, scores: Float32Array) -> dict[int, list[Span]]:
        """Return the spans of each row of labels, the best first."""
        rows, prefix = list(self.schema.rows()), len(self.schema.choice_words)
        probabilities = sigmoid(self._logits(scores)[prefix:])
        words = len(probabilities)
        limits = np.array([self._limit(task, label) for task, _, label in rows], np.float32)
        begins, ends, labels, values = candidates(probabilities, limits, row)
        text = self.texts[row]
        bounds = list(word_bounds(text, words, "fields"))
        free = {label: new_filter(words, is_flat=self.flat_ner) for label in set(labels)}
        found: dict[int, list[Span]] = {}
        for each in np.argsort(-values, kind="stable").tolist():
            label, begin, end = labels[each], begins[each], ends[each]
            if free[label].take(begin, end):
                # the end of a sentence that was added is no character of the text
                start, stop = bounds[begin][0], min(bounds[end][1], len(text))
                if start < stop:
                    name, score = rows[label][2].name, float(values[each])
                    span = Span(start, stop, text[start:stop], name, score)
                    found.setdefault(label, []).append(span)
        return found

    def _limit(self, task: SchemaTask, label: Label) -> float:
        """Return what the score of a span is above: gliner2 takes the threshold itself too."""
        if task.kind == "classifications" or label.choices:
            return np.inf
        limit = np.float32(self._threshold(label))
        # nothing has a probability of 0
        return float(np.nextafter(limit, np.float32(0))) if limit > 0 else 0.0

    def _threshold(self, label: Label) -> float:
        return self.threshold if label.threshold is None else label.threshold

    def _choice(self, label: Label, words: list[str], logits: Float32Array) -> Any:
        """Return the choices of a field, given the logits of words: `[words, columns]`."""
        values = sigmoid(logits[: len(words), 0]).tolist()
        # of equal words, and of equal choices, the first one counts
        scored: dict[str, tuple[str, float]] = {}
        for each in label.choices:
            word = each.lower()
            scored.setdefault(word, (each, values[words.index(word)]))
        limit = np.float32(self._threshold(label))
        if label.is_one:
            best = max(scored.values(), key=lambda each: each[1])
            return _choice_of(*best) if best[1] >= limit else None
        return [_choice_of(*each) for each in scored.values() if each[1] >= limit]


def read_schema(value: object) -> Schema:
    """Return the schema of a request.

    Raises:
        RequestError: this is no schema, or one that is not served.
    """
    given = read_json("schema", value) if isinstance(value, str) else value
    parts = _object("schema", given, ("structures", "entities", "relations", "classifications"))
    tasks = [
        *(_structure(*each) for each in _named(parts, "structures")),
        *([_entities(parts["entities"])] if parts.get("entities") else []),
        *(_relation(*each) for each in _named(parts, "relations")),
        *(
            _classification(f"schema.classifications[{at}]", each)
            for at, each in enumerate(_list("schema.classifications", parts, "classifications"))
        ),
    ]
    schema = Schema(tuple(tasks))
    if not tasks:
        refuse("schema", given, SCHEMA_TEXT)
    if schema.num_rows > MAX_LABEL_ROWS:
        raise RequestError(
            f"schema has {schema.num_rows} labels; labels of structures and relations count {MOST_COUNT - 1}"
            f" times; allowed: {MAX_LABEL_ROWS}. Send several requests with a part of it each"
        )
    names = [each.name for each in tasks if each.kind != "relations"]
    names += [_RELATIONS] if any(each.kind == "relations" for each in tasks) else []
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(
            f'schema has two tasks that answer "{twice}"; allowed: a name for each. Rename one of them'
        )
    return schema


def _spans_of(label: Label, spans: list[Span]) -> Any:
    """Return the spans of a label as gliner2 does: a list, or the best one."""
    made = [
        {"text": each.text, "confidence": each.score, "start": each.start, "end": each.end}
        for each in spans
    ]
    return (made[0] if made else None) if label.is_one else made


def _choice_of(text: str, score: float) -> dict[str, Any]:
    return {"text": text, "confidence": score}


def _classes(task: SchemaTask, logits: Float32Array) -> Any:
    names = [label.name for label in task.labels]
    is_softmax = task.activation == "softmax" or (task.activation == "auto" and not task.is_multi)
    if is_softmax:
        raised = np.exp(logits - logits.max())
        values = raised / raised.sum()
    else:
        values = sigmoid(logits)
    best = int(np.argmax(values))
    if not task.is_multi:
        return {"label": names[best], "confidence": float(values[best])}
    limit = np.float32(task.threshold)
    chosen = [at for at, value in enumerate(values) if value >= limit] or [best]
    if task.top_k is not None:
        chosen = sorted(chosen, key=lambda at: -values[at])[: task.top_k]
    return [{"label": names[at], "confidence": float(values[at])} for at in chosen]


def _structure(at: str, name: str, value: object) -> SchemaTask:
    given = _object(at, value, ("fields",))
    fields = _list(f"{at}.fields", given, "fields")
    labels = [_field(f"{at}.fields[{number}]", each) for number, each in enumerate(fields)]
    return _task(at, SchemaTask("structures", name, tuple(labels)))


def _field(at: str, value: object) -> Label:
    given = _object(at, value, ("name", "dtype", "choices", "description", "threshold"))
    choices = tuple(
        _name(f"{at}.choices", each) for each in _list(f"{at}.choices", given, "choices")
    )
    # the library leaves an empty description of a field out
    given = {**given, "description": given.get("description") or None}
    return _label(at, _name(f"{at}.name", given.get("name")), given, choices)


def _label(at: str, name: str, given: Mapping[str, Any], choices: tuple[str, ...] = ()) -> Label:
    dtype = given.get("dtype") or "list"
    if dtype not in ("str", "list"):
        refuse(f"{at}.dtype", dtype, "str, list")
    threshold = given.get("threshold")
    return Label(
        name,
        None if threshold is None else _share(f"{at}.threshold", threshold),
        dtype == "str",
        choices,
        _text(f"{at}.description", given.get("description")),
    )


def _entities(value: object) -> SchemaTask:
    labels = [
        _label(at, name, _settings(at, each, ("description", "dtype", "threshold")))
        for at, name, each in _named({"entities": value}, "entities")
    ]
    return _task("schema.entities", SchemaTask("entities", _ENTITIES, tuple(labels)))


def _relation(at: str, name: str, value: object) -> SchemaTask:
    given = _settings(at, value, ("description", "threshold"))
    threshold = given.get("threshold")
    limit = None if threshold is None else _share(f"{at}.threshold", threshold)
    labels = tuple(Label(end, limit, is_one=True) for end in ("head", "tail"))
    return SchemaTask(
        "relations", name, labels, _text(f"{at}.description", given.get("description")) or ""
    )


def _classification(at: str, value: object) -> SchemaTask:
    known = ("task", "labels", "multi_label", "cls_threshold", "top_k", "class_act", "prompt")
    given = _object(at, value, (*known, "examples"))
    described = given.get("labels")
    texts = described if isinstance(described, dict) else {}
    names = list(texts) if texts else _list(f"{at}.labels", given, "labels")
    labels = tuple(
        Label(each, description=_text(f"{at}.labels", texts.get(each)))
        for each in map(partial(_name, f"{at}.labels"), names)
    )
    is_multi, top_k = given.get("multi_label", False), given.get("top_k")
    if not isinstance(is_multi, bool):
        refuse(f"{at}.multi_label", is_multi, "true, false")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        refuse(f"{at}.top_k", top_k, "whole numbers from 1")
    activation: Any = given.get("class_act") or "auto"
    if activation not in ("auto", "sigmoid", "softmax"):
        refuse(f"{at}.class_act", activation, "auto, sigmoid, softmax")
    examples = [
        (_text(f"{at}.examples", each[0]) or "", _name(f"{at}.examples", each[1]))
        if isinstance(each, list | tuple) and len(each) == 2
        else refuse(f"{at}.examples", each, "lists of a text and its label")
        for each in _list(f"{at}.examples", given, "examples")
    ]
    task = SchemaTask(
        "classifications",
        _name(f"{at}.task", given.get("task")),
        labels,
        _text(f"{at}.prompt", given.get("prompt")) or "",
        tuple(examples),
        is_multi,
        _share(f"{at}.cls_threshold", given.get("cls_threshold", DEFAULT_THRESHOLD)),
        top_k,
        activation,
    )
    if len(labels) < 2:
        refuse(f"{at}.labels", described, "two labels or more")
    return _task(at, task)


def _task(at: str, task: SchemaTask) -> SchemaTask:
    names = [label.name for label in task.labels]
    if not names:
        raise RequestError(f"{at} has no labels; allowed: one or more")
    if len(names) != len(set(names)):
        refuse(at, names, "names that differ")
    return task


def _named(parts: Mapping[str, Any], key: str) -> Iterator[tuple[str, str, Any]]:
    """Yield place, name and settings of each part of an object or a list."""
    given = parts.get(key)
    if given is None:
        return
    if not isinstance(given, dict | list | tuple) or (key == "structures" and type(given) is list):
        refuse(
            f"schema.{key}",
            given,
            "an object by name" + ("" if key == "structures" else ", or a list of names"),
        )
    settings = given if isinstance(given, dict) else dict.fromkeys(_hashable(key, given))
    if len(settings) != len(given):
        refuse(f"schema.{key}", given, "names that differ")
    for name, value in settings.items():
        yield f"schema.{key}.{name}", _name(f"schema.{key}", name), value


def _hashable(key: str, names: Iterable[object]) -> list[str]:
    return [_name(f"schema.{key}", each) for each in names]


def _settings(at: str, value: object, known: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings of a label: nothing, its description, or an object."""
    if value is None:
        return {}
    return {"description": value} if isinstance(value, str) else _object(at, value, known)


def _object(at: str, value: object, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        refuse(at, value, SCHEMA_TEXT if at == "schema" else "an object")
    for key in value:
        if key in _OF_RECORDS:
            raise RequestError(
                f'{at} has "{key}", which only models of GLiNER2 read that score where spans begin and end, and which'
                " are not served; send it without"
            )
        if key == "entity_attributes":
            raise RequestError(
                f'{at} has "{key}", which is not served; send each value as an entity, or a structure'
            )
        if key not in known:
            refuse(f"a key of {at}", key, ", ".join(known))
    return value


def _list(at: str, given: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = given.get(key)
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        refuse(at, value, "a list")
    return value


def _name(at: str, value: object) -> str:
    if not is_label(value):
        refuse(at, value, f"texts of 1 to {MAX_LABEL_CHARACTERS} characters, not blank")
    return str(value)


def _text(at: str, value: object) -> str | None:
    if value is None:
        return None
    if not is_text(value, _MOST_TEXT):
        refuse(at, value, f"texts of at most {_MOST_TEXT} characters")
    return str(value)


def _share(at: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        refuse(at, value, "numbers from 0 to 1")
    return float(value)
