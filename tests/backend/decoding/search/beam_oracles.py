"""Beam searches on tiny models, and the answers of Hugging Face's `generate` to compare with."""

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel

from varlen.decoding.search.beam_search import BeamSearch
from varlen.decoding.search.searcher import ranked
from varlen.decoding.token_edits import ForbiddenTokens, TokenRules
from varlen.request.generation import GenerationOptions

VOCABULARY = 60
PAD, EOS = 1, 2
# Hugging Face fills up missing answers with this score.
PLACEHOLDER_SCORE = -1e9
NUM_PROMPTS = 8
RELATIVE_ERROR = 1e-4
# Names of rules among the options of a request.
REQUEST_NAMES = {
    "forced_first_id": "forced_bos_token_id",
    "forced_last_id": "forced_eos_token_id",
    "suppressed_ids": "suppress_tokens",
    "first_suppressed_ids": "begin_suppress_tokens",
}


@dataclass(frozen=True)
class Case:
    """Prompts of one length that are searched with the same options.

    Attributes:
        model: "bart" or "gpt2".
        seed: seed of the weights.
        boost: added to the logit of the end token.
        prompts: `[prompts, tokens]`; sources of an encoder-decoder.
        options: fields of `GenerationOptions`.
        rules: fields of `TokenRules`.
        bad_words: token sequences that no answer holds.
    """

    model: str
    seed: int
    boost: float
    prompts: list[list[int]]
    options: dict
    rules: dict = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def num_beams(self):
        return self.options["num_beams"]

    @property
    def end_ids(self):
        return self.rules.get("end_ids", (EOS,))


class Oracle:
    """A model of transformers: its `generate`, and our search over its log probabilities.

    Attributes:
        model: the model.
        rules: fields of `TokenRules`, unless the case has its own.
    """

    def __init__(self, model, rules=None):
        self.model = model.eval()
        self.rules = rules or {}
        self._renormalizes = model.generation_config.renormalize_logits

    def start(self, prompt):
        """Return the tokens before the first generated one."""
        config = self.model.config
        return [config.decoder_start_token_id] if config.is_encoder_decoder else prompt

    @torch.no_grad()
    def logprobs(self, sources, sequences):
        """Return the log probabilities after each sequence, `[sequences, vocabulary]` fp32."""
        ids = torch.tensor(sequences)
        inputs = {"input_ids": ids}
        if self.model.config.is_encoder_decoder:
            inputs = {"input_ids": torch.tensor(sources), "decoder_input_ids": ids}
        logits = self.model(**inputs).logits[:, -1]
        return torch.log_softmax(logits.float(), dim=-1).numpy()

    @torch.no_grad()
    def generate(self, case):
        """Return token ids and scores of the answers to each prompt, by `generate`."""
        names = {
            "forced_first_id": "forced_bos_token_id",
            "forced_last_id": "forced_eos_token_id",
            "suppressed_ids": "suppress_tokens",
            "first_suppressed_ids": "begin_suppress_tokens",
        }
        given = dict(case.options)
        given |= {names[name]: value for name, value in case.rules.items() if name in names}
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            if name in given:
                given[name] = list(given[name])
        given["max_new_tokens"] = given.pop("max_tokens")
        if "min_tokens" in given:
            given["min_new_tokens"] = given.pop("min_tokens")
        if case.bad_words:
            given["bad_words_ids"] = [list(each) for each in case.bad_words]
        ids = torch.tensor(case.prompts)
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_return_sequences=case.num_beams,
            eos_token_id=list(case.end_ids),
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **given,
        )
        skipped = len(self.start(case.prompts[0]))
        rows = [cut(row[skipped:], case.end_ids) for row in found.sequences.tolist()]
        scores = [0.0] * len(rows) if case.num_beams == 1 else found.sequences_scores.tolist()
        answers = list(zip(rows, scores, strict=True))
        return [answers[at : at + case.num_beams] for at in range(0, len(answers), case.num_beams)]

    def search(self, case, noise=None):
        """Return the answers of our search to each prompt, all in the same steps.

        noise: generator of errors that are added to the log probabilities, of the size of rounding errors.
        """
        options = GenerationOptions(**case.options, n=case.num_beams)
        rules = TokenRules(**{"end_ids": case.end_ids, **self.rules, **case.rules})
        vocab_size = self.model.get_output_embeddings().out_features
        forbidden = ForbiddenTokens.of(case.bad_words, vocab_size)
        searches = [
            BeamSearch(
                options,
                self.start(prompt),
                rules=rules,
                vocab_size=vocab_size,
                forbidden=forbidden,
            )
            for prompt in case.prompts
        ]
        answers = [None] * len(searches)
        beams = [[self.start(prompt)] for prompt in case.prompts]
        while live := [index for index, found in enumerate(answers) if found is None]:
            rows = self.logprobs(
                [case.prompts[index] for index in live for _ in beams[index]],
                [beam for index in live for beam in beams[index]],
            )
            if noise is not None:
                rows = rows * (1 + noise.uniform(-1e-5, 1e-5, rows.shape)).astype(np.float32)
            for index in live:
                assert searches[index].num_rows == len(beams[index])
                own = rows[: len(beams[index])]
                rows = rows[len(own) :]
                step = advance(searches[index], own, renormalizes=self._renormalizes)
                answers[index] = step.answers
                beams[index] = extended(beams[index], step)
        return answers


