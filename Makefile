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
# Areas of make test (by default none) and make test-all (all): all, changed, or names (tests/areas.py)
AREAS ?=

# Every process of the tests and of the server would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE

# What the compiled library is made of: it is rebuilt when one of these changes.
CSRC = $(shell find kernels/trunkline/kernels/csrc -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
NATIVE := CMakeLists.txt $(wildcard $(addprefix kernels/trunkline/kernels/csrc/,common/* cpu/*.h cpu/*.cc cpu/levels/* names/*))

.PHONY: help setup serve chat test test-all check check-native check-threads check-emulation check-cuda wheel gpu-kit format docs demo-model pins clean

help: ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
NEEDED := import tomllib; package = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*package["dependencies"], *package["optional-dependencies"]["dev"], sep="\n")
setup: $(STAMP) ## Create .venv with pinned dependencies (quick when nothing changed)

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@if [ -z "$(PYTHON)" ]; then echo "Trunkline needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; fi
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "Installing pinned dependencies into $(VENV) (the first time: some minutes, about 200 MB)"
	@# Python compiles what it imports; of most of torch's and transformers' modules nothing ever is. What serving
	@# imports is compiled here once; at the first start, every process would do it at the same time.
	@# What the package needs is fetched and unpacked while the compiler makes the package itself.
	@mkdir -p build && $(BIN)/python -c '$(NEEDED)' > build/needed.txt
	@$(PIP) --no-compile -c constraints.txt -r build/needed.txt & \
		$(PIP) --no-compile --no-deps -e . || { kill $$!; exit 1; }; wait $$!
	@$(BIN)/python -c 'import trunkline.worker.__main__' & \
		$(BIN)/python -c 'import trunkline.router.__main__, trunkline.controller.__main__, trunkline.deploy.cli.app'; wait $$!
	@touch $(STAMP)

serve: $(STAMP) ## Serve the demo model: a router, a controller and its tensor-parallel workers
	@exec $(BIN)/trunkline serve $(ARGS)

chat: $(STAMP) ## Talk to the served model
	@exec $(BIN)/trunkline chat $(ARGS)

check: $(STAMP) ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CSRC)
	$(BIN)/mypy --num-workers 2

# The number of the best instruction-set level that runs here: it and the first one are compiled with sanitizers.
WIDEST := from trunkline.kernels.native import ISA_LEVELS, isa_levels; print(ISA_LEVELS.index(isa_levels()[0]))
# The library of names (chunks' names, the router's table, ids of a prompt, runs of texts) and what tests it.
NAMES := tests/kvstore/test_names.py tests/router/routing/test_index.py tests/router/test_listed_prompts.py \
	tests/controller/test_draft_texts.py
check-native: $(STAMP) ## Compile the CPU libraries with warnings as errors and sanitizers, run their tests
	$(BIN)/cmake -S . -B build/sanitized -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_BUILD_TYPE=Debug \
		-DTRUNKLINE_STRICT=ON -DTRUNKLINE_SANITIZE=address,undefined \
		-DTRUNKLINE_LEVELS="0;$$($(BIN)/python -c '$(WIDEST)')" >/dev/null
	$(BIN)/cmake --build build/sanitized -j 2
	$(BIN)/cmake --install build/sanitized --component kernels --prefix build/sanitized/installed >/dev/null
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=detect_leaks=0 \
		TRUNKLINE_NATIVE_LIBRARY=build/sanitized/_native.so \
		TRUNKLINE_NAMES_LIBRARY=build/sanitized/installed/trunkline/kvstore/_names.so $(BIN)/python -m pytest -q --capture=sys \
		-n 2 -m "sanitized and not soak" tests/kernels $(NAMES)

# The code of threads is the same at all levels. What ranks share is not followed: they are processes. Addresses are
# not drawn at random (setarch): some that the kernel may draw are the sanitizer's own.
THREADED ?= $(addprefix tests/kernels/test_,decode.py dense.py grouped.py live_plan.py pool.py prefill.py sampling.py)
check-threads: $(STAMP) ## Compile the CPU library with the thread sanitizer, run the tests of its threads
	$(BIN)/cmake -S . -B build/threads -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_BUILD_TYPE=Debug \
		-DTRUNKLINE_SANITIZE=thread -DTRUNKLINE_LEVELS=0 >/dev/null
	$(BIN)/cmake --build build/threads -j 2
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libtsan.so)" \
		TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1 report_thread_leaks=0" \
		TRUNKLINE_NATIVE_LIBRARY=build/threads/_native.so setarch -R $(BIN)/python -m pytest -q --capture=sys \
		-n 2 -k "not cuda" -m "not soak" $(THREADED)

# Tensors lie in memory that the sanitizer's allocator has made, so a kernel that leaves one is noticed.
EMULATED ?= $(addprefix tests/kernels/test_,cuda.py cuda_layers.py cuda_sampling.py cuda_workspace.py experts.py live_plan.py \
	library_attention.py scaled_products.py) tests/worker/test_step_graphs.py
check-emulation: $(STAMP) ## Run the CUDA kernels emulated under address and undefined-behaviour sanitizers
	cd tests && TRUNKLINE_EMULATION_SANITIZED=1 ../$(BIN)/python -c \
		'from kernels.cuda_emulated import build_emulated; build_emulated()'
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=detect_leaks=0 TRUNKLINE_EMULATION_SANITIZED=1 $(BIN)/python -m pytest -q --capture=sys \
		-n 2 -m "not soak" $(EMULATED) $(TESTS)

check-cuda: $(STAMP) ## Compile the CUDA kernels for all devices with warnings as errors (needs nvcc)
	$(BIN)/python -m trunkline.kernels.cuda_build --check

wheel: $(STAMP) ## Build the wheel into dist/, with compiled CUDA kernels where nvcc is
	@$(BIN)/python -m trunkline.kernels.cuda_build --if-possible
	@SOURCE_DATE_EPOCH=$(or $(shell git log -1 --format=%ct 2>/dev/null),1) $(BIN)/python -m pip wheel \
		--disable-pip-version-check --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls -l dist/trunkline-*.whl

gpu-kit: wheel ## Build build/gpu-kit: all that a visit to a machine with CUDA, torch and no network needs
	$(BIN)/python benchmarks/gpu_kit.py $(ARGS)

# Two workers for the tests that start processes, one that computes meanwhile (tests/spreading.py).
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist loadfile
# The area of the sanitizers is a command of its own.
native = @if $(BIN)/python tests/areas.py native $(1); then $(MAKE) check-native; fi
test: check ## Style, types and the tests that find regressions: what a change must pass; AREAS=changed: and what it touched
ifeq ($(strip $(TESTS)),)
	$(call native,$(or $(AREAS),none))
	$(PYTEST) --areas $(or $(AREAS),none) -m "not soak"
else
	$(BIN)/python -m pytest $(TESTS)
endif

test-all: $(STAMP) ## The rest: sanitizers, wheels, sites, browsers, charts, ssh, long runs; AREAS=...: some areas
	$(call native,$(or $(AREAS),all))
	$(PYTEST) --areas $(or $(AREAS),all) -m "area and not soak" || [ $$? -eq 5 ]
	@if [ "$(or $(AREAS),all)" = all ]; then set -x; $(BIN)/python -m pytest -q --areas all -m soak; fi

format: $(STAMP) ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

docs: $(STAMP) ## Build the documentation as a site, into build/site, with all links checked
	$(BIN)/python docs/generate/pages.py

demo-model: $(STAMP) ## Train the demo model again, from the Python standard library
	$(BIN)/python examples/demo_model/build.py $(ARGS)

pins: $(STAMP) ## Write what is installed now to constraints.txt
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude trunkline --exclude-editable 2>/dev/null \
		| grep -v '^#' | sed 's/+cpu$$//'; } > constraints.new
	@mv constraints.new constraints.txt

clean: ## Remove the environment and everything that can be made again
	rm -rf $(VENV) build dist kernels/trunkline/kernels/prebuilt .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
