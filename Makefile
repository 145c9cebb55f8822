# The two commands: `make image` and `make test`. Both work from a clean clone; everything else is `envbuild --help`.

ARGS ?= --cuda 13.0 --te 2.12
VENV := .venv
ENVBUILD := $(VENV)/bin/envbuild
PYTEST := $(VENV)/bin/pytest

.PHONY: image test test-unit test-host test-integration test-full answers fuzz kills lint actionlint docs bench clean help

image: $(VENV)/ready engine ## Build and prove an image: make image ARGS="--cuda 12.6 --te 2.6"
	$(ENVBUILD) image $(ARGS)

test: lint test-unit test-host test-integration ## Lint, the fast pure tests, this host, the real engine and registry (an hour on 2 cores)

test-unit: $(VENV)/ready ## The fast pure tests, under a minute
	$(PYTEST) tests/unit -n 2 --dist worksteal

test-host: $(VENV)/ready ## What starts processes and servers on this host: git, downloads, signals, a share of the fuzzing
	$(PYTEST) tests/host -n 2 --dist worksteal

test-integration: $(VENV)/ready engine registry ## The real engine, the real registry, the CPU image twice
	$(PYTEST) tests/integration -m "not full" -n 2 --dist loadfile -o silence=1800 --durations=15

test-full: $(VENV)/ready engine registry ## Both CUDA cells, the headline's stages, the benchmark: hours
	$(PYTEST) tests/integration -m full --durations=30

REQUESTS ?= 10000
answers: $(VENV)/ready ## The quick way against the thorough one: make answers REQUESTS=10000 SEED=1 (20 minutes on 2 cores)
	PYTHONPATH=tests/unit $(VENV)/bin/python tests/unit/same_answers.py --requests $(REQUESTS) --seed $(SEED)

RUNS ?= 2000000
SEED ?= 1
fuzz: $(VENV)/ready ## Mutated inputs for every reader of foreign data: make fuzz RUNS=2000000 SEED=1 (an hour on 2 cores)
	$(VENV)/bin/python -m tests.fuzz --runs $(RUNS) --seed $(SEED)

KILLS ?= --kills 50 --seed 15

kills: $(VENV)/ready engine ## Kill builds at random moments and look at what is left: make kills KILLS="--kills 50 --seed 15"
	$(VENV)/bin/python tests/integration/kill_runs.py $(KILLS)

lint: $(VENV)/ready ## ruff, mypy strict, the layers of the packages, plain words, the docs, the workflows, the scripts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/python scripts/plain_words.py
	$(VENV)/bin/python scripts/write_reference.py --check
	$(VENV)/bin/python scripts/check_docs.py
	$(VENV)/bin/zizmor --offline --quiet --persona=auditor .github action.yml
	$(VENV)/bin/shellcheck --external-sources $$(grep -rlx '#!/usr/bin/env bash' scripts)

actionlint: $(VENV)/ready ## Check the workflows with actionlint, which its package downloads from GitHub; no part of `make lint`
	@test -x $(VENV)/bin/actionlint || $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check '.[actionlint]'
	$(VENV)/bin/actionlint -shellcheck $(VENV)/bin/shellcheck

docs: $(VENV)/docs-ready ## The site of the docs, in build/site; a link that leads nowhere fails it
	$(VENV)/bin/python scripts/write_reference.py
	$(VENV)/bin/mkdocs build --strict --quiet

bench: $(VENV)/ready ## The figures of docs/results/figures.md that need no engine
	$(VENV)/bin/python benchmarks/bench_solve.py
	$(VENV)/bin/python benchmarks/bench_commands.py

.PHONY: engine
engine: ## A Docker engine: the one that is there, or one that scripts/install-engine installs and starts
	@docker info >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1 || { \
		echo "no Docker engine answers; installing and starting one (scripts/install-engine)"; scripts/install-engine; }
	@command -v mmdebstrap >/dev/null && command -v zstd >/dev/null && command -v git >/dev/null || scripts/install-engine

.PHONY: registry
registry: engine
	@command -v docker-registry >/dev/null || scripts/install-engine

$(VENV)/ready: pyproject.toml
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "envbuild needs Python 3.11 or newer; python3 is $$(python3 --version)"; exit 2; }
	@python3 -m venv $(VENV) 2>/dev/null || { echo "python3-venv is missing; installing it (scripts/install-engine)"; scripts/install-engine; python3 -m venv $(VENV); }
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(VENV)/docs-ready: pyproject.toml $(VENV)/ready
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

clean: ## Remove the environment and what tests left; images and caches stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'
