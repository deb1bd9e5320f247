# Each target sets up what it needs. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
# The CPU build where there is no GPU: this release's default wheel index decides; override with TORCH=…
TORCH ?= torch==2.13.0

.PHONY: help setup demo serve test test-all lint types bench clean

help:
	@echo "make setup     .venv with everything in it"
	@echo "make demo      a real model, real agent sessions over HTTP, and what the cache did"
	@echo "make serve     serve smollm2 on 127.0.0.1:8000   (ARGS='--port 9000 …')"
	@echo "make test      lint, types, imports, tests"
	@echo "make test-all  the same with the slow tests"
	@echo "make bench     the engine's own figures, on a quiet machine"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Python 3.11 or newer is needed; this is %d.%d. Try: make PYTHON=python3.11" % v[:2])'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH) (first, so that a machine without a GPU gets a CPU build where there is one)"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check -q $(TORCH)
	@echo "installing trunkline and what it needs"
	@$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[dev,gpu]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/trunkline demo $(ARGS)

serve: $(STAMP)
	@$(BIN)/trunkline serve $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

# The model is pulled first: a test that needs it would otherwise skip.
test: lint types
	@$(BIN)/trunkline pull smollm2
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-all: lint types
	@$(BIN)/trunkline pull smollm2
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m bench.kv_layout
	$(BIN)/python -m bench.engine

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
