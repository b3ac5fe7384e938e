"""Stands in for `AsyncClient`: answers that are computed from the input."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from varlen_client.calls import TokenizedText
from varlen_client.errors import InvalidRequest, ServerUnavailable
from varlen_client.gateway.embeddings import Classes
from varlen_client.gateway.tool_calls import PROBE_CHAT
from varlen_client.generation import GeneratedPart, Generation
from varlen_client.tasks.extraction import ContextAnswer, Span
from varlen_client.tasks.labels import RANK, RERANK, Entailment, LabelScore, Ranking
from varlen_client.tasks.vectors import EMBED, SparseVector
from varlen_client.wire import ModelInfo, ModelState

OUTPUTS = {
    "embedder": {"sentence_embedding": (4,)},
    "sparse": {"indices": (-1,), "values": (-1,)},
    "ranker": {"logits": (1,)},
    "classifier": {"logits": (3,)},
    "tagger": {"logits": (-1, 9)},
    "answerer": {"answers": (1,)},
    "filler": {"token_ids": (-1, 5), "num_masks": (1,)},
    "writer": {"text_output": (-1,)},
    "tokens": {"token_embeddings": (-1, 4)},
    "states": {"last_hidden_state": (-1, 4)},
    "unknown_width": {"last_hidden_state": (-1, -1)},
    "several": {
        "sentence_embedding": (4,),
        "sparse_indices": (-1,),
        "sparse_values": (-1,),
        "token_embeddings": (-1, 4),
    },
}
MODELS = tuple(OUTPUTS)


@dataclass
class Calls:
    """What the models were asked, and how they behave."""

    received: list = field(default_factory=list)
    """Each call: model, method, input and options."""
    delay: float = 0.0
    """Seconds before each answer, and before each part."""
    failure: Exception | None = None
    fail_after: int = 0
    """Number of parts before the failure."""
    least_logprob: float = -1.5
    """Log probability of the second most likely token."""
    utf8: dict = field(default_factory=dict)
    """UTF-8 of each token, by id; those that were not chosen are reported too. Empty is an older server."""
    logprob_of_row: dict = field(default_factory=dict)
    """Log probability of each token of a sample, where it is not -0.5."""
    empty_parts: int = 0
    """Number of parts without text before the others."""
    is_down: bool = False
    asked_models: int = 0
    asked_infos: list = field(default_factory=list)
    """Names of the models in each question for several infos."""
    counts_tokens: bool = True
    scores_of: Callable = field(default=lambda logits: logits)
    """Makes scores of the logits of a ranker."""
    settings: dict = field(default_factory=dict)
    """Settings of each model's config."""
    inputs: tuple = ()
    """Names of the inputs in each model's config."""
    prompt: str = ""
    """Put before each text that is tokenized."""
    render: Callable | None = None
    """Makes the prompt of a chat with variables, as its chat template does; None refuses chats with calls."""
    special_tokens: tuple = ()
    """Texts of special tokens."""
    texts: tuple = ()
    """Texts of the parts of each answer to a chat, in place of numbers."""
    end: str = "stop"
    """Why the last of them ends."""
    adapters: dict = field(default_factory=dict)
    """Adapters of each model, with reasons, or the error instead of them; only these models are of varlen."""
    asked_forms: int = 0
    """Number of chats that were rendered for their form."""
    asked_adapters: list = field(default_factory=list)
    """Names of the models whose adapters were asked for."""
    running: int = 0
    cancelled: int = 0
    closed: int = 0
    states: list = field(
        default_factory=lambda: [ModelState(name, "1", "READY") for name in MODELS]
    )


def vector_of(row):
    """Return the vector of a text or of token ids, of length 1."""
    seed = abs(sum(row.encode() if isinstance(row, str) else row))
    vector = np.random.default_rng(seed).normal(size=4)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def tokens_of(row):
    """Return the vectors of tokens: the characters of a text, or its ids."""
    tokens = [[each] if isinstance(each, int) else each for each in row]
    return (
        np.stack([vector_of(each) for each in tokens]) if tokens else np.empty((0, 4), np.float32)
    )


def score_of(texts):
    """Return the score of a text, a pair or token ids."""
    is_ids = all(isinstance(each, int) for each in texts)
    return float(vector_of(texts if is_ids else "".join(texts))[0])


