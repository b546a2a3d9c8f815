# Every target sets up what it needs on a fresh machine: a virtual environment in .venv and the
# packages at the versions in constraints.txt. Run again, it reinstalls only what changed.

PYTHON ?= python3
# Extra arguments for `maskdial serve` or pytest: make serve ARGS="--port 9000"
ARGS ?=
# Processes that run tests side by side; 0 runs them all in one, for a debugger.
WORKERS ?= logical

BIN := .venv/bin
PIP := $(BIN)/python -m pip
RUNTIME := .venv/.runtime-installed
TEST := .venv/.test-installed
DEV := .venv/.dev-installed
# An editable install also builds the kernels, where there is a C++ compiler.
PROJECTS := pyproject.toml hatch_build.py $(wildcard server/maskdial/kernels/src/*)
DIST := .venv/.dist-installed
DEPLOY := .venv/.deploy-installed
DOCS := .venv/.docs-installed
SANITIZED := .venv/.sanitized
LOCKING := .venv/.locking
# Ray and other projects' clients have environments of their own: they pin what the server also uses.
RAY := .venv-ray/.installed
CLIENTS := $(patsubst tests/clients/%/requirements.txt,.venv-clients/%/.installed,\
	$(wildcard tests/clients/*/requirements.txt))
# The development packages include those for tests, which include the runtime's.
FOR_SERVING := $(firstword $(wildcard $(DEV) $(TEST)) $(RUNTIME))
FOR_TESTING := $(firstword $(wildcard $(DEV)) $(TEST))
PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS) --maxprocesses=8 --dist=worksteal
# A test that failed in what `make test` leaves out runs once more, alone.
AGAIN = { echo "Once more, alone. Each that passes now is flaky: a fault to mend."; \
	$(BIN)/python -m pytest -m "" --last-failed --last-failed-no-failures=none -rpf $(ARGS); }
# The kernels, as hatch_build.py builds them; where that fails, the editable install says why.
ifeq ($(shell uname -sm),Linux x86_64)
COMPILE := PYTHONPATH=server $(BIN)/python -c \
	"from maskdial.kernels.build import build, library_path as path; path().exists() or build()" 2>/dev/null
else
COMPILE := true
endif

