"""A model of random logits whose answers have grammars, in processes of their own."""

import torch

from tests.backend.decoding.sandboxes import new_grammars
from tests.backend.decoding.sequences import RandomModel, sample, sequence_of
from tests.backend.decoding.text.small_tokenizers import END
from varlen.decoding.sampling.sampling import Sampler
from varlen.decoding.text.writer import TextWriter, TokenBytes
from varlen.decoding.token_edits import BadWords
from varlen.request.generation import GenerationOptions

CHOICES = ["red", "red green", 'say "no"\\/', "café 你好 😀"]


class Server:
    """A model of random logits with all that decodes its tokens."""

    def __init__(self, tokenizer, **limits):
        self.tokenizer = tokenizer
        self.eos_id = tokenizer.token_to_id(END)
        # wider than the tokenizer, as checkpoints are
        self.model = RandomModel(tokenizer.get_vocab_size() + 13, scale=4.0)
        self.grammars = new_grammars(tokenizer, self.model.vocab_size, [self.eos_id], **limits)
        self.sampler = Sampler(
            self.model.vocab_size,
            [self.eos_id],
            self.grammars,
            BadWords(tokenizer, self.model.vocab_size, [self.eos_id]),
            torch.device("cpu"),
        )

    def sequence(self, structured, **options):
        options = GenerationOptions.from_parameters(
            {"structured_outputs": structured, "max_tokens": 200, **options}
        )
        self.grammars.check(options.grammar)
        fields = {name: getattr(options, name) for name in options.__dataclass_fields__}
        return sequence_of(1, 2, **fields)

    def answers(self, sequences):
        """Return text and finish reason of each sequence, or text and error."""
        writers = [
            TextWriter(
                self.tokenizer,
                each.generation,
                prompt_ids=each.token_ids,
                eos_ids=[self.eos_id],
                token_bytes=TokenBytes(self.tokenizer),
            )
            for each in sequences
        ]
        answers = [["", None] for _ in sequences]
        while running := [row for row, answer in enumerate(answers) if answer[1] is None]:
            step = [sequences[row] for row in running]
            tokens = sample(self.sampler, self.model.logits(step), step)
            for row, token in zip(running, tokens, strict=True):
                if token.is_pending:
                    continue
                if token.error is not None:
                    answers[row][1] = token.error
                    continue
                part = writers[row].write(token)
                sequences[row].token_ids.append(token.token_id)
                answers[row][0] += part.text
                answers[row][1] = part.finish_reason
        return answers
