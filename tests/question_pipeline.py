"""The arithmetic of `QuestionAnsweringPipeline` of transformers 4.57, which transformers 5 no longer has.

Source: src/transformers/pipelines/question_answering.py of huggingface/transformers v4.57.6. The installed
libraries run the model and make the windows. Scores are a full matrix of all spans. This module does not use varlen.
"""

import numpy as np
import torch
import transformers

# Special tokens of `tests.checkpoints`.
_TOKENS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
# Positions of their encoders.
MAX_TOKENS = 64


class QuestionPipeline:
    """A checkpoint that answers questions in transformers.

    Args:
        gives_types: whether the model gets token types.
    """

    def __init__(self, folder, kind, *, gives_types, side="right"):
        self.model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            truncation_side=side,
            model_max_length=MAX_TOKENS,
            **_TOKENS,
        )
        self.gives_types = gives_types

    def windows(self, question, context, *, max_seq_len=None, doc_stride=None):
        """Return the encodings of the windows of a context."""
        longest = max_seq_len or min(self.tokenizer.model_max_length, 384)
        stride = min(longest // 2, 128) if doc_stride is None else doc_stride
        encoded = self.tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=longest,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        return encoded.encodings

    def logits(self, window):
        """Return the logits of a window, `[tokens, 2]`."""
        given = {"input_ids": torch.tensor([window.ids])}
        if self.gives_types:
            given["token_type_ids"] = torch.tensor([window.type_ids])
        with torch.inference_mode():
            output = self.model(**given)
        return torch.stack([output.start_logits[0], output.end_logits[0]], dim=-1)

    def __call__(self, question, context, *, top_k=1, max_answer_len=15, **options):
        """Return the answers of a question, the best first."""
        impossible = options.pop("handle_impossible_answer", False)
        align = options.pop("align_to_words", True)
        lowest, answers = 1_000_000, []
        for window in self.windows(question, context, **options):
            inside = np.array([each == 1 for each in window.sequence_ids])
            inside |= np.array(window.ids) == self.tokenizer.cls_token_id
            begins, ends = (
                softmax(np.where(inside, each, np.float32(-10000)))
                for each in self.logits(window).numpy().T
            )
            lowest = min(lowest, float(begins[0] * ends[0]))
            begins[0] = ends[0] = 0
            # spans that end before they begin, or are too long, have the score 0
            scores = np.tril(np.triu(begins[:, None] * ends), max_answer_len - 1)
            order = np.argsort(-scores, axis=None, kind="stable")
            for place in order[: top_k * 2 + 10 if align else top_k]:
                first, last = np.unravel_index(place, scores.shape)
                # the pipeline also lists spans of score 0, whose texts mean nothing
                if scores[first, last] > 0:
                    start, end = bounds(window, int(first), int(last), align)
                    merge(answers, float(scores[first, last]), start, end, context[start:end])
        if impossible:
            answers.append({"score": lowest, "start": 0, "end": 0, "answer": ""})
        return sorted(answers, key=lambda each: each["score"], reverse=True)[:top_k]


def softmax(logits):
    """Return probabilities in fp32."""
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def bounds(window, first, last, align):
    """Return the first character of a span, and the one behind its last."""
    if not align:
        return window.offsets[first][0], window.offsets[last][1]
    words = window.token_to_word(first), window.token_to_word(last)
    return window.word_to_chars(words[0], 1)[0], window.word_to_chars(words[1], 1)[1]


def merge(answers, score, start, end, text):
    """Add an answer to a list, or its score to one with the same letters."""
    for each in answers:
        if each["answer"].lower() == text.lower():
            each["score"] += score
            return
    answers.append({"score": score, "start": start, "end": end, "answer": text})
