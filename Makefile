# make test      wheel, ruff, mypy, pytest but for slow tests   make demo   eight sessions on a real server
# make test-all  the same with all tests, and branches covered  make setup  the virtual environment only
# make test-gpu  the tests that need a GPU, with PYTHON=python3 that has vLLM's CUDA build
# make lint      ruff, words and mypy                           make docs   what is generated in docs/
# make handoffs  files that a block passes on its way, counted  make fuzz   random steps of the manager, STEPS=1000000
# make site      the documents as a site, in build/site         make soak   two servers and all faults, for MINUTES=60
# make kills     engines on one disk, killed at random moments, TIMES=200
# make release   what is released, tried and listed, in build/release
SHELL := /usr/bin/env bash
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
WHEELS := build/wheels
PACKAGES := benchmarks codec manager policies vllm_hooks
# The folders count as sources too: a deleted file changes nothing but its folder.
SOURCES := pyproject.toml $(wildcard README.md) $(shell find $(PACKAGES) -name __pycache__ -prune -o -print)

export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export VLLM_CPU_KVCACHE_SPACE := 1

# Engines wait as much as they compute: four processes share two cores well, if none spins with more threads than one.
# More cores bear more: make test WORKERS=8
WORKERS := 4
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: setup test test-all test-gpu lint demo fuzz handoffs kills release soak docs site clean

setup: $(VENV)/.installed

test: $(VENV)/.servers lint
	$(PYTEST) -m "not slow" --hypothesis-profile quick

# pyproject.toml says what is measured.
test-all: $(VENV)/.servers lint
	$(PYTEST) --cov --cov-report=json:build/coverage.json
	$(BIN)/python .ci/branches.py build/coverage.json

PYTHON := python3
test-gpu:
	$(PYTHON) -m pytest tests/gpu

# mypy reads the installed wheel, from a folder where the source folders do not shadow it.
lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/words.py
	cd $(VENV) && $(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache \
	    -p manthan.codec -p manthan.manager -p manthan.policies -p manthan.vllm_hooks -p manthan.benchmarks.simulator

demo: $(VENV)/.installed
	$(BIN)/python benchmarks/demo.py

# docs/benchmarks.md, "An hour of faults". SOAK: further options.
MINUTES := 60
soak: $(VENV)/.installed
	$(BIN)/python tests/helpers/soak_hour.py --minutes $(MINUTES) $(SOAK)

# A failure prints its seed, and how to run it again. FUZZ: further options.
STEPS := 1000000
fuzz: $(VENV)/.installed
	$(BIN)/python tests/helpers/fuzz.py --steps $(STEPS) $(FUZZ)

# Pairs of files one of which calls the other, on a block's way out and back. It fails above its limits.
handoffs: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/helpers/handoffs.py

# KILLS: further options.
TIMES := 200
kills: $(VENV)/.installed
	$(BIN)/python tests/helpers/kills.py --times $(TIMES) $(KILLS)

release: $(VENV)/.installed
	.ci/release.sh $(VENV) build/release

# configuration.md and metrics.md, from the code and configs/default.yaml.
docs: $(VENV)/.installed
	$(BIN)/python docs/generate.py

site: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

$(VENV)/.dependencies: pyproject.toml $(wildcard .ci/*.sh .ci/*.py)
	.ci/setup_venv.sh $(VENV) $(WHEELS)
	touch $@

$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES)
	.ci/build_wheel.sh $(VENV) $(WHEELS)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --force-reinstall $(WHEELS)/manthan_kv-*.whl
	touch $@

$(VENV)/.servers: $(VENV)/.dependencies
	.ci/install_servers.sh
	touch $@
