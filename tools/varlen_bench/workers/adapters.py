"""The process of a system that serves adapters: varlen, or peft around transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from varlen_bench.compare.systems import System, by_name
from varlen_bench.harness.worker import Message, run_worker
from varlen_bench.peers.engines import Cores, pad

BASE, UNUSED, MIXED = "varlen-base", "varlen-unused", "varlen-mixed"
_PEFT_MIXED, _PEFT_MERGED = "peft-mixed", "peft-merged"
# Sequences of a padded batch: texts to embed, and requests that generate.
_TEXTS, _GENERATED = 8, 32

SYSTEMS = by_name(
    System(BASE, "varlen", "fp32", "engine"),
    System(UNUSED, "varlen", "fp32", "engine"),
    System(MIXED, "varlen", "fp32", "engine"),
    System("transformers-base", "transformers", "fp32", "sorted"),
    System(_PEFT_MIXED, "transformers", "fp32", "sorted"),
    System(_PEFT_MERGED, "transformers", "fp32", "sorted"),
)

# Answers all requests of a workload: a vector or the tokens of each.
Answer: TypeAlias = Callable[[], list[Any]]
# Answers one padded batch, with the adapter of each request.
RunBatch: TypeAlias = Callable[[Sequence[Sequence[int]], Sequence[str]], list[Any]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one model, each with its adapter.

    Attributes:
        name: name of the layers that the adapters change.
        kind: "embed", "generate" or "translate".
        adapters: their folders.
        names: the adapter of each request.
        answer: tokens of an answer.
    """

    name: str
    kind: str
    checkpoint: str
    adapters: list[str]
    prompts: list[list[int]]
    names: list[str]
    answer: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the texts to embed, or of the answers."""
        if self.kind == "embed":
            return sum(map(len, self.prompts))
        return self.answer * len(self.prompts)

    @property
    def label(self) -> str:
        """Description for tables and rows."""
        lengths = sorted(map(len, self.prompts))
        more = "" if self.kind == "embed" else f", answers of {self.answer}"
        return f"{self.kind}, {lengths[0]}-{lengths[-1]} tokens{more}"


def save_adapters(
    kind: str,
    checkpoint: Path,
    folder: Path,
    modules: str | list[str],
    count: int,
    ranks: Sequence[int],
) -> list[Path]:
    """Save random adapters of a checkpoint; return their folders.

    Args:
        kind: see `Workload`.
        modules: `target_modules` of peft.
        ranks: their ranks, in turn.
    """
    import peft
    import torch

    model = _load_model(kind, checkpoint, torch.float32)
    folders = [folder / f"a{number:02}" for number in range(count)]
    torch.manual_seed(0)
    for place, rank in enumerate(ranks):
        config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=modules)
        made = peft.get_peft_model(model, config)
        for path in folders[place :: len(ranks)]:
            for name, parameter in made.named_parameters():
                if "lora_" in name:
                    # as much as the other weights add: a hundredth of the rows' length for each rank
                    torch.nn.init.normal_(parameter, std=0.3 * parameter.shape[1] ** -0.5)
            made.save_pretrained(str(path))
        model = made.unload()
    return folders


def _load_model(kind: str, checkpoint: Path, dtype: Any) -> Any:
    """Return transformers' model of a workload."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    auto = {"embed": "AutoModel", "generate": "AutoModelForCausalLM"}.get(
        kind, "AutoModelForSeq2SeqLM"
    )
    model = getattr(transformers, auto).from_pretrained(
        checkpoint, dtype=dtype, attn_implementation="sdpa"
    )
    if kind != "embed":
        # no token ends an answer
        model.generation_config.eos_token_id = None
        model.generation_config.forced_eos_token_id = None
        model.generation_config.pad_token_id = 0 if kind == "generate" else 1
    return model.eval()


