"""Options of a generation request: how tokens are chosen and when to stop.

Names, defaults and meanings are those of vLLM's sampling parameters, so its clients fit.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Checked options of one request.

    Attributes:
        max_tokens, min_tokens: largest and smallest number of generated tokens.
        n: number of samples of each prompt.
        temperature: divides the logits; 0 chooses the most likely token.
        top_k: number of most likely tokens that may be chosen; 0 is all.
        top_p: the smallest set of most likely tokens with at least this probability may be chosen.
        min_p: tokens with less than this share of the largest probability are not chosen.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that prompt or answer hold.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens that the answer holds, once or for
            each time.
        seed: of the random numbers; None chooses one when the request arrives.
        stop: strings that end the answer.
        stop_token_ids: tokens that end the answer, beside the checkpoint's own.
        ignore_eos: whether the checkpoint's own end tokens do not end the answer.
        include_stop_str_in_output: whether the answer keeps the string that ended it.
        skip_special_tokens: whether the text leaves out special tokens.
        logprobs: number of most likely tokens reported with each token; None reports no probability.
        grammar: what the answer has to match, as a grammar of `decoding.structured`; None is any text.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    grammar: str | None = None
