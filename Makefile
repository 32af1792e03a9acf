# cedar. `make serve` and `make test` need nothing but Python 3.11+ (and gcc, where there is one).
# the first Python on the path that is new enough
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PORT   ?= 8123
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input -q
GPU_ROWS := benchmarks/results/h200.csv
READY  := $(VENV)/.ready
BUILT  := $(VENV)/.built
# the tests that take seconds, whatever the machine
SECONDS_TIER := tests/config tests/formats tests/kernels tests/planner tests/cli/test_main.py

.DEFAULT_GOAL := help
.PHONY: help setup serve fmt lint types imports check test test-long test-gpu vectors page numbers bench bench-gpu size ci

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(BUILT)  ## virtual environment, pinned dependencies, cedar itself, compiled kernels
	@:

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "cedar needs Python 3.11 or later: none is on the path"; exit 1; }
	@test -x $(BIN)/pip || { echo "setup: virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: torch (the large one)"
	@$(PIP) install -c constraints.txt torch
	@echo "setup: cedar and the rest"
	@$(PIP) install -c constraints.txt -e '.[test,lint,plot]'
	@touch $@

# without a C compiler this says so and cedar runs on plain torch
$(BUILT): $(READY) $(wildcard cedar/kernels/cpu/native.*)
	@$(BIN)/python -m cedar.kernels.cpu.native
	@touch $@

serve: setup  ## the server and its chat page, on PORT (8123)
	@$(BIN)/cedar serve --port $(PORT)

fmt: setup  ## format the code
	@$(BIN)/ruff check --fix --quiet --exit-zero .
	@$(BIN)/ruff format .

lint: setup  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup  ## mypy
	@$(BIN)/mypy

imports: setup  ## who may import whom
	@$(BIN)/lint-imports --no-cache

check: lint types imports  ## lint, types, imports and the tests that take seconds
	@$(BIN)/python -m pytest -q -n logical --maxprocesses 4 $(SECONDS_TIER)

test: setup  ## the whole suite on a CPU, a process a core
	@$(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist worksteal --durations 12

test-long: setup  ## soaks and full sweeps, hours; record the result in docs/log.md
	@$(BIN)/python -m pytest -q -m slow --hypothesis-profile long

test-gpu: setup  ## what needs a CUDA device; golden data and the engine on it
	@CEDAR_TEST_DEVICE=cuda $(BIN)/python -m pytest -q -m "(gpu or device) and not slow"

vectors: setup  ## are the golden files the recorded ones? (scripts/vectors.py --write records)
	@$(BIN)/python scripts/vectors.py

page:  ## the chat page, from web/ into cedar/server/static/ (needs Node.js, and the network once)
	@cd web && npm install --no-package-lock --no-audit --no-fund --silent && npm run --silent build

numbers: setup  ## docs/numbers.md and the README's table, from the planner and h200.csv
	@$(BIN)/python scripts/make_numbers.py

bench: setup  ## prefill and decode speed on this CPU, into benchmarks/results/
	@$(BIN)/python benchmarks/cpu.py

bench-gpu: setup  ## kernels (beside PEERS=DIR), layers, decoding, prompts on this GPU, into benchmarks/results/h200.csv
	@$(BIN)/python benchmarks/kernels.py $(if $(PEERS),--peers $(PEERS)) --csv $(GPU_ROWS)
	@$(BIN)/python benchmarks/decode.py --preset mini,small --contexts 512,4096,131072 --csv $(GPU_ROWS)
	@$(BIN)/python benchmarks/decode.py --preset mini,small --batches 1,16 --contexts 4096 --kernels --csv $(GPU_ROWS)
	@$(BIN)/python benchmarks/decode.py --preset mini,small --prefill 131072,1048576 --csv $(GPU_ROWS)
	@$(BIN)/python benchmarks/layers.py --prefill 4096 --csv $(GPU_ROWS)
	@$(BIN)/python benchmarks/kernels.py plot
	@$(BIN)/python scripts/make_numbers.py

size: setup  ## lines of each package against its target
	@$(BIN)/python scripts/size.py

ci: check test  ## everything a change must pass
