# Every target sets up what it needs: a virtual environment in .venv, torch, and this package in editable mode.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
# More threads than that make four processes on a small machine fight over its cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-all lint types format parity parity-full proof mutants architectures choices browser pictures \
        torchtitan docs bench dist clean
.DEFAULT_GOAL := help

help:            ## print this list
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  +##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What users need to run autopar.
$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

# What contributors need on top: linters, type checker, test tools, transformers.
$(VENV)/.dev: pyproject.toml $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(VENV)/.runtime  ## search plans for 4 ranks, train examples/gpt.py on them, write out/plan.html
	$(BIN)/python scripts/demo.py

test: lint types  ## lint, types and the fast tests
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder -q

test-all: lint types  ## also the tests marked slow
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q

lint: $(VENV)/.dev  ## ruff
	$(BIN)/ruff check .

types: $(VENV)/.dev  ## mypy, strict
	$(BIN)/mypy

format: $(VENV)/.dev  ## let ruff fix and format the tree
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

parity: $(VENV)/.dev  ## models × plans: largest relative error against one process
	$(BIN)/python benchmarks/parity.py

parity-full: $(VENV)/.dev  ## every model under every plan, on up to 8 ranks; two hours; goes on where it was stopped
	$(BIN)/python benchmarks/parity.py --full --resume out/parity-full.jsonl

proof: $(VENV)/.dev  ## every program of parity-full, in train and eval mode, is proved and not run; an hour
	$(BIN)/python benchmarks/proof.py

mutants: $(VENV)/.dev  ## programs with one thing changed: the proof refuses those that change a loss or a gradient; an hour
	$(BIN)/python benchmarks/mutants.py --count 1152

architectures: $(VENV)/.dev  ## a hundred more architectures × four plans on four ranks; goes on where it was stopped
	$(BIN)/python benchmarks/architectures.py --record out/architectures.jsonl

choices: $(VENV)/.dev  ## what the free search picks, and what the alternatives would have cost
	$(BIN)/python benchmarks/choices.py

browser: $(VENV)/.dev  ## pages of five plans in Chromium, which has to be there; pictures of them for docs/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[browser]'
	$(BIN)/python -m pytest tests/report/test_browser.py -q
	$(BIN)/python scripts/pictures.py

pictures: $(VENV)/.dev  ## the pictures of docs/architecture.md, with figures that the compiler computes
	$(BIN)/python -m scripts.architecture

torchtitan: $(VENV)/.dev  ## load exported configurations with torchtitan itself, in an environment of their own
	$(PYTHON) -m venv $(VENV)-torchtitan
	$(VENV)-torchtitan/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VENV)-torchtitan/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[torchtitan]' pytest
	$(VENV)-torchtitan/bin/python -m pytest tests/export/test_torchtitan.py -q

docs: $(VENV)/.dev  ## the documentation as a site, in out/site
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.dev  ## step time against DDP, FSDP2, DTensor and hand-split pipelines
	$(BIN)/python benchmarks/execution.py

dist: $(VENV)/.dev  ## sdist and wheel into dist/
	$(BIN)/python -m build

clean:  ## remove everything these targets made, .venv included
	rm -rf $(VENV) $(VENV)-torchtitan build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
