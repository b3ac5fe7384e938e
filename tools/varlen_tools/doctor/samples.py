"""Texts of many kinds and lengths, on which answers are compared."""

from itertools import cycle, islice, pairwise

from varlen.intake.tokenization import Text
from varlen.tasks import Task
from varlen_tools.sample_texts import TEXTS

# Longest text that is compared, in tokens: a longer one takes the original library too long.
LONGEST = 512
# Texts of a task of many steps.
_PROMPTS = 4


def sample_inputs(task: Task, limit: int) -> list[Text]:
    """Return texts, pairs for `rerank`, both for `classify`; up to more than `limit` tokens."""
    words = " ".join(TEXTS).split()
    long = [" ".join(islice(cycle(words), count)) for count in (limit // 8, limit // 2, 2 * limit)]
    texts = [text for text in (*TEXTS, *long) if text]
    if task == "rerank":
        return list(pairwise(texts))
    if task == "classify":
        return [*texts, *pairwise(texts)]
    return list(texts)


def sample_prompts() -> list[str]:
    """Return the prompts of a task of many steps."""
    return [text for text in TEXTS if text][:_PROMPTS]
