# Trunkline: `make serve` talks, `make test` checks. Everything happens in .venv; `make help` lists all.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first interpreter that runs and is new enough; `make setup PYTHON=...` to choose another.
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)
# Options of the served cluster, e.g. make serve ARGS="--port 9000 --tp 1"
ARGS ?=
# Options of pytest, e.g. make test TESTS="tests/controller -x"
TESTS ?=

.PHONY: help setup serve chat test check format demo-model pins clean

help: ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(STAMP) ## Create .venv with pinned dependencies (quick when nothing changed)

$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "Trunkline needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; fi
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "Installing pinned dependencies into $(VENV) (the first time: some minutes, about 200 MB)"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

serve: $(STAMP) ## Serve the demo model: 1 router, 1 controller, 2 tensor-parallel workers
	@exec $(BIN)/trunkline serve $(ARGS)

chat: $(STAMP) ## Talk to the served model
	@exec $(BIN)/trunkline chat $(ARGS)

check: $(STAMP) ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check ## Style, types and the whole test suite
	$(BIN)/python -m pytest $(TESTS)

format: $(STAMP) ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo-model: $(STAMP) ## Train the demo model again, from the Python standard library
	$(BIN)/python examples/demo_model/build.py $(ARGS)

pins: $(STAMP) ## Write what is installed now to constraints.txt
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude trunkline --exclude-editable 2>/dev/null \
		| grep -v '^#' | sed 's/+cpu$$//'; } > constraints.new
	@mv constraints.new constraints.txt

clean: ## Remove the environment and everything that can be made again
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
