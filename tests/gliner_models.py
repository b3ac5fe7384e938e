"""Random models in the form of the library gliner, and their answers.

The arithmetic is in plain torch.

`compare_gliner.py` compares this statement of the arithmetic with the library itself, which does not install beside the
transformers of these tests. Sources: `modeling/base.py`, `encoder.py`, `layers.py`, `span_rep.py`, `scorers.py`,
`decoding/` and `data_processing/` of gliner 0.2.29.
"""

import json
import re
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import nn

from tests.checkpoints import (
    LETTERS,
    SPECIAL_TOKENS,
    WEIGHTS,
    save_checkpoint,
    set_fields,
    write_file,
)

FIRST_ADDED, MARK, SEPARATOR = "[FLERT]", "<<ENT>>", "<<SEP>>"
PREFIX = "token_rep_layer.bert_layer.model."
LABELS_PREFIX = "token_rep_layer.labels_encoder.model."
LABELS_TOKENIZER = "labels_tokenizer"
WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")
KINDS = {"DebertaV2Model": "deberta-v2", "ModernBertModel": "modernbert", "BertModel": "bert"}


def save_gliner(
    folder, kind="DebertaV2Model", *, seed=0, encoder=None, labels_kind=None, labels=None, **fields
):
    """Save a random model of spans or words, and return its folder.

    Args:
        folder: may not exist yet.
        kind: class of the encoder.
        seed: seed of the weights of the head.
        encoder: fields of the encoder's configuration.
        labels_kind: class of the encoder of labels; None if they are tokens before a text.
        labels: fields of its configuration.
        fields: fields of gliner_config.json.
    """
    folder = Path(folder)
    vocabulary = len(SPECIAL_TOKENS) + len(LETTERS)
    made = save_checkpoint(folder / "encoder", kind, vocab_size=vocabulary + 3, **(encoder or {}))
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    if labels_kind is None:
        added = [AddedToken(text, special=True) for text in (FIRST_ADDED, MARK, SEPARATOR)]
        tokenizer.add_special_tokens(added)
    _save_tokenizer(tokenizer, folder)
    config = json.loads((made / "config.json").read_text())
    tensors = {PREFIX + name: tensor for name, tensor in load_file(made / WEIGHTS).items()}
    if labels_kind is not None:
        # other words than the tokenizer of texts has
        of_labels = save_checkpoint(
            folder / "label_encoder", labels_kind, words=LETTERS[3:], **(labels or {})
        )
        tokenizer = Tokenizer.from_file(str(of_labels / "tokenizer.json"))
        _save_tokenizer(tokenizer, folder / LABELS_TOKENIZER)
        stored = load_file(of_labels / WEIGHTS)
        tensors |= {LABELS_PREFIX + name: tensor for name, tensor in stored.items()}
        fields = {
            "labels_encoder": "label_encoder",
            "labels_encoder_config": json.loads((of_labels / "config.json").read_text()),
            "class_token_index": -1,
            "vocab_size": -1,
            **fields,
        }
    settings = {
        "model_name": "encoder",
        "hidden_size": config["hidden_size"],
        "max_width": 4,
        "max_len": 30,
        "num_rnn_layers": 1,
        "span_mode": "markerV0",
        "class_token_index": vocabulary + 1,
        "vocab_size": vocabulary + 3,
        "ent_token": MARK,
        "sep_token": SEPARATOR,
        "encoder_config": config,
        **fields,
    }
    write_file(folder, "gliner_config.json", settings)
    head = Head(settings)
    torch.manual_seed(seed)
    for parameter in head.parameters():
        # large enough that scores differ, small enough that no probability is 0 or 1
        nn.init.normal_(
            parameter, std=1.4 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
        )
    # transformers names no pooler of an encoder that gliner has
    save_file(tensors | head.state_dict(), folder / WEIGHTS)
    return folder


def _save_tokenizer(tokenizer, folder):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    write_file(
        folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    )


