# make demo   install what the example needs, run it, print the result
# make test   install what the checks need, run them all
# make help   the other targets

# The first Python of at least 3.11 that runs.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints-dev.txt

# Where the demo keeps its checkpoints; any URL that ucpstore takes.
URL ?= build/demo

.DEFAULT_GOAL := help
.PHONY: help demo test lint pytest matrix benchmarks format clean

help:
	@echo "make demo    fine-tune a sentence encoder, resume it under three other arrangements"
	@echo "             (URL=s3://bucket/prefix for another place than $(URL))"
	@echo "make test    lint and pytest, as CI runs them"
	@echo "make lint    ruff, mypy, the import contracts"
	@echo "make pytest  the tests alone (ARGS='tests/plan -k grid')"
	@echo "make matrix  save under every arrangement, load under every one: all 64 cells,"
	@echo "             a GPT cut by hand, 28 pairs, and DeepSpeed's engines, 256 (12 minutes)"
	@echo "make benchmarks  measure against DCP, a bare loop and DeepSpeed (35 minutes)"
	@echo "make format  let ruff rewrite the files"
	@echo "make clean   remove $(VENV), build/ and the caches"

demo: $(VENV)/.examples
	$(BIN)/python examples/finetune.py $(URL)

test: lint pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

pytest: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

benchmarks: $(VENV)/.benchmarks
	for what in small syncs local s3 floor page; do $(BIN)/python -m benchmarks.compare $$what || exit 1; done
	$(BIN)/python -m benchmarks.deepspeed && $(BIN)/python -m benchmarks.deepspeed page

matrix: $(VENV)/.dev
	$(BIN)/python tests/matrix/cells.py
	$(BIN)/python tests/matrix/gpt.py
	$(BIN)/python tests/deepspeed/cells.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Stamp files: a target is made again when the pins or the declared dependencies changed, and a
# virtual environment whose making was interrupted is made anew.
$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "ucpstore needs Python 3.11 or newer: none found. Name one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.examples: $(VENV)/.created pyproject.toml constraints-dev.txt
	@echo "Installing ucpstore and what the example needs into $(VENV) (a few minutes, about 1.5 GB) ..."
	@$(PIP_INSTALL) -e '.[examples]'
	@touch $@

$(VENV)/.benchmarks: $(VENV)/.dev
	@$(PIP_INSTALL) -e '.[benchmarks]'
	@touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml constraints-dev.txt
	@echo "Installing ucpstore and its development tools into $(VENV) (a few minutes, about 2 GB) ..."
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.examples $@
