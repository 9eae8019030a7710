# Every target works in a fresh clone: the first one makes .venv, and so does the next one after
# pyproject.toml has changed. Paths are relative, so a folder whose name has spaces will do.

PYTHON ?=
JOBS ?= 2
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

# The first candidate that is new enough and can make a virtual environment.
fits := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))
candidates = $(if $(PYTHON),echo "$(PYTHON)",printf '%s\n' python3.14 python3.13 python3.12 \
    python3; ls -d ~/.pyenv/versions/*/bin/python | sort -rV)
found = $(shell { $(candidates); } 2>/dev/null | while read -r python; do \
    "$$python" -c '$(fits)' </dev/null >/dev/null 2>&1 && echo "$$python" && break; done)

# The compiler of TPUs that jax wants. Apart from the other packages: jax, where it finds it among
# them, looks for TPUs at every start, and complains.
libtpu := from importlib.metadata import requires; \
    print(next(r.split(";")[0] for r in requires("jax") if r.startswith("libtpu")))

# JAX's CUDA plugin, which compiles for NVIDIA GPUs, is of one version with jaxlib. Apart too.
jaxlib := from importlib.metadata import version; print(version("jaxlib"))

# A PYTHON= that will not do is refused even when .venv is there already.
ifneq ($(strip $(PYTHON)),)
ifeq ($(found),)
$(error PYTHON=$(PYTHON) $(or $(shell "$(PYTHON)" --version 2>&1 </dev/null | sed -n \
    '1s/^Python/is Python/p'),does not run): jaxkv needs Python 3.12 or newer with venv)
endif
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all check docs format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile
	@echo "PYTHON=python3.13 names the Python of a new .venv, JOBS=4 the test processes,"
	@echo "ARGS='-k pool' adds arguments to pytest."

setup: $(READY) ## make .venv and install jaxkv into it, with the tools that the targets below need

demo: $(READY) ## hold a conversation of five turns with SmolLM2-135M (fetched once, 93 MB)
	@$(RUN) scripts chat --demo

test: $(READY) ## run the tests, but for the slow ones
	@$(RUN) -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

test-all: $(READY) ## run every test
	@$(RUN) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

check: $(READY) ## lint, formatting, types, and which package may import which
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)
	$(RUN) -m pytest -q tests/test_layering.py

docs: $(READY) ## build the documentation and the API reference into site/; a broken link is an error
	@$(RUN) -c 'import mkdocs' 2>/dev/null || \
	    $(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(RUN) -m mkdocs build --strict
	@echo "open site/index.html"

format: $(READY) ## put the sources into the form that `check` wants
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean: ## remove .venv and the tools' caches (models stay in the user's cache folder)
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis site

$(RUN):
	$(eval python := $(found))
	$(if $(python),,$(error found no Python 3.12 or newer with venv: install one, such as your \
	    system's python3.13 and python3.13-venv, or name one with PYTHON=))
	@echo "making $(VENV) with $(python)"
	@"$(python)" -m venv --clear $(VENV)

# ensurepip repairs a .venv whose making was cut short.
$(READY): pyproject.toml | $(RUN)
	@echo "installing jaxkv and its tools into $(VENV): a minute or two"
	@$(RUN) -m ensurepip >/dev/null
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	    --target $(VENV)/targets "$$($(RUN) -c '$(libtpu)')" 2>/dev/null || \
	    echo "libtpu is not to be had here: tests that compile for TPUs will be skipped"
	@version="$$($(RUN) -c '$(jaxlib)')"; \
	    $(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	    --target $(VENV)/targets/cuda "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" \
	    nvidia-cuda-nvdisasm 2>/dev/null || \
	    echo "JAX's CUDA plugin is not to be had here: tests that compile for GPUs will be skipped"
	@touch $@
