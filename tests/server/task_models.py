"""A small random model of each task, in a repository as `fetch` writes it."""

from collections.abc import Mapping
from pathlib import Path

from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

from tests.checkpoints import KIND_OF_TASK, WORDS, add_mask, save_checkpoint, set_fields
from tests.gliner_models import save_gliner
from varlen.tasks import ITERATIVE_TASKS, Task
from varlen_tools.fetch import fetch
from varlen_tools.model_config import Inputs

from .serving import store_compiled

# Tasks by model name. The pages of docs/ use these names.
TASK_MODELS: Mapping[str, Task] = {
    "embedder": "embed",
    "splade": "sparse_embed",
    "bert": "fill_mask",
    "states": "hidden",
    "sentiment": "classify",
    "reranker": "rerank",
    "entities": "token_classify",
    "colbert": "token_embed",
    "pii": "extract",
    "qa": "question_answer",
    "tiny_gpt2": "generate",
    "tiny_dates": "translate",
}
_KINDS = {
    **KIND_OF_TASK,
    "token_embed": "BertModel",
    "question_answer": "BertForQuestionAnswering",
    "generate": "GPT2LMHeadModel",
    "translate": "MarianMTModel",
}


def save_task_model(folder: Path, name: str) -> Path:
    """Save the checkpoint of a model in `TASK_MODELS` below `folder`, and return its own folder."""
    task = TASK_MODELS[name]
    if task == "extract":
        return save_gliner(folder / name, max_len=384)
    words = {} if task in ITERATIVE_TASKS else {"words": WORDS}
    # enough positions for the 128 bytes of a random text of perf_analyzer
    positions = {"max_position_embeddings": 160} if task == "translate" else {}
    labels = {"num_labels": 1} if task == "rerank" else {}
    saved = save_checkpoint(folder / name, _KINDS[task], **words, **positions, **labels)
    if task == "fill_mask":
        add_mask(saved)
    if task == "translate":
        # answers of a random model would end with its last position
        set_fields(saved, "generation_config.json", max_length=20)
    if task == "sparse_embed":
        # with modules, whose task is sparse_embed
        SparseEncoder(str(saved), device="cpu").save_pretrained(str(folder / "modules"))
        return folder / "modules"
    if task == "token_embed":
        stack = [Transformer(str(saved)), MultiVectorMask(), Normalize("token_embeddings")]
        late = MultiVectorEncoder(modules=stack, device="cpu")
        late.save_pretrained(str(folder / "late"))
        return folder / "late"
    return saved


def fetch_task_model(
    checkpoint: Path, repository: Path, name: str, task: Task, inputs: Inputs | None = None
) -> Path:
    """Fetch a checkpoint with the default inputs, one thread, and no measuring of costs."""
    settings = {"device": "cpu", "threads": "1", "warmup_seconds": "0", "task": task}
    model = fetch(
        str(checkpoint), repository=repository, name=name, settings=settings, inputs=inputs
    )
    store_compiled(model)
    return model
