"""Small rerankers without a form in their files, and the programs of their authors."""

import json

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.checkpoints import save_checkpoint, set_fields, write_file

# The pieces of text of Qwen's tokenizers, where punctuation and line ends are one token.
_QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PAIRS = [("is it a cat?", "a river"), ("the cat\n", "b" * 30), ("thé 河 ", "is it 42?"), ("a", "")]
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the"
    ' answer can only be "yes" or "no".'
)
QUESTION_OF_BGE = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a"
    " prediction of either 'Yes' or 'No'."
)
RELEVANCE = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document"
    " pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment"
    " (0 for not relevant, 1 for relevant).\nRelevance:"
)


def save_reranker(folder, kind="Qwen3ForCausalLM"):
    saved = save_checkpoint(folder, kind, max_position_embeddings=2048)
    tokenizer = json.loads((saved / "tokenizer.json").read_text())
    model = tokenizer["model"]
    names = {70: "yes", 80: "no", 90: "?Ċ", 100: "Yes", 110: "<bos>"}
    model["vocab"] = {
        text: index for text, index in model["vocab"].items() if index not in names
    } | {text: index for index, text in names.items()}
    model["merges"] = [["?", "Ċ"]]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": 110, "content": "<bos>", "special": True, **flags})
    split = {"type": "Split", "pattern": {"Regex": _QWEN_PIECES}, "behavior": "Isolated"}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    steps = [{**split, "invert": False}, level]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    write_file(saved, "tokenizer.json", tokenizer)
    set_fields(
        saved,
        "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        pad_token="<|endoftext|>",
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    )
    return saved


def qwen_tokens(tokenize, query, document, instruction, limit):
    """Return the tokens of the program on the model card of Qwen3-Reranker."""
    before = tokenize(f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n")
    after = tokenize("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    if instruction is None:
        instruction = "Given a web search query, retrieve relevant passages that answer the query"
    body = tokenize(f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}")
    return before + body[: limit - len(before) - len(after)] + after


def mxbai_tokens(tokenize, query, document, instruction, limit):
    """Return the tokens of MxbaiRerankV2 with a `max_length` that leaves `limit` tokens in all."""
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    before = tokenize(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
    task, after = tokenize(RELEVANCE), tokenize("<|im_end|>\n<|im_start|>assistant\n")
    line = tokenize("\n")
    most = limit - len(before) - len(task) - len(after) - len(line)
    asked = (
        f"query: {query}" if instruction is None else f"instruction: {instruction}\nquery: {query}"
    )
    first = tokenize(asked)[: most * 3 // 4]
    second = (line + tokenize(f"document: {document}"))[: most - len(first)]
    return before + first + second + line + task + after


def bge_tokens(tokenize, query, document, instruction, limit):
    """Return the tokens of BaseLLMReranker in FlagEmbedding.

    Its `max_length` leaves `limit` tokens in all, its `query_max_length` is three quarters of the pair.
    """
    assert instruction is None
    line, task = tokenize("\n"), tokenize(QUESTION_OF_BGE)
    longest = limit - len(line) - len(task)
    first = tokenize(f"A: {query}")[: (longest - 1) * 3 // 4]
    pair = [*tokenize("<bos>"), *first, *line, *tokenize(f"B: {document}")]
    return pair[:longest] + line + task


# The class, the tokens, the words of the answers: a score is the first one's logit minus the other one's.
FORMS = {
    "qwen3": ("Qwen3ForCausalLM", qwen_tokens, ("yes", "no")),
    "mxbai": ("Qwen2ForCausalLM", mxbai_tokens, ("1", "0")),
    "bge": ("GemmaForCausalLM", bge_tokens, ("Yes",)),
}


def expected_scores(folder, form, pairs, instruction=None, limit=10**6):
    """Return the scores of the authors' program, in fp32."""
    _, tokens_of, words = FORMS[form]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def tokenize(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    scores = []
    for query, document in pairs:
        ids = tokens_of(tokenize, query, document, instruction, limit)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        found = [float(logits[tokenizer.convert_tokens_to_ids(word)]) for word in words]
        scores.append(found[0] - sum(found[1:]))
    return np.array(scores, np.float32)[:, None]
