"""The engine's settings: the `parameters { }` of config.pbtxt, typed and checked.

`EngineConfig` is the only place that describes them; config.pbtxt and docs/reference/configuration.md get its texts.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict, cast, get_args

from varlen.errors import ConfigError
from varlen.parameter import FLAG, parameter_field, parameters_of, unknown_parameter
from varlen.tasks import FURTHER_TASKS, ITERATIVE_TASKS, ONE_SHOT_TASKS, Task

DType: TypeAlias = Literal["auto", "fp32", "fp16", "bf16", "int8", "int4", "fp8"]
# Those whose weights are codes.
CODED: tuple[DType, ...] = ("int8", "int4", "fp8")
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
PolicyName: TypeAlias = Literal["none", "fifo", "token_budget", "dp"]
Trigger: TypeAlias = Literal["hungry", "lazy"]
RerankForm: TypeAlias = Literal["auto", "qwen3", "mxbai", "bge"]
Execution: TypeAlias = Literal["packed", "padded"]
KvPolicy: TypeAlias = Literal["reserve", "optimistic"]
KvCacheDtype: TypeAlias = Literal["auto", "fp8"]
GenerationDefaults: TypeAlias = Literal["auto", "none"]
SpeculationMethod: TypeAlias = Literal["none", "ngram", "draft_model"]
LogLevel: TypeAlias = Literal["info", "debug"]

# Bytes of a text for each token: few texts have more. Lower bounds of the defaults that follow the longest sequence.
BYTES_PER_TOKEN = 32
SHORTEST_TEXT = 65_536
SHORTEST_QUEUE = 131_072
# Tokens of a prompt and its answer that are short, and the part of the running sequences that is added for such ones.
SHORT_TOKENS = 64
_SHORT_PART = 8
# A limit that nothing reaches, for callers whose own memory or clock is the limit.
NO_LIMIT = 2**62

# Parameters of the server's python backend, which are not checked here.
SERVER_PARAMETERS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})

_BYTES_OR_PERCENTAGE = r"[1-9][0-9]{0,17}|(100|[1-9][0-9]?)%"
_ALLOWED_BYTES = "whole numbers from 1, and from 1% to 100% of the device's memory"


class CheckpointSettings(TypedDict):
    """The settings that decide what a checkpoint is read as."""

    ignore_config_fields: tuple[str, ...]
    adapter: str
    rerank_form: RerankForm


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of one model.

    Each has a default. None stands for a value that the checkpoint decides.
    """

    # What runs
    task: Task | None = parameter_field(
        None,
        "Task of the model, which decides its inputs and outputs. The default is the checkpoint's own task.",
        when="Set it to serve a checkpoint for another task than its own, such as `hidden` for an embedding model.",
        choices=get_args(Task),
    )
    outputs: str = parameter_field(
        "none",
        "Further outputs of the model, by their tasks, separated by commas:"
        f" {', '.join(f'`{task}`' for task in FURTHER_TASKS)}. A request names the outputs that it wants, and"
        " [one pass](../concepts/one_pass.md) makes all of them.",
        when="Set it to get several outputs of one model, such as `sparse_embed,token_embed` of bge-m3.",
        pattern=rf"none|(?:{'|'.join(FURTHER_TASKS)})(, ?(?:{'|'.join(FURTHER_TASKS)}))*",
        allowed_text=f"none, or some of {', '.join(FURTHER_TASKS)}, separated by commas",
        tasks=ONE_SHOT_TASKS,
    )
    device: Device = parameter_field(
        "auto",
        "Device that runs the model. `auto` is a CUDA GPU if there is one, else the CPU.",
        when="Set `cpu` to keep a model off the GPUs of its machine.",
        choices=get_args(Device),
    )
    dtype: DType = parameter_field(
        "auto",
        "Data type of weights and activations. `auto` is bf16 if the device multiplies it natively, else fp16 on a GPU"
        " and fp32 on a CPU, where models keep weights of 4 and 8 bits as the checkpoint has them. With int8 on"
        " a CPU linear layers run in int8, the rest in bf16 where compiled code multiplies it natively, else in fp32;"
        " int4 needs a CPU and has weights of 4 bits, for models"
        " that generate. On a GPU int8 and fp8 (e4m3) are codes of the weights of linear layers, and the rest runs as"
        " with `auto`. fp16 and fp8 need a GPU.",
        when="Set `int8` for the highest throughput on a CPU and for short steps and half of the memory on a GPU,"
        " `int4` for the shortest steps of few sequences and the least memory, `fp32` to compare answers with another"
        " system's.",
        choices=get_args(DType),
    )
    threads: int = parameter_field(
        0,
        "CPU cores that the model uses: each runs batches of its own, or, in generation, all run one step. 0 is all"
        " cores that the process may use, a container's limit included.",
        when="Set it where several models share the cores of a machine.",
        lowest=0,
        # each is a process or a thread: a slip of the pen must not start a million
        highest=1024,
    )
    tensor_parallel: int = parameter_field(
        1,
        "Ranks, processes that hold the model together: each has a part of every layer, and an equal part of the cores,"
        " or a GPU of its own. One request at a time is answered sooner, or a model fits that is too large for one"
        " process or GPU. Needs a server, and no dtype of int8, int4 or fp8.",
        when="Set it for one long answer at a time on a CPU with several cores, or for a model that is too large for"
        " one GPU. For more requests, add replicas.",
        lowest=1,
        highest=64,
    )
    pipeline_parallel: int = parameter_field(
        1,
        "Stages, processes that each hold some of the model's layers and have an equal part of the cores. As many"
        " batches run at the same time, each in another stage. Needs a CPU, a server, and a dtype of fp32 or bf16. Not"
        " together with `tensor_parallel`.",
        when="Leave it on a machine with few cores, where stages are slower than one process. Set it where one process"
        " may not hold the whole model, and many sequences run at a time.",
        lowest=1,
        highest=64,
    )
    rank_timeout_seconds: int = parameter_field(
        10,
        "Longest time that a rank or a stage waits for another one, in seconds. After that the other one counts as"
        " lost, and all of them are started again.",
        when="Raise it on a machine whose cores are taken for seconds, such as one with more ranks than cores.",
        lowest=1,
        highest=3600,
    )
    execution: Execution = parameter_field(
        "packed",
        "`packed` runs batches without padding. `padded` pads every sequence to the longest of its batch, and computes"
        " all scores of attention between two matrix products. On a GPU its ops are started one by one.",
        when="Leave it. `padded` is a baseline for measurements.",
        choices=get_args(Execution),
        tasks=ONE_SHOT_TASKS,
    )
    approximate_gelu: bool = parameter_field(
        False,
        "Whether a GPU computes the exact (erf) GELU by its tanh form, inside the matrix product. It saves a pass over"
        " the largest activations of each layer. Each of them changes by at most 0.000474. CPUs ignore this setting.",
        when="Set it once you have compared the answers to texts of your own.",
        choices=FLAG,
    )
    ignore_config_fields: str = parameter_field(
        "none",
        "Fields of the checkpoint's config.json that a load leaves out, separated by commas. Without this setting, a"
        " load ignores the fields that no release of transformers reads, and refuses others that it does not serve.",
        when="Set it if a load refuses a field, and you know that the field changes no result.",
        pattern=r"[^\s,\"\\]+(, ?[^\s,\"\\]+)*",
        allowed_text="none, or names separated by commas",
    )
    adapter: str = parameter_field(
        "none",
        "The task adapter of the checkpoint that is merged into its weights when it is loaded, by its name in"
        " `lora_adaptations` of config.json. `none` leaves the weights as they are. Each task is a model of its own.",
        when="Set it for jina-embeddings-v3, such as `retrieval.query` and `retrieval.passage`; requests choose the"
        " prompt of the same name.",
        pattern=r"[^\s,\"\\]+",
        allowed_text="none, or the name of an adapter",
    )
    adapters: str = parameter_field(
        "auto",
        "[Adapters](../concepts/adapters.md) that requests choose by name: folders that peft has saved. `auto` is each"
        " folder in `adapters` of the checkpoint's folder, `none` none of them. `NAME=FOLDER`, separated by commas,"
        " names others; a relative folder is in the checkpoint's.",
        when="Set it if adapters are kept elsewhere, and to `none` to serve a checkpoint without the ones beside it.",
        pattern=r"auto|none|[^\s,=\"\\]+=[^,=\"\\]+(, ?[^\s,=\"\\]+=[^,=\"\\]+)*",
        allowed_text="auto, none, or NAME=FOLDER separated by commas",
    )
    adapter_bytes: int | str = parameter_field(
        "25%",
        "Largest memory of adapters, in bytes or as a percentage of the device's memory. Workers on a CPU have equal"
        " shares. Adapters that do not fit take turns: the one that was used longest ago makes room. Every adapter"
        " takes as much as one of the largest ranks.",
        when="Lower it where memory is short. Raise it if batches with many adapters are slower than others.",
        lowest=1,
        pattern=_BYTES_OR_PERCENTAGE,
        allowed_text=_ALLOWED_BYTES,
    )
    rerank_form: RerankForm = parameter_field(
        "auto",
        "How a `…ForCausalLM` that answers in words ranks pairs, for copies whose files do not say it: texts around a"
        " pair, and the tokens of both answers. `auto` reads the module LogitScore of modules.json, or a chat template"
        " with the question of one of these forms. `qwen3` is Qwen3-Reranker, `mxbai` is mxbai-rerank-v2,"
        " `bge` is bge-reranker-v2-gemma.",
        when="Set it for a copy of such a model that `rerank` refuses.",
        choices=get_args(RerankForm),
        tasks=("rerank",),
    )

    # Batching
    policy: PolicyName = parameter_field(
        "dp",
        "How batches are formed. `none` runs every sequence in a batch of its own. `fifo` fills batches in order up to"
        " `max_batch_sequences`, `token_budget` up to `max_batch_tokens`. `dp` lets short requests pass long ones,"
        " within a bound, and divides the queue into the batches of least delay by measured cost.",
        when="Set `token_budget` if requests have to run in order of arrival. `none` and `fifo` are for"
        " comparison.",
        choices=get_args(PolicyName),
        tasks=ONE_SHOT_TASKS,
    )
    dp_pressure: int | str = parameter_field(
        9,
        "Number of requests that the policy `dp` expects to come, while the queue drains, for each request that waits:"
        " load / (1 - load). Higher values make larger batches. `infinite` is the published form of TurboTransformers:"
        " least total time, sequences sorted by length.",
        when="Leave it, except to compare with the published form.",
        lowest=0,
        highest=1000,
        pattern="infinite",
        allowed_text="whole numbers from 0 to 1000, and infinite",
        tasks=ONE_SHOT_TASKS,
    )
    trigger: Trigger = parameter_field(
        "hungry",
        "When a batch starts. `hungry` starts it as soon as the model is free. `lazy` waits for a full batch,"
        " at most `max_delay_ms`.",
        when="Set `lazy` if other work on the device needs the time that fewer, fuller batches save.",
        choices=get_args(Trigger),
        tasks=ONE_SHOT_TASKS,
    )
    max_delay_ms: int = parameter_field(
        10,
        "Longest wait of the trigger `lazy` for a full batch, in milliseconds.",
        when="Lower it if the trigger `lazy` adds too much latency.",
        lowest=0,
        tasks=ONE_SHOT_TASKS,
    )
    max_batch_sequences: int = parameter_field(
        64,
        "Largest batch, in sequences. Ignored when policy is `token_budget`.",
        when="Raise it if many very short texts wait. A GPU then captures larger graphs, which takes memory.",
        lowest=1,
        tasks=ONE_SHOT_TASKS,
    )
    max_batch_tokens: int = parameter_field(
        4096,
        "Largest batch of several sequences of a worker, in tokens, padding included. A longer sequence runs in a batch"
        " of its own.",
        when="Raise it on a GPU that larger batches use better. Lower it, and `max_sequence_tokens`, to save memory.",
        lowest=1,
        tasks=ONE_SHOT_TASKS,
    )

    # Limits
    arena_bytes: int | str = parameter_field(
        "100%",
        "Largest memory of intermediates, in bytes or as a percentage of the device's memory, such as 25%. Workers on"
        " a CPU have equal shares. An arena never exceeds what `max_batch_tokens` or the longest sequence requires. In"
        " a smaller share batches are smaller, and a sequence that does not fit by itself is refused, not cut. A model"
        " that generates does not load unless a step of `max_step_tokens` fits.",
        when="Set it where memory is short, or where several models share a device or a container.",
        lowest=1,
        pattern=_BYTES_OR_PERCENTAGE,
        allowed_text=_ALLOWED_BYTES,
    )
    growing_arena: bool = parameter_field(
        False,
        "Whether the memory of intermediates on a GPU grows with its batches, as it does on a CPU. Addresses for the"
        " largest batch are reserved, and get memory when a batch needs it; what none of 64 batches needed is released."
        " Without it the memory of the largest batch is allocated at load. No GPU has run it yet.",
        when="Set it where several models share a GPU, and few of their batches are large.",
        choices=FLAG,
    )
    max_sequence_tokens: int | None = parameter_field(
        None,
        "Longest sequence accepted, in tokens. The default is the checkpoint's own limit, or `max_queued_tokens` if"
        " that is set to less.",
        when="Lower it to bound the time of one sequence. Raise it if the checkpoint has more positions than the"
        " limit that its files name.",
        lowest=1,
    )
    max_queued_requests: int = parameter_field(
        4096,
        "Largest queue, in requests. Requests beyond it get UNAVAILABLE.",
        when="Lower it if clients prefer an early refusal to a long wait.",
        lowest=1,
    )
    max_queued_tokens: int | None = parameter_field(
        None,
        "Largest queue, in tokens; for a model that generates, only prompts count. Requests beyond it get UNAVAILABLE."
        f" The default is {SHORTEST_QUEUE}, or the longest sequence if that is longer. A full queue should run within"
        " the server's `--exit-timeout-secs` (30), or a stopping server loses requests.",
        when="Lower it if a full queue takes longer than clients wait. Raise it for requests of many long rows:"
        " one with more tokens than this is refused.",
        lowest=1,
    )
    max_text_bytes: int | None = parameter_field(
        None,
        "Longest text accepted, in bytes of UTF-8, checked before tokenization. If a longer text is truncated, its"
        f" first or last bytes up to this number are read. The default is {BYTES_PER_TOKEN} for each token of the"
        f" longest sequence, at least {SHORTEST_TEXT}.",
        when="Raise it if texts with much white space are refused although they are truncated. Lower it if no client"
        " sends such texts.",
        lowest=1,
    )
    max_queued_text_bytes: int = parameter_field(
        33_554_432,
        "Largest amount of text that waits for tokenization, in bytes of UTF-8. Requests beyond it get UNAVAILABLE.",
        when="Raise it if clients that send many long texts get UNAVAILABLE while memory is free.",
        lowest=1,
    )
    device_timeout_seconds: int = parameter_field(
        60,
        "Longest time that a GPU may take to end a batch, in seconds. After that the GPU counts as hung: the model is"
        " not ready, its requests fail with INTERNAL, and a reload starts it in a fresh process. Batches take"
        " milliseconds. 0 is no limit. CPUs ignore this setting.",
        when="Raise it if a debugger or a profiler slows the GPU down. Lower it to notice a hung GPU earlier.",
        lowest=0,
    )
    ignore_request_timeout: bool = parameter_field(
        False,
        "Whether the `timeout` field of requests is ignored. It is a deadline in microseconds, as the server defines"
        " it; some clients send seconds.",
        when="Set it if clients send seconds and cannot be changed.",
        choices=FLAG,
    )

    # Generation
    max_running_sequences: int = parameter_field(
        64,
        "Largest number of sequences that generate at the same time. An eighth more may be short: requests of one"
        f" sequence of up to {SHORT_TOKENS} tokens, prompt included, which do not wait for the end of others.",
        when="Raise it for throughput while KV blocks are free. Lower it for less time per token.",
        lowest=1,
        tasks=ITERATIVE_TASKS,
    )
    max_step_tokens: int = parameter_field(
        0,
        "Largest step, in tokens, at least `max_running_sequences`. A longer prompt runs in chunks, beside the"
        " sequences that generate; a source text runs as a whole, beside a token of each of them. 0 is 512, and for"
        " `translate` room for a source of 512 tokens.",
        when="Raise it for longer source texts, or for throughput where prompts are long. Lower it to save memory.",
        lowest=0,
        tasks=ITERATIVE_TASKS,
    )
    inter_token_latency_ms: int = parameter_field(
        400,
        "Target of the longest time between two tokens of a stream, in milliseconds. While a stream generates, a step"
        " runs only as many tokens of prompts as are expected to end in time; prompts have a quarter of the time of a"
        " step in any case. While no stream generates, steps are as large as `max_step_tokens`. 0 is no target.",
        when="Lower it for steadier streams. Raise it for throughput and earlier first tokens.",
        lowest=0,
        tasks=("generate",),
    )
    kv_bytes: int | str = parameter_field(
        "25%",
        "Memory of keys and values, in bytes or as a percentage of the device's memory. It never takes more than"
        " `max_running_sequences` of the longest sequences need.",
        when="Raise it if requests wait while `varlen_kv_blocks_reserved` is near the capacity. Lower it where"
        " other models share the memory.",
        lowest=1,
        pattern=_BYTES_OR_PERCENTAGE,
        allowed_text=_ALLOWED_BYTES,
        tasks=ITERATIVE_TASKS,
    )
    kv_block_tokens: int = parameter_field(
        0,
        "Tokens of a KV block. 0 is 64 on a CPU and 16 on a GPU.",
        when="Leave it, except to measure.",
        lowest=0,
        tasks=ITERATIVE_TASKS,
    )
    kv_cache_dtype: KvCacheDtype = parameter_field(
        "auto",
        "How keys and values are stored. `auto` is the dtype of the activations. `fp8` has 8 bits (e4m3, with a scale"
        " of 1), so the same memory holds twice as many tokens as in 16 bits; numbers past 448 become 448.",
        when="Set `fp8` on a GPU of compute capability 8.9 or later, such as an H100, where memory of keys and values"
        " limits the number of sequences, and compare the answers.",
        choices=get_args(KvCacheDtype),
        tasks=ITERATIVE_TASKS,
    )
    kv_policy: KvPolicy = parameter_field(
        "reserve",
        "When a sequence starts. `reserve` keeps the KV blocks of its prompt and `max_tokens`, so memory"
        " never interrupts it. `optimistic` needs the blocks of its prompt only; if blocks run out, the last sequence"
        " gives back its own and is computed again later.",
        when="Set `optimistic` if most answers end long before `max_tokens`.",
        choices=get_args(KvPolicy),
        tasks=ITERATIVE_TASKS,
    )
    prefix_cache: bool = parameter_field(
        True,
        "Whether prompts with an equal beginning share its KV blocks.",
        when="Turn it off if clients must not learn of each other's prompts: a fast first token shows that a"
        " prompt came before.",
        choices=FLAG,
        tasks=ITERATIVE_TASKS,
    )

    generation_config: GenerationDefaults = parameter_field(
        "auto",
        "Where requests get the sampling options from that they do not send. `auto` is the checkpoint's"
        " generation_config.json, as in vLLM: `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty`; its"
        " `max_new_tokens` limits all answers. `none` is varlen's own defaults.",
        when="Set `none` if requests without options should not depend on the checkpoint, or if its `max_new_tokens` is"
        " too small.",
        choices=get_args(GenerationDefaults),
        tasks=("generate",),
    )
    speculation: SpeculationMethod = parameter_field(
        "none",
        "`ngram` drafts tokens: what followed the last tokens where they came before, in the prompt or answer."
        " `draft_model` drafts them with a smaller model, on a CPU. A step verifies several, and answers do not"
        " change.",
        when="Set `ngram` if answers repeat their prompts, such as edits of code and answers from documents, and"
        " `draft_model` for few requests at a time to a model that has a much smaller one of its kind.",
        choices=get_args(SpeculationMethod),
        tasks=("generate",),
    )
    draft_model: str = parameter_field(
        "none",
        "Folder of the checkpoint that drafts with `speculation: draft_model`, with the same tokenizer. A relative one"
        " is in the checkpoint's folder. It has the same dtype, and a share of `kv_bytes`.",
        when="Set it to the smallest model that often writes the same tokens.",
        pattern=r"[^,\"\\]+",
        allowed_text="none, or a folder",
        tasks=("generate",),
    )
    num_speculative_tokens: int = parameter_field(
        5,
        "Longest draft in tokens. Drafts run in places of sequences that are free.",
        when="Raise it if answers copy long parts.",
        lowest=1,
        highest=64,
        tasks=("generate",),
    )
    prompt_lookup_min: int = parameter_field(
        2,
        "Number of last tokens that have to be found again for a draft.",
        when="Raise it if few drafted tokens are chosen (`varlen_draft_tokens_accepted_total`).",
        lowest=1,
        highest=16,
        tasks=("generate",),
    )

    # Grammars and templates
    sandbox_seconds: int = parameter_field(
        2,
        "Processor time that a grammar of `structured_outputs` may take to compile, and its masks beyond 10 ms for each"
        " token, and that the chat template may take for one prompt, in seconds. Requests beyond it get INVALID_ARG.",
        when="Raise it if schemas that you trust are refused. Lower it if clients send schemas that take long.",
        lowest=1,
        highest=3600,
        tasks=(*ITERATIVE_TASKS, "rerank"),
    )
    sandbox_bytes: int = parameter_field(
        134_217_728,
        "Memory that one grammar of `structured_outputs`, or one process of the chat template, may take, in bytes."
        " Requests beyond it get INVALID_ARG.",
        when="Raise it if schemas that you trust are refused.",
        lowest=16_777_216,
        highest=2**40,
        tasks=(*ITERATIVE_TASKS, "rerank"),
    )
    grammar_cache_bytes: int = parameter_field(
        268_435_456,
        "Memory of all compiled grammars together, in bytes. Grammars without a request in progress are ended first;"
        " requests whose grammars do not fit get UNAVAILABLE.",
        when="Raise it if many requests with different large schemas run at the same time.",
        lowest=1,
        tasks=ITERATIVE_TASKS,
    )

    # Response cache
    response_cache_bytes: int = parameter_field(
        0,
        "Largest memory of the response cache, in bytes. 0 turns it off.",
        when="Set it if equal texts come often, and clients may learn of each other's texts from fast answers.",
        lowest=0,
        tasks=ONE_SHOT_TASKS,
    )
    response_cache_seconds: int = parameter_field(
        0,
        "Longest time that a response is cached, in seconds. 0 is no limit.",
        when="Set it if answers have to be forgotten after some time.",
        lowest=0,
        tasks=ONE_SHOT_TASKS,
    )

    # Cost measurement
    warmup_seconds: int = parameter_field(
        1,
        "Longest measurement of batch costs at the first load, in seconds. With 0 nothing is measured, linear layers"
        " neither, and costs are assumed.",
        when="Raise it for large models, whose first requests then meet exact costs. Set 0 for short tests, and on"
        " machines that are busy when a model loads.",
        lowest=0,
    )
    cache_folder: str = parameter_field(
        "auto",
        "Folder of measurements, int8 weights and compiled models. `auto` is `varlen` in the user's cache folder.",
        when="Set it in a container, to a folder of a volume: later starts then measure nothing.",
        pattern="(?s).+",
        allowed_text="auto, or a folder",
    )

    # Log
    log_level: LogLevel = parameter_field(
        "info",
        "`debug` adds a line for every batch.",
        when="Set `debug` to see what runs together, and how long it was expected to take.",
        choices=get_args(LogLevel),
    )

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name, setting in SETTINGS.items():
            with collect_problems(problems):
                setting.check(name, getattr(self, name), ConfigError)
        # limits of two settings hold for allowed values
        problems += () if problems else self._pair_problems()
        if problems:
            raise ConfigError(*problems)

    def _pair_problems(self) -> Iterator[str]:
        """Yield what settings that are allowed alone exclude together."""
        if self.tensor_parallel > 1 and self.dtype in CODED:
            yield (
                f'dtype is "{self.dtype}", whose rows have to be whole, and tensor_parallel is'
                f" {self.tensor_parallel}; allowed with ranks: auto, fp32, bf16"
            )
        if self.pipeline_parallel > 1 and self.dtype in CODED:
            yield (
                f'dtype is "{self.dtype}", whose scales need the whole model, and pipeline_parallel is'
                f" {self.pipeline_parallel}; allowed with stages: auto, fp32, bf16"
            )
        if self.pipeline_parallel > 1 and self.tensor_parallel > 1:
            yield (
                f"pipeline_parallel is {self.pipeline_parallel} and tensor_parallel is {self.tensor_parallel};"
                " one of them must be 1"
            )
        if self.further_tasks and (self.num_processes > 1 or self.execution == "padded"):
            yield (
                f"outputs is {self.outputs}; further outputs need execution packed, and tensor_parallel and"
                " pipeline_parallel 1"
            )
        drafts = self.speculation == "draft_model"
        if drafts != (self.draft_model != "none"):
            yield (
                f'draft_model is "{self.draft_model}" and speculation is "{self.speculation}"; allowed: a folder with'
                " draft_model, none without"
            )
        if drafts and self.num_processes > 1:
            yield (
                "speculation is draft_model; allowed with tensor_parallel and pipeline_parallel above 1: none, ngram"
            )
        if 0 < self.max_step_tokens < self.max_running_sequences:
            yield (
                f"max_step_tokens is {self.max_step_tokens}; it must hold a token of each of the"
                f" {self.max_running_sequences} running sequences (max_running_sequences)"
            )

    @property
    def num_processes(self) -> int:
        """Number of processes that hold a part of the model each: ranks or stages."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def keeps_codes(self) -> bool:
        """Whether a CPU may keep codes of quantized weights."""
        return self.dtype == "auto" and self.device != "cuda"

    @property
    def of_checkpoint(self) -> "CheckpointSettings":
        """The settings that decide what a checkpoint is read as: arguments of `Checkpoint.open`."""
        names = () if self.ignore_config_fields == "none" else self.ignore_config_fields.split(",")
        return {
            "ignore_config_fields": tuple(name.strip() for name in names),
            "adapter": self.adapter,
            "rerank_form": self.rerank_form,
        }

    @property
    def further_tasks(self) -> tuple[Task, ...]:
        names = [] if self.outputs == "none" else self.outputs.split(",")
        return tuple(cast(Task, name.strip()) for name in names)

    @property
    def short_slots(self) -> int:
        """Number of short sequences that may generate beside `max_running_sequences`."""
        return -(-self.max_running_sequences // _SHORT_PART)

    def arena_limit(self, device_memory: int) -> int:
        """Return the largest arena in bytes, given the memory of the device in bytes."""
        return _bytes_of(self.arena_bytes, device_memory)

    def adapter_limit(self, device_memory: int) -> int:
        """Return the largest memory of adapters, in bytes, given the device's."""
        return _bytes_of(self.adapter_bytes, device_memory)

    def kv_limit(self, device_memory: int) -> int:
        """Return the largest memory of keys and values, in bytes, given the device's."""
        return _bytes_of(self.kv_bytes, device_memory)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> "EngineConfig":
        """Return the settings in the `parameters` of a config.pbtxt.

        Args:
            parameters: string_value by key, as in the server's JSON form.

        Raises:
            ConfigError: keys are unknown or values are not allowed; the message names each key, each
                value and what is allowed.
        """
        ours = {key: text for key, text in parameters.items() if key not in SERVER_PARAMETERS}
        unknown = sorted(key for key in ours if key not in SETTINGS)
        problems = [unknown_parameter(*unknown, allowed=SETTINGS)] if unknown else []
        values = {key: SETTINGS[key].from_text(ours[key]) for key in ours if key in SETTINGS}
        with collect_problems(problems):
            config = cls(**values)  # type: ignore[arg-type]  # __post_init__ checks every value
        if problems:
            raise ConfigError(*problems)
        return config


@contextmanager
def collect_problems(problems: list[str]) -> Iterator[None]:
    """Add the problems of a ConfigError to a list, and go on after the block."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


SETTINGS = parameters_of(EngineConfig)


def _bytes_of(setting: int | str, whole: int) -> int:
    if isinstance(setting, str) and setting.endswith("%"):
        return whole * int(setting[:-1]) // 100
    return int(setting)
