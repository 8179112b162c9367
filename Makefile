# Every target makes .venv by itself when it has to, on a machine that has nothing but Python 3.11 or newer and pip.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
# vLLM needs packages of its own versions: the tests with a real vLLM run in an environment of their own
VLLM := .venv-vllm
ARGS ?=

# Small matrices on few cores: more threads per process only get in each other's way
export OMP_NUM_THREADS := 1

.PHONY: help demo test lint format bench docs clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

# NIXL and Mooncake come with the packages for the tests
DEMO_NEEDS := $(if $(findstring nixl,$(ARGS))$(findstring mooncake,$(ARGS)),$(VENV)/.dev,$(VENV)/.demo)

demo: $(DEMO_NEEDS) $(VENV)/.native  ## hand a real prefill over to a decode process and compare every token (ARGS="--corrupt" breaks it)
	@$(BIN)/pdhandoff demo $(ARGS)

# The gate: protocol, layouts and planner are covered completely, lines and branches.
test: $(VENV)/.dev $(VENV)/.native  ## run every test, with the coverage gate (ARGS="tests/planner -k pages" without the gate)
ifeq ($(strip $(ARGS)),)
	@tools/environment vllm
	@$(BIN)/python -m pytest -n 2 --cov=pdhandoff.protocol --cov=pdhandoff.layouts --cov=pdhandoff.planner \
		--cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100 --ignore=tests/adapter_router_e2e
	@$(BIN)/python -m pytest tests/adapter_router_e2e
	@if [[ -e $(VLLM)/.vllm ]]; then \
		$(VLLM)/bin/python -m pytest tests/adapter_vllm tests/adapter_vllm_e2e; \
	else \
		echo "suites that did not run: a real vLLM (requirements/vllm.txt cannot be installed here)"; \
	fi
else ifneq ($(findstring tests/adapter_vllm_e2e,$(ARGS)),)
	@tools/environment vllm
	@$(VLLM)/bin/python -m pytest $(ARGS)
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

bench: $(VENV)/.dev $(VENV)/.native  ## measure, print, and write bench-out/ (ARGS="--readme" fills the README's table)
	@$(BIN)/python benchmarks/run.py $(ARGS)

docs: $(VENV)/.dev  ## build docs/_build/html; a warning is an error
	@$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:  ## remove what the other targets made, .venv too
	rm -rf $(VENV) $(VLLM) .venv.lock $(VLLM).lock build dist docs/_build docs/_generated demo-out bench-out .coverage .coverage.* \
		pdhandoff/native/*.so pdhandoff/native/_abi.py .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo: requirements/demo.txt pyproject.toml
	@tools/environment demo

$(VENV)/.dev: requirements/demo.txt requirements/dev.txt pyproject.toml
	@tools/environment dev

# an installation builds the kernels; this is for changes to them
$(VENV)/.native: $(VENV)/.demo $(wildcard csrc/*) hatch_build.py
	@$(BIN)/python hatch_build.py >/dev/null
	@touch $@
