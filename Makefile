# Every target makes .venv by itself when it has to, on a machine that has nothing but Python 3.11 or newer and pip.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# Small matrices on few cores: more threads per process only get in each other's way
export OMP_NUM_THREADS := 1

.PHONY: help demo test lint format bench docs clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

# NIXL and Mooncake come with the packages for the tests
DEMO_NEEDS := $(if $(findstring nixl,$(ARGS))$(findstring mooncake,$(ARGS)),$(VENV)/.dev,$(VENV)/.demo)

demo: $(DEMO_NEEDS)  ## hand a real prefill over to a decode process and compare every token (ARGS="--corrupt" breaks it)
	@$(BIN)/pdhandoff demo $(ARGS)

# The gate: protocol, layouts and planner are covered completely, lines and branches.
test: $(VENV)/.dev  ## run every test, with the coverage gate (ARGS="tests/planner -k pages" without the gate)
ifeq ($(strip $(ARGS)),)
	@$(BIN)/python -m pytest -n 2 --cov=pdhandoff.protocol --cov=pdhandoff.layouts --cov=pdhandoff.planner \
		--cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100
else
	@$(BIN)/python -m pytest $(ARGS)
endif

lint: $(VENV)/.dev  ## ruff, ruff format, mypy --strict, the layer rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(VENV)/.dev  ## format, and mend what ruff can mend safely
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(VENV)/.dev  ## measure, print, and write bench-out/ (ARGS="--readme" fills the README's table)
	@$(BIN)/python benchmarks/run.py $(ARGS)

docs: $(VENV)/.dev  ## build docs/_build/html; a warning is an error
	@$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:  ## remove what the other targets made, .venv too
	rm -rf $(VENV) .venv.lock build dist docs/_build docs/_generated demo-out bench-out .coverage .coverage.* \
		.mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo: requirements/demo.txt pyproject.toml
	@tools/environment demo

$(VENV)/.dev: requirements/demo.txt requirements/dev.txt pyproject.toml
	@tools/environment dev
