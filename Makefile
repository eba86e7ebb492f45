# Everything lives in .venv. `make run` installs what the tour needs, `make test` the whole environment.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV  := .venv
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: help env run test test-all bench docs lint format clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

env: $(VENV)/full.stamp  ## make the whole environment

run: $(VENV)/tour.stamp  ## a few quick checks on real data, and the report
	@$(BIN)/assay tour

test: $(VENV)/full.stamp  ## lint, types and the default tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest

test-all: $(VENV)/full.stamp  ## every test, the slow ones included
	@$(BIN)/python -m pytest --override-ini="addopts=-q --strict-markers --import-mode=importlib"

bench: $(VENV)/full.stamp  ## speed, as ratios in one run
	@$(BIN)/python -m benchmarks

docs: $(VENV)/full.stamp  ## build the site into site/
	@$(BIN)/mkdocs build --strict

lint: $(VENV)/full.stamp  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/full.stamp  ## let ruff mend what it can
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

clean:  ## remove what was built, the environment included
	rm -rf $(VENV) site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Assay needs Python 3.11 or newer: install it, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	@echo "Making $(VENV) with $(PYTHON) ..."
	@$(PYTHON) -m venv $(VENV)

$(VENV)/tour.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what the tour needs ..."
	@$(PIP) torch
	@$(PIP) --editable ".[tables,lm]"
	@touch $@

$(VENV)/full.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the whole environment (some minutes the first time) ..."
	@$(PIP) torch
	@$(PIP) --editable ".[all,peers,ray,mlflow,dev]"
	@$(PIP) --editable ".[reasoning]" || echo "reasoning-gym is left out: without a C compiler it cannot be installed, and its tests are skipped"
	@touch $(VENV)/tour.stamp $@