def _varlen(system: System, workload: Workload, cores: Cores) -> Answer:
    """Return a function that answers each request by itself, all at the same time."""
    from varlen import Encoder
    from varlen.config import DType
    from varlen.in_process.generator import Generator

    names = [Path(each).name for each in workload.adapters]
    pairs = zip(names, workload.adapters, strict=True)
    adapters = "none" if system.name == BASE else ",".join(f"{n}={path}" for n, path in pairs)
    of_requests = workload.names if system.name == MIXED else [""] * len(workload.prompts)
    dtype = cast(DType, system.precision)
    count = len(workload.prompts)
    if workload.kind == "embed":
        encoder = Encoder.from_pretrained(
            workload.checkpoint,
            task="embed",
            device="cpu",
            dtype=dtype,
            threads=cores.total,
            adapters=adapters,
            warmup_seconds=5,
        )
        pool = ThreadPoolExecutor(count)

        def embed(prompt: list[int], name: str) -> list[float]:
            vector: list[float] = encoder.with_adapter(name).embed([prompt])[0].tolist()
            return vector

        return lambda: list(pool.map(embed, workload.prompts, of_requests))
    generator = Generator.from_pretrained(
        workload.checkpoint,
        device="cpu",
        dtype=dtype,
        threads=cores.total,
        adapters=adapters,
        max_running_sequences=count,
        prefix_cache=False,
    )
    greedy = {"temperature": 0.0} if workload.kind == "generate" else {"num_beams": 1}
    pool = ThreadPoolExecutor(count)

    def generate(prompt: list[int], name: str) -> list[int]:
        one = generator.with_adapter(name)
        (answer,) = one.generate([prompt], max_tokens=workload.answer, ignore_eos=True, **greedy)
        return list(answer.token_ids)

    return lambda: list(pool.map(generate, workload.prompts, of_requests))


def _peft(system: System, workload: Workload, cores: Cores) -> Answer:
    """Return a function that answers requests in padded batches."""
    import peft
    import torch

    torch.set_num_threads(cores.total)
    dtype = torch.bfloat16 if system.precision == "bf16" else torch.float32
    model = _load_model(workload.kind, Path(workload.checkpoint), dtype)
    if "peft" in system.name:
        first, *others = workload.adapters
        model = peft.PeftModel.from_pretrained(model, first, adapter_name=Path(first).name)
        for each in others:
            model.load_adapter(each, adapter_name=Path(each).name)
        # factors are loaded in fp32
        model = model.to(dtype).eval()
    run = _padded(model, workload, names_rows=system.name == _PEFT_MIXED)
    size = _TEXTS if workload.kind == "embed" else _GENERATED

    def answer_part(places: Sequence[int], answers: list[Any]) -> None:
        """Answer some requests in batches, the longest first."""
        ordered = system.ordered(places, workload.prompts)
        for begin in range(0, len(ordered), size):
            batch = ordered[begin : begin + size]
            found = run([workload.prompts[i] for i in batch], [workload.names[i] for i in batch])
            for place, each in zip(batch, found, strict=True):
                answers[place] = each

    @torch.inference_mode()
    def answer() -> list[Any]:
        answers: list[Any] = [None] * len(workload.prompts)
        if system.name != _PEFT_MERGED:
            answer_part(range(len(answers)), answers)
            return answers
        for name in dict.fromkeys(workload.names):
            model.set_adapter(name)
            model.merge_adapter([name])
            answer_part([i for i, each in enumerate(workload.names) if each == name], answers)
            model.unmerge_adapter()
        return answers

    return answer


def _padded(model: Any, workload: Workload, *, names_rows: bool) -> RunBatch:
    """Return a function that answers a padded batch.

    Args:
        names_rows: whether peft gets the adapter of each row.
    """
    import torch

    def run(prompts: Sequence[Sequence[int]], names: Sequence[str]) -> list[Any]:
        ids, mask = (torch.from_numpy(each) for each in pad([list(each) for each in prompts]))
        more: dict[str, Any] = {"adapter_names": list(names)} if names_rows else {}
        if workload.kind == "embed":
            hidden = model(input_ids=ids, attention_mask=mask, **more).last_hidden_state.float()
            weights = mask[..., None].float()
            found: list[Any] = ((hidden * weights).sum(1) / weights.sum(1)).tolist()
            return found
        if workload.kind == "generate":
            # padding on the left, as generation needs it
            ids, mask = (
                torch.stack(
                    [row.roll(int((kept == 0).sum())) for row, kept in zip(each, mask, strict=True)]
                )
                for each in (ids, mask)
            )
        tokens = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            num_beams=1,
            max_new_tokens=workload.answer,
            **more,
        )
        answers: list[Any] = tokens[:, -workload.answer :].tolist()
        return answers

    return run


def start(argument: Message) -> Callable[[Message], Message]:
    """Load a system; return the function that answers its orders."""
    system, cores = System(**argument["system"]), Cores(**argument["cores"])
    load = _varlen if system.is_ours else _peft
    workloads = [Workload(**each) for each in argument["workloads"]]
    run = {each.name: load(system, each, cores) for each in workloads}

    def handle(order: Message) -> Message:
        began = time.perf_counter()
        answers = run[order["workload"]]()
        if order["do"] == "check":
            return {"answers": answers}
        return {"seconds": time.perf_counter() - began}

    return handle


if __name__ == "__main__":
    run_worker(start)