class TinyModel(Oracle):
    """A random model whose next tokens are neither certain nor all alike."""

    def __init__(self, kind, seed, boost):
        torch.manual_seed(seed)
        is_encoder_decoder = kind == "bart"
        if is_encoder_decoder:
            sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
            sizes |= {f"{half}_attention_heads": 2 for half in ("encoder", "decoder")}
            sizes |= {f"{half}_ffn_dim": 32 for half in ("encoder", "decoder")}
            config = BartConfig(
                vocab_size=VOCABULARY,
                **sizes,
                max_position_embeddings=64,
                pad_token_id=PAD,
                bos_token_id=0,
                eos_token_id=EOS,
                decoder_start_token_id=EOS,
                forced_eos_token_id=None,
            )
            model = BartForConditionalGeneration(config)
        else:
            config = GPT2Config(
                vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64
            )
            config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, EOS, PAD
            model = GPT2LMHeadModel(config)
        with torch.no_grad():
            for weight in model.parameters():
                # norms of GPT-2 start at 1
                weight.mul_(6 if is_encoder_decoder else 3)
        boosts = torch.zeros(VOCABULARY)
        boosts[EOS] = boost
        model.lm_head.register_forward_hook(lambda _head, _inputs, out: out + boosts)
        super().__init__(model)


def advance(search, logprobs, num_candidates=None, *, renormalizes=False):
    """Take a step of a search, given all log probabilities of its rows.

    num_candidates: number of candidates to give it; None is what it asks for.
    renormalizes: whether log probabilities are normalized again after edits.
    """
    if search.forced is not None:
        return search.advance_forced()
    if search.is_sampled:
        return search.advance_sampled(logprobs)
    logprobs = np.array(logprobs, dtype=np.float32)
    edits = search.edits()
    if edits is not None:
        banned = np.isinf(edits.factors)
        logprobs[edits.rows, edits.tokens] *= np.where(banned, 1, edits.factors)
        logprobs[edits.rows[banned], edits.tokens[banned]] = -np.inf
    if renormalizes:
        logprobs -= np.log(np.exp(logprobs).sum(1, keepdims=True))
    tokens = np.argsort(-logprobs, axis=1, kind="stable").astype(np.int32)
    tokens = tokens[:, : num_candidates or search.num_candidates]
    scores = np.array(search.scores)[:, None] + np.take_along_axis(logprobs, tokens, axis=1)
    [candidates] = ranked(tokens, scores, [len(tokens)])
    return search.advance(candidates)


def extended(beams, step):
    """Return the tokens of each beam after a step."""
    return [
        [*beams[parent], token] for parent, token in zip(step.parents, step.token_ids, strict=True)
    ]


