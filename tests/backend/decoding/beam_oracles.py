"""Beam searches on tiny models, and the answers of Hugging Face's `generate` to compare with."""

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel

from varlen.decoding.beam_search import BeamSearch
from varlen.decoding.token_edits import TokenRules
from varlen.generation_options import GenerationOptions

VOCABULARY = 60
PAD, EOS = 1, 2
# Hugging Face fills up missing answers with this score.
PLACEHOLDER_SCORE = -1e9


@dataclass(frozen=True)
class Case:
    """Prompts of one length that are searched with the same options.

    Attributes:
        model: "bart" or "gpt2".
        seed: of the weights.
        boost: added to the logit of the end token.
        prompts: `[prompts, tokens]`; sources of an encoder-decoder.
        options: of `GenerationOptions`.
        rules: of `TokenRules`.
    """

    model: str
    seed: int
    boost: float
    prompts: list[list[int]]
    options: dict
    rules: dict = field(default_factory=dict)

    @property
    def width(self):
        return self.options["num_beams"]

    @property
    def end_ids(self):
        return self.rules.get("end_ids", (EOS,))


class TinyModel:
    """A random model whose next tokens are neither certain nor all alike."""

    def __init__(self, kind, seed, boost):
        torch.manual_seed(seed)
        self.is_encoder_decoder = kind == "bart"
        if self.is_encoder_decoder:
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
            self.model = BartForConditionalGeneration(config).eval()
        else:
            config = GPT2Config(
                vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64
            )
            config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, EOS, PAD
            self.model = GPT2LMHeadModel(config).eval()
        with torch.no_grad():
            for weight in self.model.parameters():
                # norms of GPT-2 start at 1
                weight.mul_(6 if self.is_encoder_decoder else 3)
        self.boost = torch.zeros(VOCABULARY)
        self.boost[EOS] = boost
        self.model.lm_head.register_forward_hook(lambda _head, _inputs, out: out + self.boost)

    def start(self, prompt):
        """Return the tokens before the first generated one."""
        return [EOS] if self.is_encoder_decoder else prompt

    @torch.no_grad()
    def logprobs(self, sources, sequences):
        """Return the log probabilities after each sequence, `[sequences, vocabulary]` fp32."""
        ids = torch.tensor(sequences)
        inputs = {"input_ids": ids}
        if self.is_encoder_decoder:
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
        ids = torch.tensor(case.prompts)
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_return_sequences=case.width,
            eos_token_id=list(case.end_ids),
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **given,
        )
        skipped = len(self.start(case.prompts[0]))
        rows = [cut(row[skipped:], case.end_ids) for row in found.sequences.tolist()]
        scores = [0.0] * len(rows) if case.width == 1 else found.sequences_scores.tolist()
        answers = list(zip(rows, scores, strict=True))
        return [answers[at : at + case.width] for at in range(0, len(answers), case.width)]

    def search(self, case, noise=None):
        """Return the answers of our search to each prompt, all in the same steps.

        noise: generator of errors that are added to the log probabilities, of the size of rounding errors.
        """
        options = GenerationOptions(**case.options, n=case.width)
        rules = TokenRules(**{"end_ids": case.end_ids, **case.rules})
        searches = [
            BeamSearch(options, self.start(prompt), rules=rules, vocab_size=VOCABULARY)
            for prompt in case.prompts
        ]
        answers = [None] * len(searches)
        while live := [index for index, found in enumerate(answers) if found is None]:
            beams = [(index, row) for index in live for row in range(searches[index].num_rows)]
            rows = self.logprobs(
                [case.prompts[index] for index, _ in beams],
                [
                    [*self.start(case.prompts[index]), *searches[index].token_ids(row)]
                    for index, row in beams
                ],
            )
            if noise is not None:
                rows = rows * (1 + noise.uniform(-1e-5, 1e-5, rows.shape)).astype(np.float32)
            for index in live:
                own = rows[: searches[index].num_rows]
                rows = rows[len(own) :]
                answers[index] = advance(searches[index], own).answers
        return answers


def advance(search, logprobs, num_candidates=None):
    """Take a step of a search, given all log probabilities of its rows.

    num_candidates: number of candidates to give it; None is what it asks for.
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
    tokens = np.argsort(-logprobs, axis=1, kind="stable").astype(np.int32)
    tokens = tokens[:, : num_candidates or search.width]
    return search.advance(tokens, np.take_along_axis(logprobs, tokens, axis=1))


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
        answers = None
        while answers is None:
            rows = [self.logprobs(search.token_ids(row)) for row in range(search.num_rows)]
            answers = advance(search, np.array(rows, np.float32), num_candidates).answers
        return answers

    def score(self, token_ids):
        """Return the sum of the log probabilities of generated tokens."""
        return sum(self.logprobs(token_ids[:at])[token] for at, token in enumerate(token_ids))


def cut(tokens, end_ids):
    """Return the tokens up to and with the first end token."""
    ends = [at for at, token in enumerate(tokens) if token in end_ids]
    return tuple(tokens[: ends[0] + 1] if ends else tokens)