def publish(folder, hub, **fields):
    """Save a model as it is at the hub, and the model of its encoder.

    An encoder of labels becomes `org/labels`.

    Returns:
        Both folders, `org/gliner` and `org/base` below `hub`.

    Args:
        folder: a saved model.
        hub: may not exist yet.
        fields: fields of gliner_config.json that differ.
    """
    published, base = hub / "org/gliner", hub / "org/base"
    published.mkdir(parents=True)
    settings = json.loads((folder / "gliner_config.json").read_text())
    del settings["encoder_config"], settings["class_token_index"], settings["vocab_size"]
    if "labels_encoder" in settings:
        del settings["labels_encoder_config"]
        settings["labels_encoder"] = "org/labels"
        shutil.copytree(folder / "label_encoder", hub / "org/labels")
    write_file(published, "gliner_config.json", {**settings, "model_name": "org/base", **fields})
    torch.save(load_file(folder / WEIGHTS), published / "pytorch_model.bin")
    shutil.copytree(folder / "encoder", base)
    # a class with a head; and rows that no token has, unless the library keeps them
    set_fields(base, "config.json", architectures=["DebertaV2ForMaskedLM"])
    if "labels_encoder" not in settings:
        set_fields(base, "config.json", vocab_size=999)
    write_file(base, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return published, base


def projection(features, out=None):
    """Return the two layers of a projection; the third layer is dropout."""
    out = out or features
    return nn.Sequential(
        nn.Linear(features, 4 * out), nn.ReLU(), nn.Identity(), nn.Linear(4 * out, out)
    )


class Head(nn.Module):
    """The layers behind an encoder, with the names of the library."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        hidden, width = config["hidden_size"], config["encoder_config"]["hidden_size"]
        self.token_rep_layer = nn.Module()
        if hidden != width:
            self.token_rep_layer.projection = nn.Linear(width, hidden)
        self.is_bi = config.get("labels_encoder") is not None
        if self.is_bi and (size := config["labels_encoder_config"]["hidden_size"]) != hidden:
            self.token_rep_layer.labels_projection = nn.Linear(size, hidden)
        if config["num_rnn_layers"]:
            self.rnn = nn.Module()
            self.rnn.lstm = nn.LSTM(
                hidden, hidden // 2, config["num_rnn_layers"], batch_first=True, bidirectional=True
            )
        if config["span_mode"] == "token_level":
            self.scorer = nn.Module()
            self.scorer.proj_token = nn.Linear(hidden, 2 * hidden)
            self.scorer.proj_label = nn.Linear(hidden, 2 * hidden)
            self.scorer.out_mlp = nn.Sequential(
                nn.Linear(3 * hidden, 4 * hidden),
                nn.Identity(),
                nn.ReLU(),
                nn.Linear(4 * hidden, 3),
            )
        else:
            spans = nn.Module()
            spans.project_start, spans.project_end = projection(hidden), projection(hidden)
            spans.out_project = projection(2 * hidden, hidden)
            self.span_rep_layer = nn.Module()
            self.span_rep_layer.span_rep_layer = spans
            self.prompt_rep_layer = projection(hidden)

    def vector(self, tokens):
        """Return the vector of a label, given the features of its tokens."""
        if hasattr(self.token_rep_layer, "labels_projection"):
            tokens = self.token_rep_layer.labels_projection(tokens)
        return tokens.mean(0)

    def forward(self, tokens, labels, words):
        """Return the logits of one text: `[words, width, labels]`, or `[words, labels, 3]`.

        `labels` are their tokens, or the vectors that an encoder of their own makes.
        """
        if hasattr(self.token_rep_layer, "projection"):
            tokens = self.token_rep_layer.projection(tokens)
        labels, words = labels if self.is_bi else tokens[labels], tokens[words]
        if self.config["num_rnn_layers"] and not self.is_bi:
            words = self.rnn.lstm(words[None])[0][0]
        if self.config["span_mode"] == "token_level":
            return self._of_words(words, labels)
        return self._of_spans(words, labels)

    def _of_spans(self, words, labels):
        spans, width = self.span_rep_layer.span_rep_layer, self.config["max_width"]
        starts, ends = spans.project_start(words), spans.project_end(words)
        first = torch.arange(len(words))[:, None].expand(-1, width)
        last = first + torch.arange(width)
        ends = ends[last.clamp(max=len(words) - 1)]
        found = spans.out_project(torch.cat([starts[first], ends], dim=-1).relu())
        scores = found @ self.prompt_rep_layer(labels).T
        return scores.masked_fill((last >= len(words))[..., None], -torch.inf)

    def _of_words(self, words, labels):
        hidden = words.shape[1]
        one, two = self.scorer.proj_token(words)[:, None].split(hidden, dim=-1)
        three, four = self.scorer.proj_label(labels)[None].split(hidden, dim=-1)
        shape = len(words), len(labels), hidden
        parts = [one.expand(shape), three.expand(shape), two * four]
        return self.scorer.out_mlp(torch.cat(parts, dim=-1))


class Gliner:
    """A saved model in fp32, one text at a time."""

    def __init__(self, folder):
        folder = Path(folder)
        self.config = json.loads((folder / "gliner_config.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tensors = load_file(folder / WEIGHTS)
        self.encoder = _load(self.config["encoder_config"], tensors, PREFIX)
        self.head = Head(self.config).eval()
        prefixes = PREFIX, LABELS_PREFIX
        self.head.load_state_dict({n: t for n, t in tensors.items() if not n.startswith(prefixes)})
        if self.head.is_bi:
            self.label_encoder = _load(self.config["labels_encoder_config"], tensors, LABELS_PREFIX)
            self.label_tokenizer = Tokenizer.from_file(
                str(folder / LABELS_TOKENIZER / "tokenizer.json")
            )

    @torch.inference_mode()
    def logits(self, text, labels):
        """Return the logits of a text, see `Head`."""
        words = [match.group() for match in WORD.finditer(text)][: self.config["max_len"]]
        before = [each for label in labels for each in (MARK, label)] + [SEPARATOR]
        if self.head.is_bi:
            before = []
        found = self.tokenizer.encode([*before, *words], is_pretokenized=True)
        numbers = [-1 if number is None else number for number in found.word_ids]
        last = self.config.get("subtoken_pooling") == "last"
        places = {}
        for place, number in enumerate(numbers):
            if last or number not in places:
                places[number] = place
        tokens = self.encoder(torch.tensor([found.ids])).last_hidden_state[0]
        of_words = [places[len(before) + i] for i in range(len(words))]
        if self.head.is_bi:
            return self.head(tokens, torch.stack([self._vector(each) for each in labels]), of_words)
        shift = 0 if self.config.get("embed_ent_token", True) else 1
        of_labels = [places[2 * index] + shift for index in range(len(labels))]
        return self.head(tokens, of_labels, of_words)

    def _vector(self, label):
        ids = self.label_tokenizer.encode(label).ids
        return self.head.vector(self.label_encoder(torch.tensor([ids])).last_hidden_state[0])

    def entities(self, text, labels, *, threshold=0.5, flat_ner=True, multi_label=False):
        """Return start, end, text, label and score of each span."""
        words = [match.span() for match in WORD.finditer(text)]
        if not words:
            return []
        scores = self.logits(text, labels).sigmoid()
        find = _spans_of_words if self.config["span_mode"] == "token_level" else _spans
        kept = []
        for span in sorted(find(scores, threshold), key=lambda each: -each[3]):
            if all(_fits(span, other, flat_ner, multi_label) for other in kept):
                kept.append(span)
        kept.sort(key=lambda each: each[0])
        return [
            (words[i][0], words[j][1], text[words[i][0] : words[j][1]], labels[label], score)
            for i, j, label, score in kept
        ]


def _load(config, tensors, prefix):
    """Return the encoder of a model."""
    config = dict(config)
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    encoder = transformers.AutoModel.from_config(config).eval()
    encoder.load_state_dict(
        {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)},
        strict=False,
    )
    return encoder


def thresholds_of(oracle, texts, labels, parts=(0.8, 0.97)):
    """Return thresholds that these parts of all scores do not exceed, between two scores each."""
    scores = torch.cat([oracle.logits(text, labels).flatten() for text in texts]).sigmoid()
    ordered = scores[scores > 0].sort().values.double()
    return [float(ordered[int(part * len(ordered)) :][:2].mean()) for part in parts]


def _spans(scores, threshold):
    for i, k, label in (scores > threshold).nonzero().tolist():
        yield i, i + k, label, float(scores[i, k, label])


def _spans_of_words(scores, threshold):
    starts, ends, insides = scores.unbind(-1)
    for i, label in (starts > threshold).nonzero().tolist():
        for j in (ends[:, label] > threshold).nonzero().flatten().tolist():
            inside = insides[i : j + 1, label]
            if j >= i and bool((inside >= threshold).all()):
                score = min(float(inside.min()), float(starts[i, label]), float(ends[j, label]))
                yield i, j, label, score


def _fits(span, other, flat_ner, multi_label):
    """Return whether both spans may be in an answer."""
    (a, b), (c, d) = span[:2], other[:2]
    if (a, b) == (c, d):
        return multi_label
    if b < c or d < a:
        return True
    return not flat_ner and ((a <= c and d <= b) or (c <= a and b <= d))