class TableModel:
    """Random log probabilities that depend on the last token and the length."""

    def __init__(self, vocab_size, seed=0):
        logits = np.random.default_rng(seed).standard_normal((16, vocab_size + 1, vocab_size))
        self.vocab_size = vocab_size
        self._table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def logprobs(self, token_ids):
        """Return the log probabilities after these generated tokens, `[vocabulary]` fp64."""
        return self._table[len(token_ids), token_ids[-1] if token_ids else -1]

    def run(self, search, num_candidates=None):
        """Return the answers of a search."""
        answers, beams = None, [[]]
        while answers is None:
            rows = [self.logprobs(beam) for beam in beams]
            step = advance(search, np.array(rows, np.float32), num_candidates)
            answers, beams = step.answers, extended(beams, step)
        return answers

    def score(self, token_ids):
        """Return the sum of the log probabilities of generated tokens."""
        return sum(self.logprobs(token_ids[:at])[token] for at, token in enumerate(token_ids))


def cut(tokens, end_ids):
    """Return the tokens up to and with the first end token."""
    ends = [at for at, token in enumerate(tokens) if token in end_ids]
    return tuple(tokens[: ends[0] + 1] if ends else tokens)


def random_case(kind, num_beams, early_stopping, rng):
    """Return prompts and options of one call of `generate`."""
    options = {"num_beams": num_beams, "max_tokens": rng.choice([1, 3, 6, 10, 12])}
    rules = {}
    if num_beams > 1:
        options["early_stopping"] = early_stopping
        options["length_penalty"] = rng.choice([-1.0, -0.5, 0.0, 0.6, 1.0, 2.0])
        if rng.random() < 0.4:
            options["no_repeat_ngram_size"] = rng.choice([1, 2, 3])
        if rng.random() < 0.4:
            options["repetition_penalty"] = rng.choice([0.7, 1.3, 2.0])
    if rng.random() < 0.3:
        options["min_tokens"] = min(rng.choice([1, 3, 7]), options["max_tokens"])
    if rng.random() < 0.3:
        rules["end_ids"] = (EOS, *rng.sample(range(3, VOCABULARY), rng.choice([1, 3])))
    if rng.random() < 0.3:
        rules["forced_first_id"] = rng.choice([EOS, 7, 9])
    if rng.random() < 0.3:
        rules["forced_last_id"] = EOS
    if rng.random() < 0.3:
        rules["suppressed_ids"] = tuple(rng.sample(range(10, VOCABULARY), 20))
    if rng.random() < 0.3:
        rules["first_suppressed_ids"] = tuple(rng.sample(range(10, VOCABULARY), 20))
    if num_beams > 1 and rng.random() < 0.5:
        # what a request asks for comes before what the checkpoint has
        given = {name: rules.pop(name) for name in REQUEST_NAMES if name in rules}
        options |= {REQUEST_NAMES[name]: value for name, value in given.items()}
    length = rng.randrange(1, 9)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(NUM_PROMPTS)]
    return Case(kind, rng.randrange(4), rng.choice([0.0, 1.0, 3.0]), prompts, options, rules)


def are_equal(expected, actual):
    """Return whether tokens and scores of all answers to one prompt are equal.

    Where fewer answers exist than beams, as all other tokens are banned, `generate` fills up its result with copies
    whose score is near -1e9. They are no answers.
    """
    expected = [each for each in expected if each[1] > PLACEHOLDER_SCORE / 1000]
    return [tokens for tokens, _ in expected] == [answer.token_ids for answer in actual] and all(
        abs(score - answer.score) <= RELATIVE_ERROR * max(abs(score), 0.01)
        for (_, score), answer in zip(expected, actual, strict=True)
    )


def is_tie(case, row, expected, model):
    """Return whether rounding errors of the log probabilities decide about the answers.

    `generate` runs other shapes, with a cache, so two scores that are equal but for rounding may change places. Then a
    search with errors of this size finds the same answers.
    """
    noise = np.random.default_rng(0)
    return any(are_equal(expected, model.search(case, noise)[row]) for _ in range(20))
