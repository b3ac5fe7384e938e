"""Notes about checkpoints that load, but may not answer as expected."""

from varlen.models.checkpoint import Checkpoint
from varlen.tasks import Task

# Endings of architectures whose models were trained to fill in words.
_WORD_HEADS = ("ForMaskedLM", "ForPreTraining")


def checkpoint_notes(checkpoint: Checkpoint, task: Task) -> tuple[str, ...]:
    """Return sentences about a checkpoint that serves a task."""
    is_guess = not (checkpoint.folder / "modules.json").is_file()
    if task == "embed" and is_guess and checkpoint.architecture.endswith(_WORD_HEADS):
        return (
            f"{checkpoint.architecture} is trained to fill in words, and the checkpoint has no modules.json of"
            f" sentence-transformers: its vectors are hidden states pooled by {', '.join(checkpoint.pooling)},"
            f" which it was not trained for; its tasks are {', '.join(checkpoint.tasks)}",
        )
    return ()