ANSWERS = {
    "embed": lambda rows: np.stack([vector_of(row) for row in rows]),
    "sparse_embed": lambda rows: [
        SparseVector(np.array([9, 4], np.int32) + len(row), np.float32([2.5, 1.0])) for row in rows
    ],
    "token_embed": lambda rows: [tokens_of(row) for row in rows],
    "hidden": lambda rows: [tokens_of(row) for row in rows],
    "rerank": lambda rows: np.array([score_of(row) for row in rows]),
    "classify": lambda rows: Classes(
        np.float32([[score_of(row), -9] for row in rows]), ["best", "other"], [0] * len(rows)
    ),
    "token_classify": lambda rows: [tokens_of(row) for row in rows],
    "zero_shot": lambda rows: Entailment(
        np.float32([[0, 0, score_of(row)] for row in rows]),
        ["contradiction", "neutral", "entailment"],
    ),
    # the server's JSON
    "predict_entities": lambda rows: [
        b'[{"entity_group":"P\xc3\xa9","end":%d}]' % len(row) for row in rows
    ],
    "question_answer": lambda rows: [
        [ContextAnswer(0.5, 0, 3, context[:3]), ContextAnswer(0.25, 0, 0, "")][: len(question)]
        for question, context in rows
    ],
    "extract": lambda rows: [[Span(0, len(row), row, "person", 0.5)] for row in rows],
    "extract_schema": lambda rows: [{"entities": {}} for _ in rows],
    "predict": lambda rows: [
        [LabelScore("best", score_of(row)), LabelScore("other", -9.0)] for row in rows
    ],
}


def _given(options):
    return {name: each for name, each in options.items() if each is not None}


