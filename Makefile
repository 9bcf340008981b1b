# Each target does its own set-up, and does again only what has changed. `make` lists the targets.

PYTHON ?= python3
# Arguments of pip for PyTorch alone, such as an index of builds for CPUs or for another CUDA.
TORCH_ARGS ?=
# Arguments for the command of `make train`.
ARGS ?=
# Workers of pytest. Each has a pool of ranks of its own, and ranks wait for each other much of the time.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
# Tests of a file share what they train, so a file stays with one worker; tests/conftest.py puts the longest first.
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train test test-fast lint bench gpu-check docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install everything into it (PYTHON=python3)

train: setup ## train the GPT recipe on four processes and let it write (ARGS="--trainer.max_steps 100")
	$(BIN)/python -m lightning_ptdp fit --config gpt/tiny $(ARGS)
	$(BIN)/python -m lightning_ptdp generate --ckpt runs/gpt-tiny/checkpoints/last.ckpt --prompt "def main(" --max-new-tokens 120

test: lint ## lint, then run all tests that this machine can
	@echo "test: running pytest"
	@$(PYTEST) tests

test-fast: setup ## run in two minutes what tests every part once: no slow tests, a few with a Trainer
	@$(PYTEST) --fast tests

lint: setup ## check style and types
	@echo "lint: checking style"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@echo "lint: checking types"
	@$(BIN)/mypy --no-error-summary

bench: setup ## run every benchmark, one after the other
	@set -e; for script in benchmarks/*.py; do echo "bench: $$script"; $(BIN)/python "$$script"; done

# Needs no network. The tests skip themselves where there is no GPU; the sanitizer comes with CUDA.
gpu-check: setup ## check the CUDA kernels on this machine's GPU: values, opcheck, sanitizer, times into gpu-kernels.csv
	@echo "gpu-check: values and opcheck"
	@$(BIN)/python -m pytest -q -rs tests/gpu
	@if ! $(BIN)/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then \
	  echo "gpu-check: no GPU, so neither the sanitizer nor times"; exit 0; fi; \
	if command -v compute-sanitizer >/dev/null; then \
	  for tool in memcheck racecheck synccheck; do echo "gpu-check: compute-sanitizer $$tool"; \
	    compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python -m tests.gpu.once || exit 1; done; \
	else echo "gpu-check: no compute-sanitizer on the path, so memory and races were not checked"; fi; \
	echo "gpu-check: times"; \
	$(BIN)/python benchmarks/kernels.py --device cuda --rounds 30 --inductor --csv gpu-kernels.csv

docs: setup ## build the documentation into docs/_build/html
	@echo "docs: building docs/_build/html"
	@$(BIN)/python -m sphinx -q -W -b html docs docs/_build/html

clean: ## remove what builds, tests and benchmarks left, but not .venv
	@echo "clean: removing build products and caches"
	@rm -rf build dist docs/_build lightning_logs .pytest_cache .mypy_cache .ruff_cache *.egg-info
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The stamp is written last, so a set-up that failed is done again. PyTorch comes first and by its exact version:
# an open range would let the other packages pull in the newest build for CUDA.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard csrc/* csrc/*/*) lightning_ptdp/kernels/build.py | $(BIN)/python
	@rm -f $@
	@echo "setup: installing PyTorch"
	@$(PIP) $(TORCH_ARGS) torch
	@echo "setup: installing lightning_ptdp with all extras"
	@$(PIP) 'setuptools>=77' wheel
	@$(PIP) --no-build-isolation --editable '.[hf,docs,dev]'
	@touch $@

$(BIN)/python:
	@echo "setup: making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
