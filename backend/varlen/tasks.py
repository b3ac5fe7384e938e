"""The tasks of models: what a request asks for."""

from typing import Literal, TypeAlias, get_args

Task: TypeAlias = Literal[
    "embed",
    "sparse_embed",
    "fill_mask",
    "hidden",
    "classify",
    "rerank",
    "token_classify",
    "token_embed",
    "generate",
    "translate",
]

# Tasks whose sequences run for many steps; the others answer each sequence with one batch.
ITERATIVE_TASKS: tuple[Task, ...] = ("generate", "translate")
ONE_SHOT_TASKS: tuple[Task, ...] = tuple(
    task for task in get_args(Task) if task not in ITERATIVE_TASKS
)

# Tasks whose texts may have a prompt of the checkpoint before them.
PROMPTED_TASKS: tuple[Task, ...] = ("embed", "sparse_embed", "token_embed")
