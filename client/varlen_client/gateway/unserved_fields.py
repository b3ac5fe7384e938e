"""Fields of the originals that would change an answer: refused, each with its reason.

A field that stands neither in a form nor here is unknown, and ignored. A form names its tables in `Object.unserved`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

# Values that ask for nothing, whatever the field; 0 is no such value, since vLLM's `prompt_logprobs: 0` asks for some.
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_TRUE, _FALSE = ("true", "True"), ("false", "False")


@dataclass(frozen=True, slots=True)
class Unserved:
    """Why a field is not served.

    Attributes:
        reason: end of the message; says what to do instead, where there is something.
        allowed: values that ask for nothing, besides null and empty ones; false does too, unless true is one of them.
    """

    reason: str
    allowed: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        """Return whether a value asks for nothing."""
        if value is False or value in _FALSE:
            return True not in self.allowed
        if value in _TRUE:
            return True in self.allowed
        return value in _EMPTY or value in self.allowed


UnservedFields: TypeAlias = Mapping[str, Unserved]

_ONE_PROCESS = "the whole answer is computed in one process"
_UNCUT = "prompts are not cut; send a shorter one"
_ONLY_TEXTS = "messages are texts"
_TEXT_ONLY = "parts of an input that are no text are not served"

_ADAPTER = "write the name of one adapter in adapter, or MODEL:ADAPTER in model"
ADAPTERS: UnservedFields = {
    "adapter_id": Unserved(_ADAPTER),
    "adapter_source": Unserved(_ADAPTER),
    "lora": Unserved(_ADAPTER),
    "lora_request": Unserved(_ADAPTER),
}
GENERATION: UnservedFields = {
    "allowed_token_ids": Unserved("write structured_outputs with a choice, or logit_bias"),
    "ec_transfer_params": Unserved(_ONE_PROCESS),
    "guided_grammar": Unserved("write structured_outputs with a regex or a JSON schema"),
    "guided_whitespace_pattern": Unserved("write structured_outputs with a regex"),
    "kv_transfer_params": Unserved(_ONE_PROCESS),
    "logits_processors": Unserved("code of a client does not run"),
    "logprob_token_ids": Unserved("write logprobs"),
    "prompt_logprobs": Unserved("the tokens of prompts have no log probabilities"),
    "repetition_detection": Unserved("write repetition_penalty or stop"),
    "truncate_prompt_tokens": Unserved(_UNCUT),
    "truncation_side": Unserved(_UNCUT),
    "vllm_xargs": Unserved("they are for plugins of vLLM"),
}
COMPLETIONS: UnservedFields = {
    **GENERATION,
    "prompt_embeds": Unserved("write text or token ids in prompt"),
    "suffix": Unserved("texts are not filled in"),
}
CHATS: UnservedFields = {
    **GENERATION,
    "audio": Unserved("answers are text"),
    "documents": Unserved("write them in a message"),
    "modalities": Unserved("answers are text", (["text"],)),
    "moderation": Unserved("there is no moderation"),
    "prediction": Unserved("there are no predicted outputs"),
    "prompt_cache_options": Unserved(
        "the prefix cache has no options; cache_salt separates callers"
    ),
    "web_search_options": Unserved("there is no web search"),
}
_NOT_KEPT = "answers are not kept; send the whole conversation in input"
RESPONSES: UnservedFields = {
    **GENERATION,
    "background": Unserved("write stream, or wait for the answer"),
    "context_management": Unserved("conversations are not cut; send a shorter one"),
    "conversation": Unserved(_NOT_KEPT),
    "max_tool_calls": Unserved("your program calls the functions"),
    "moderation": CHATS["moderation"],
    "previous_response_id": Unserved(_NOT_KEPT),
    "prompt": Unserved("there are no stored prompts; write input and instructions"),
    "prompt_cache_options": CHATS["prompt_cache_options"],
}
# Fields of a message, and of a part of its content.
MESSAGES: UnservedFields = {
    "audio": Unserved(_ONLY_TEXTS),
}
PARTS: UnservedFields = {
    name: Unserved(_ONLY_TEXTS)
    for name in (
        "image_url input_image image_pil image_embeds input_audio audio_url audio_embeds video_url file source"
    ).split()
}
TOKENIZATION: UnservedFields = {
    "documents": Unserved("write them in a message"),
}
# Fields of all routes that read texts, not of generation.
TEXTS: UnservedFields = {
    # vLLM's
    "activation": Unserved("write use_activation", (True,)),
    "softmax": Unserved("write use_activation", (True,)),
    "add_special_tokens": Unserved("texts always have the model's special tokens", (True,)),
    "chat_template": Unserved("inputs are texts, which have no chat template"),
    "chat_template_kwargs": Unserved("inputs are texts, which have no chat template"),
    "messages": Unserved("write texts"),
    "mm_processor_kwargs": Unserved(_TEXT_ONLY),
    "images": Unserved(_TEXT_ONLY),
}
QUESTIONS: UnservedFields = {
    **TEXTS,
    **dict.fromkeys(
        (
            "truncate",
            "truncation",
            "truncate_prompt_tokens",
            "truncation_side",
            "truncation_direction",
        ),
        Unserved("a long context is read in windows, of max_seq_len tokens"),
    ),
}
LABELS: UnservedFields = {
    **TEXTS,
    # of the pipelines of transformers
    "ignore_labels": Unserved("tokens with the label O are left out", (["O"],)),
    "stride": Unserved("a long text is not split; send its parts"),
}
EMBEDDINGS: UnservedFields = {
    **TEXTS,
    # vLLM's
    "embed_dtype": Unserved("vectors are float32", ("float32",)),
    "endianness": Unserved("base64 has little-endian numbers", ("native", "little")),
    # Voyage's, and NVIDIA NIM's and Jina's name of it
    "output_dtype": Unserved("vectors are float; the server itself has output_dtype", ("float",)),
    "embedding_type": Unserved("vectors are float; write encoding_format", ("float",)),
    # Jina's
    "return_multivector": Unserved("write to /embed_all, which has a vector for each token"),
}
PROMPTS: UnservedFields = {
    **EMBEDDINGS,
    # Jina's
    "late_chunking": Unserved("write to /v1/embeddings, whose input are the chunks of a document"),
}
COHERE: UnservedFields = {
    **PROMPTS,
    "max_tokens": Unserved("texts are cut at the model's longest input"),
}
RANKS: UnservedFields = {
    **TEXTS,
    "chat_template_kwargs": Unserved("write instruction, the only variable of a pair"),
    "max_tokens_per_doc": Unserved("write truncate_prompt_tokens, for query and document", (0,)),
    "max_tokens_per_query": Unserved("write truncate_prompt_tokens, for query and document", (0,)),
    "rank_fields": Unserved("the field text of a document is ranked", (["text"],)),
    "return_embeddings": Unserved("rerankers have no embeddings"),
    "top_k": Unserved("write top_n"),
}
OUTPUTS: UnservedFields = {
    "parameters": Unserved("outputs are JSON, without parameters", ({"binary_data": False},)),
}
