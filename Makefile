# `make serve` and `make test` do all their own set-up: a virtual environment in .venv, the packages
# at the versions in constraints.txt, then the job. Run again, they reinstall only what changed.

PYTHON ?= python3
# Further arguments of `maskdial serve` or pytest: make serve ARGS="--port 9000"
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip
RUNTIME := .venv/.runtime-installed
DEV := .venv/.dev-installed
PROJECTS := pyproject.toml clients/pyproject.toml
# The development set contains the runtime, so a .venv that has it serves as it is.
SERVING := $(if $(wildcard $(DEV)),$(DEV),$(RUNTIME))

.PHONY: help serve test check format

help:
	@echo "make serve    run the server on the starter models (runtime packages only, no torch)"
	@echo "make test     run the tests"
	@echo "make check    lint, check the format and the types"
	@echo "make format   apply the format and the fixes that are safe"
	@echo
	@echo 'Variables: PYTHON=python3.12 (for a new .venv), ARGS="--port 9000" (serve), ARGS="-k sampler" (test)'

serve: $(SERVING)
	$(BIN)/maskdial serve $(ARGS)

test: $(DEV)
	$(BIN)/python -m pytest $(ARGS)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python clients/generate_sync.py

$(RUNTIME): $(PROJECTS) constraints.txt | $(BIN)/pip
	$(PIP) install -c constraints.txt -e ./clients -e .
	touch $@

# Dependency groups need pip 25.1; Python 3.11 and 3.12 bring an older one.
$(DEV): $(PROJECTS) constraints.txt | $(BIN)/pip
	$(PIP) install -c constraints.txt --upgrade pip
	$(PIP) install -c constraints.txt -e ./clients -e ".[export]" --group dev
	touch $@

# pip, not python, marks a usable environment: venv fails after it has linked python where
# Debian's python3-venv is missing.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "maskdial needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
