# One command each; the first one creates .venv and installs the project into it.

PYTHON   ?= python3
PIP_ARGS ?=
ARGS     ?=
DOCS     ?= build -q

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPED := build/typed

.DEFAULT_GOAL := help
.PHONY: help train test test-slow lint format docs bench clean

help:  ## list the targets
	@echo "usage: make TARGET [ARGS='...'] [PYTHON=python3.12] [PIP_ARGS='...']"
	@sed -n 's/^\([a-z-]*\):.*## /  \1|/p' Makefile | awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'
	@echo
	@echo "ARGS      more arguments for the program: make train ARGS='act=relu seed=1'"
	@echo "PYTHON    the Python (3.11 or newer) that .venv is made with"
	@echo "PIP_ARGS  options for pip, such as the index of PyTorch's CPU or ROCm build"

train: $(STAMP)  ## train ResNet50 with PolyNorm
	$(BIN)/python train_vision.py model=resnet50 act=polynorm $(ARGS)

test: $(STAMP)  ## run the tests, on all cores
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile $(ARGS)

test-slow: $(STAMP)  ## run the long tests, which `test` leaves out
	$(BIN)/python -m pytest -m slow $(ARGS)

# kernels/ and configs/ install as parts of polyvision, so mypy sees a tree that has them there.
lint: $(STAMP)  ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf $(TYPED) && mkdir -p $(TYPED)/polyvision
	cd $(TYPED)/polyvision && ln -s ../../../polyvision/* ../../../kernels ../../../configs .
	cd $(TYPED) && ln -s ../../train_*.py . && ../../$(BIN)/mypy --config-file ../../pyproject.toml \
	  --cache-dir ../../.mypy_cache -p polyvision -m train_vision -m train_lm

format: $(STAMP)  ## rewrite the files in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(STAMP)  ## build the documentation as a site in build/site; DOCS=serve shows it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(DOCS) -f docs/site/mkdocs.yml $(ARGS)

bench: $(STAMP)  ## measure speed and memory of the activations
	$(BIN)/python -m benchmarks.activations $(ARGS)

clean:  ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A failed install leaves no stamp, so the next call goes on where it stopped.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "polyvision needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) -V 2>&1 || :)" >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 2; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -e '.[dev]'
	touch $@
