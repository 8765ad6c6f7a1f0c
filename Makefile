# Each target sets itself up: a virtual environment in .venv with what constraints.txt pins.
#   make demo     the whole thing at work (downloads the default model on first use)
#   make test     all tests but the slow ones
#   make test-slow  the slow ones (about half an hour)
#   make check    format, lint, types, floors
#   make bench    [ONLY=regex] [JSON=file]
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := cluster prefill_worker decode_worker kv_pool scheduler engine tests benchmarks

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help setup demo test test-slow check format docs bench constraints clean
help:
	@sed -n 's/^#   //p' Makefile

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "moonpool needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/moonpool demo

test: $(STAMP)
	$(BIN)/python -m pytest

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 1800

check: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

docs: $(STAMP)
	$(BIN)/python -m cluster.config.reference
	$(BIN)/python -m cluster.simulator.report.reference

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(if $(ONLY),--only '$(ONLY)') $(if $(JSON),--json '$(JSON)')

# The newest releases that pyproject.toml allows, in an environment of their own; run the tests before keeping the result.
constraints:
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install --quiet torch==2.13.0 -e '.[dev]'
	@{ sed -n '/^#/p' constraints.txt; build/constraints/bin/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/+[a-z0-9.]*$$//'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/constraints

clean:
	rm -rf $(VENV) build bench-out *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
