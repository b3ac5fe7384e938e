"""Names of options that clients of other servers send: what each one becomes here.

A name is another name of an option of ours, or a value that asks for nothing, or is refused with a reason. So nothing
that a caller meant is dropped silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from varlen.errors import RequestError
from varlen.parameter import FLAG, MAX_INT32, Parameter, refuse
from varlen.tasks import TASKS, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOption:
    """The fate of one name.

    Attributes:
        option: our name of the same option; empty if there is none.
        kind: field of `structured_outputs` that the value is.
        nothing: parameter whose default asks for nothing; any of its values does if the default is None.
        remedy: name to send instead, or the reason why there is none.
    """

    option: str = ""
    kind: str = ""
    nothing: Parameter | None = None
    remedy: str = ""

    def check_nothing(self, name: str, value: object) -> None:
        """Raise RequestError unless a value without an option of ours asks for nothing."""
        if self.nothing is None:
            raise RequestError(f"{name} is not served; {self.remedy}")
        read = self.nothing.from_json(value)
        if not self.nothing.allows(read) or self.nothing.default not in (None, read):
            refuse(name, value, f"{self.nothing.allowed}; {self.remedy}")


def _same(option: str) -> ForeignOption:
    return ForeignOption(option=option)


def _grammar(kind: str) -> ForeignOption:
    return ForeignOption(option="structured_outputs", kind=kind)


def _refused(remedy: str) -> ForeignOption:
    return ForeignOption(remedy=remedy)


def _flag(value: bool, remedy: str) -> ForeignOption:
    word = "true" if value else "false"
    return ForeignOption(
        nothing=Parameter(value, "", choices=FLAG, allowed_text=word), remedy=remedy
    )


def _number(value: float, remedy: str) -> ForeignOption:
    only = Parameter(
        value, "", lowest=value, highest=value, is_whole=False, allowed_text=format(value, "g")
    )
    return ForeignOption(nothing=only, remedy=remedy)


def _input(tensor: Tensor) -> ForeignOption:
    remedy = f"it is an input of the model: send the tensor {tensor.name}"
    is_request = tensor.name == "stream" or tensor.name.startswith("return_")
    return _flag(False, remedy) if is_request else _refused(remedy)


_PADDING = ForeignOption(
    nothing=Parameter(None, "", lowest=-1, highest=MAX_INT32), remedy="there is no padding"
)
_CUT = "generation does not truncate: send a shorter prompt"
_LENGTH = "servers count the prompt or leave it out"
_DRAFT = (
    "drafts come from the setting speculation, and an adapter is named by the parameter adapter"
)
_DECAY = "top_p is the same for all tokens of an answer"
_CODE = "code of a client does not run here"

FOREIGN_OPTIONS: Mapping[str, ForeignOption] = MappingProxyType(
    {
        # NVIDIA's backend of TensorRT-LLM
        "stop_words": _same("stop"),
        "beam_width": _same("num_beams"),
        "random_seed": _same("seed"),
        "runtime_top_k": _same("top_k"),
        "runtime_top_p": _same("top_p"),
        "len_penalty": _same("length_penalty"),
        "request_output_len": _same("max_tokens"),
        "end_id": _same("stop_token_ids"),
        "pad_id": _PADDING,
        "embedding_bias_words": _refused("send logit_bias, by token id"),
        "embedding_bias_weights": _refused("send logit_bias, by token id"),
        "return_log_probs": _flag(False, "send return_cumulative_logprob or return_logprobs"),
        "return_context_logits": _flag(False, "logits are not sent; send logprobs"),
        "return_generation_logits": _flag(False, "logits are not sent; send logprobs"),
        "beam_search_diversity_rate": _number(0, "send num_beam_groups and diversity_penalty"),
        "streaming": _flag(False, "send the input stream"),
        "guided_decoding_guide_type": _refused("send structured_outputs"),
        "guided_decoding_guide": _refused("send structured_outputs"),
        "prompt_embedding_table": _refused("prompts are texts, token ids or messages"),
        "draft_input_ids": _refused(_DRAFT),
        "lora_task_id": _refused(_DRAFT),
        "lora_config": _refused(_DRAFT),
        "lora_weights": _refused(_DRAFT),
        "stop_words_list": _refused("send stop, as texts"),
        "bad_words_list": _refused("send bad_words, as texts"),
        "top_p_decay": _refused(_DECAY),
        "top_p_min": _refused(_DECAY),
        "top_p_reset_ids": _refused(_DECAY),
        # vLLM, and OpenAI's clients of it
        "guided_json": _grammar("json"),
        "guided_regex": _grammar("regex"),
        "guided_choice": _grammar("choice"),
        "guided_grammar": _refused("send structured_outputs with json, regex or choice"),
        "response_format": _refused("send structured_outputs with json or json_object"),
        "detokenize": _flag(True, "the answer has token ids too: send return_output_ids"),
        "spaces_between_special_tokens": _flag(True, "texts of special tokens are not spaced"),
        "use_beam_search": _flag(False, "num_beams above 1 is beam search"),
        "add_special_tokens": _flag(True, "send input_ids for a prompt without special tokens"),
        "allowed_token_ids": _refused("send structured_outputs, or logit_bias"),
        "prompt_logprobs": _refused("log probabilities of prompts are not computed"),
        "truncate_prompt_tokens": _refused(_CUT),
        "max_completion_tokens": _same("max_tokens"),
        "top_logprobs": _refused("send logprobs with this number"),
        "guided_whitespace_pattern": _refused("send structured_outputs with a regex"),
        "structural_tag": _refused("send structured_outputs with json, regex or choice"),
        "logits_processors": _refused(_CODE),
        "extra_args": _refused(_CODE),
        "vllm_xargs": _refused(_CODE),
        "thinking_token_budget": _number(-1, "thinking has no limit of its own: send max_tokens"),
        "echo": _flag(False, "send exclude_input_in_output: false"),
        "suffix": _refused("texts are not filled in"),
        "tools": _refused("tools are not served"),
        # TGI, and Hugging Face's `generate`
        "max_new_tokens": _same("max_tokens"),
        "min_new_tokens": _same("min_tokens"),
        "num_return_sequences": _same("n"),
        "stop_sequences": _same("stop"),
        "stop_strings": _same("stop"),
        "eos_token_id": _same("stop_token_ids"),
        "pad_token_id": _PADDING,
        "max_length": _refused(f"{_LENGTH}: send max_tokens"),
        "min_length": _refused(f"{_LENGTH}: send min_tokens"),
        "typical_p": _number(1, "typical sampling is not served"),
        "watermark": _flag(False, "answers get no watermark"),
        "truncate": _flag(False, _CUT),
        "details": _flag(False, "send return_finish_reason, return_logprobs and the like"),
        "decoder_input_details": _flag(False, "log probabilities of prompts are not computed"),
        "return_full_text": _refused("send exclude_input_in_output"),
        "top_n_tokens": _refused("send logprobs with this number"),
        "adapter_id": _refused(_DRAFT),
        "grammar": _refused("send structured_outputs"),
        "bad_words_ids": _refused("send bad_words, as texts"),
        "sequence_bias": _refused("send logit_bias, by token id"),
        "force_words_ids": _refused("send structured_outputs"),
        "penalty_alpha": _number(0, "contrastive search is not served"),
        "guidance_scale": _number(1, "classifier-free guidance is not served"),
        "epsilon_cutoff": _number(0, "send min_p"),
        "eta_cutoff": _number(0, "send min_p"),
        "top_h": _refused("send top_p or min_p"),
        "renormalize_logits": _flag(False, "scores are of the logits as they are"),
        "max_time": _refused("send deadline_ms"),
        "exponential_decay_length_penalty": _refused("send length_penalty with num_beams"),
        "forced_decoder_ids": _refused("only forced_bos_token_id of the checkpoint is served"),
        "constraints": _refused("send structured_outputs"),
        # inputs, which a client may send as parameters
        **{tensor.name: _input(tensor) for tensor in TASKS["generate"].inputs},
    }
)