# An environment does not survive the move of its checkout, nor the removal of its Python: its programs
# name both. What they say then is "not found", and make's 127.
define BROKEN
for pip in .venv/bin/pip .venv-ray/bin/pip .venv-clients/*/bin/pip; do
	bin=$${pip%/pip}; env=$${bin%/bin};
	if test -L $$bin/python && ! test -e $$bin/python; then
		echo "$$env: its Python is gone; remove it and run make again: rm -rf $$env";
	elif test -f $$pip && ! test -L $$env && ! grep -qF "$(CURDIR)/$$bin/" $$pip; then
		echo "$$env was made in another folder; remove it and run make again: rm -rf $$env";
	fi;
done
endef
ifneq ($(filter-out help locks,$(MAKECMDGOALS)),)
FAULT := $(shell $(BROKEN))
$(if $(FAULT),$(error $(FAULT)))
endif

.PHONY: help serve kernels test test-fast test-wide test-all test-zoo test-cuda test-webgpu test-clients test-agents test-conformance \
	test-deploy test-ray test-sanitized \
	coverage check format docs dist locks

help:
	@echo "make serve         serve the starter models (runtime packages only, no torch)"
	@echo "make kernels       build our own kernels, with PyPI's C++ compiler where there is no other"
	@echo "make test          run the tests: each capability once (minutes)"
	@echo "make test-fast     run the quick tests of server and client; installs no torch"
	@echo "make test-wide     run the further cases that make test leaves out (a quarter of an hour)"
	@echo "make test-zoo      run most architectures and whole load tests (minutes)"
	@echo "make test-all      run all of these, and those below but for test-cuda"
	@echo "make test-cuda     run the tests that need an NVIDIA GPU and the extra cuda (docs/gpu.md)"
	@echo "make test-webgpu   run the WebGPU plug-in on Chromium's software driver (minutes)"
	@echo "make test-clients  run other projects' clients against the server"
	@echo "make test-agents   run agents from npm and PyPI against a scripted model"
	@echo "make test-conformance  run other projects' conformance suites against a model that replies sensibly"
	@echo "make test-deploy   check the Helm chart, the dashboard and the rules"
	@echo "make test-ray      run two replicas on a Ray cluster on this machine"
	@echo "make test-sanitized  run the tests of the kernels under AddressSanitizer and UBSan (g++)"
	@echo "make coverage      run the tests and report the lines that they reach (htmlcov/)"
	@echo "make check         lint, check the format and the types"
	@echo "make format        format, and apply the fixes that are safe"
	@echo "make docs          build the documents as a site that needs no network (build/site)"
	@echo "make dist          build the distributions and try them in a fresh environment"
	@echo "make locks         pin the container image's packages by hash; with PYTHON=python3.12"
	@echo
	@echo 'Variables: PYTHON=python3.12 (for a new .venv), WORKERS=4 (test processes),'
	@echo '           ARGS="--port 9000" (serve), ARGS="-k sampler" (test)'

serve: $(FOR_SERVING)
	$(BIN)/maskdial serve $(ARGS)

kernels: $(FOR_SERVING)
	$(PIP) install -c constraints.txt -e ".[kernels]"
	$(BIN)/python -m maskdial.kernels build

test: $(DEV)
	$(PYTEST) $(ARGS)

test-all: test test-wide test-zoo test-webgpu test-sanitized test-clients test-agents test-conformance test-deploy test-ray

test-fast: $(FOR_TESTING)
	$(PYTEST) --no-torch --ignore-glob='*loadtests*' -m "not slow and not wide" $(ARGS)

test-wide: $(DEV)
	$(PYTEST) -m "wide and not zoo and not webgpu and not cuda" $(ARGS) || $(AGAIN)

test-zoo: $(DEV)
	$(PYTEST) -m zoo $(ARGS) || $(AGAIN)

test-cuda: $(DEV)
	$(PYTEST) tests/cuda -m cuda -n 2 $(ARGS)

test-webgpu: $(DEV)
	$(PYTEST) tests/webgpu -m "webgpu or not webgpu" $(ARGS)

test-clients: $(DEV) $(CLIENTS)
	$(BIN)/python -m tests.clients .venv-clients $(ARGS)

test-agents: $(DEV) .venv-agents/.installed
	$(BIN)/python -m tests.agents .venv-agents $(ARGS)

test-conformance: $(DEV) .venv-conformance/.installed
	$(BIN)/python -m tests.conformance .venv-conformance $(ARGS)

test-deploy: $(FOR_TESTING) $(DEPLOY)
	$(PYTEST) tests/deploy $(ARGS)

test-ray: $(RAY)
	.venv-ray/bin/python -m pytest tests/ray $(ARGS)

# Python itself is not instrumented, so the sanitizer is loaded before it, and leaks are its own.
test-sanitized: $(FOR_TESTING)
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	CXX=g++ $(BIN)/python -m maskdial.kernels build --sanitize --output $(SANITIZED)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc TESTS_KERNELS=$$(ls $(SANITIZED)/*.so) \
		$(BIN)/python -m pytest tests/kernels -m "not zoo" $(ARGS)

coverage: $(DEV)
	$(PYTEST) -m "not zoo and not webgpu and not cuda" --cov --cov-report=term --cov-report=html $(ARGS)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python clients/generate_sync.py
	$(BIN)/python -m tools.architecture_table
	$(BIN)/python -m tools.settings_table
	$(BIN)/python -m tools.speed_chart
	$(BIN)/python -m tools.metrics_table
	$(BIN)/python -m tools.errors_table
	$(BIN)/python -m tools.dashboard

docs: $(DOCS)
	$(BIN)/python -m tools.site

dist: $(DIST)
	$(BIN)/python -m tools.check_dist

# In an environment of its own: the image's Python need not be that of .venv.
locks:
	$(PYTHON) -m venv --clear $(LOCKING)
	$(LOCKING)/bin/python -m pip install -c constraints.txt --upgrade pip
	$(LOCKING)/bin/python -m tools.image_locks

$(RUNTIME): $(PROJECTS) constraints.txt | $(BIN)/pip
	@echo "installing the server's packages into .venv and compiling the kernels: a minute or two"
	@$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

# Dependency groups need pip 25.1; Python 3.11 and 3.12 come with an older one.
$(TEST): $(PROJECTS) constraints.txt | $(BIN)/pip
	$(PIP) install -c constraints.txt --upgrade pip
	$(PIP) install -c constraints.txt -e . --group test
	touch $@

$(DEV): $(PROJECTS) constraints.txt | $(BIN)/pip
	$(PIP) install -c constraints.txt --upgrade pip
	# pip keeps one core busy; the kernels are compiled meanwhile.
	$(COMPILE) & $(PIP) install -c constraints.txt --group dev; status=$$?; wait; exit $$status
	$(PIP) install -c constraints.txt -e ".[export]" --group dev
	# The tests compare with them. The first asks for an older transformers, with which it would not be compared.
	$(PIP) install -c constraints.txt --no-deps gliner gliner2
	touch $@

$(DIST): pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install -c constraints.txt --upgrade pip
	$(PIP) install -c constraints.txt --group dist
	touch $@

$(DEPLOY): pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install -c constraints.txt --upgrade pip
	$(PIP) install -c constraints.txt --group deploy
	touch $@

$(DOCS): pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install -c constraints.txt --upgrade pip
	$(PIP) install -c constraints.txt --group docs
	touch $@

$(RAY): $(PROJECTS) constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -c constraints.txt --upgrade pip
	$(@D)/bin/python -m pip install -c constraints.txt -e ".[ray]" --group test
	touch $@

.venv-clients/%/.installed: tests/clients/%/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -r $<
	touch $@

# The programs run as they come. No script of a package runs when it is installed, but for two that put
# the binary that npm brought in its place.
.venv-agents/.installed: $(wildcard tests/agents/*.json tests/agents/*.txt)
	npm install --prefix .venv-agents/node --ignore-scripts --no-audit --no-fund \
		$$($(PYTHON) -c "import json; print(*('@'.join(p) for p in json.load(open('tests/agents/npm.json')).items()))")
	node .venv-agents/node/node_modules/@anthropic-ai/claude-code/install.cjs
	node .venv-agents/node/node_modules/opencode-ai/postinstall.mjs
	for name in $(basename $(notdir $(wildcard tests/agents/*.txt))); do \
		$(PYTHON) -m venv .venv-agents/$$name && \
		.venv-agents/$$name/bin/python -m pip install -r tests/agents/$$name.txt || exit 1; done
	touch $@

# Of this one, the cases are read; what it would install runs models.
BFCL := bfcl-eval==2026.3.23
.venv-conformance/.installed: tests/conformance/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -r $<
	$(@D)/bin/python -m pip install --no-deps $(BFCL)
	touch $@

# pip, not python, marks a usable environment: where Debian's python3-venv is missing, venv fails
# after it has linked python.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "maskdial needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