class FakeClient:
    """Stands in for an `AsyncClient` of one model."""

    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    async def models(self):
        self.calls.asked_models += 1
        if self.calls.is_down:
            raise ServerUnavailable("no connection to grpc server 10.0.0.1:8001")
        return self.calls.states

    async def close(self):
        self.calls.closed += 1

    async def counted(self, task, inputs, *, timeout=None, **options):
        await self._answer(task.method, inputs, options)
        # a row of rerank is a pair, whose query is the same in each
        texts = [row[1] for row in inputs] if task in (RERANK, RANK) else inputs
        rows = inputs
        if options.get("spans"):
            rows = [inputs[0][begin:end] for begin, end in options["spans"]]
        if task.method == "outputs":
            answers = {name: ANSWERS[name](rows) for name in options["tasks"]}
            answer = [
                dict(zip(answers, row, strict=True)) for row in zip(*answers.values(), strict=True)
            ]
        else:
            answer = ANSWERS[task.method](rows)
        if task is RANK:
            answer = Ranking(self.calls.scores_of(answer), np.argsort(-answer, kind="stable"))
        if task is EMBED:
            answer = answer[:, : options.get("dimensions")]
        return answer, sum(map(len, texts)) if self.calls.counts_tokens else None

    async def tokenize(self, inputs, *, timeout=None, **options):
        if inputs[0][:1] == PROBE_CHAT[:1]:
            if self.calls.render is None:
                raise InvalidRequest("the chat template of this model refuses the messages")
            prompt = self.calls.render(inputs[0], **options["chat_template_kwargs"])
            self.calls.asked_forms += 1
            return [self._tokens(prompt)]
        await self._answer("tokenize", inputs, _given(options))
        return [self._tokens(row) for row in inputs]

    async def detokenize(self, inputs, *, timeout=None, **options):
        if inputs[0][:1] == (1,):
            return [self._visible("".join(map(chr, row[1:])), **options) for row in inputs]
        await self._answer("detokenize", inputs, _given(options))
        return ["".join(map(chr, row)) for row in inputs]

    def _visible(self, text, skip_special_tokens=True):
        for each in self.calls.special_tokens if skip_special_tokens else ():
            text = text.replace(each, "")
        return text

    def _tokens(self, row):
        """Return a token for each character, behind a special one and the prompt."""
        text = row if isinstance(row, str) else row[0]["content"]
        whole = self.calls.prompt + text
        return TokenizedText(
            token_ids=(1, *map(ord, whole)),
            tokens=("<s>", *(f"▁{each}" for each in whole)),
            special=(True, *(False for _ in whole)),
            offsets=((0, 0), *((at, at + 1) for at in range(len(whole)))),
            prompt=self.calls.prompt,
            max_tokens=99,
        )

    async def model_info(self, *, timeout=None):
        return ModelInfo(
            self.name,
            8,
            OUTPUTS.get(self.name, OUTPUTS["embedder"]),
            self.calls.settings,
            inputs=self.calls.inputs,
            backend="varlen" if self.name in self.calls.adapters else "",
        )

    async def adapters(self, *, timeout):
        assert timeout
        self.calls.asked_adapters.append(self.name)
        found = self.calls.adapters[self.name]
        if isinstance(found, Exception):
            raise found
        return found

    async def model_infos(self, names):
        self.calls.asked_infos.append(list(names))
        await self._wait()
        return {name: await FakeClient(self.calls, name).model_info() for name in names}

    async def samples(self, prompt, n, *, timeout=None, **sampling):
        parts = [part async for part in self.stream_samples(prompt, n, **sampling)]
        return [
            Generation(
                "".join(part[row].text for part in parts),
                tuple(i for part in parts for i in part[row].token_ids),
                parts[-1][row].finish_reason if self.calls.texts else "length",
                7,
                tuple(each for part in parts for each in part[row].logprobs),
                tuple(each for part in parts for each in part[row].token_texts),
                tuple(each for part in parts for each in part[row].token_bytes),
            )
            for row in range(n)
        ]

    async def stream_samples(self, prompt, n, *, timeout=None, **sampling):
        self.calls.received.append((self.name, "generate", prompt, sampling))
        for at, text in enumerate(self.calls.texts, start=1):
            await self._wait()
            if self.calls.failure:
                raise self.calls.failure
            skips = sampling.get("skip_special_tokens", True)
            shown = self._visible(text, skip_special_tokens=skips)
            end = self.calls.end if at == len(self.calls.texts) else None
            reported = self._reported(0, at, shown, sampling)
            yield [GeneratedPart(shown, (at,), end, num_prompt_tokens=7, **reported)] * n
        if self.calls.texts:
            return
        tokens = sampling.get("max_tokens", 4)
        for _ in range(self.calls.empty_parts):
            yield [GeneratedPart("", (), num_prompt_tokens=7) for _ in range(n)]
        for step in range(tokens):
            await self._wait()
            if self.calls.failure and step == self.calls.fail_after:
                raise self.calls.failure
            yield [
                # sample 1 ends a token before the others
                GeneratedPart("", (), "stop", num_prompt_tokens=7)
                if row == 1 and step == tokens - 1 and tokens > 1
                else GeneratedPart(
                    f"{row}.{step} ",
                    (step,),
                    "stop"
                    if row == 1 and step == tokens - 2
                    else "length"
                    if step == tokens - 1
                    else None,
                    **self._reported(row, step, f"{row}.{step} ", sampling),
                    num_prompt_tokens=7,
                )
                for row in range(n)
            ]

    def _reported(self, row, step, text, sampling):
        """Return the log probabilities of a token, with texts and bytes."""
        if "logprobs" not in sampling:
            return {}
        if not self.calls.utf8:
            logprobs = {
                step: self.calls.logprob_of_row.get(row, -0.5),
                90: self.calls.least_logprob,
            }
            return {"logprobs": (logprobs,), "token_texts": ({step: text, 90: "é"},)}
        utf8 = {step: text.encode(), **self.calls.utf8}
        likely = [step, *(each for each in self.calls.utf8 if each >= 90)]
        return {
            "logprobs": ({each: -0.5 - at for at, each in enumerate(likely)},),
            "token_texts": ({each: utf8[each].decode(errors="replace") for each in likely},),
            "token_bytes": ({each: utf8[each] for each in likely},),
        }

    async def _answer(self, method, inputs, options):
        self.calls.received.append((self.name, method, inputs, options))
        await self._wait()
        if self.calls.failure:
            raise self.calls.failure

    async def _wait(self):
        self.calls.running += 1
        try:
            await asyncio.sleep(self.calls.delay)
        except asyncio.CancelledError:
            self.calls.cancelled += 1
            raise
        finally:
            self.calls.running -= 1
