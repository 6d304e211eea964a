# Two commands set everything up on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Tests that need neither torch nor a process of their own.
QUICK := tests/test_documentation.py tests/test_corpus_benchmark.py \
	tests/snapshot/test_redact.py tests/snapshot/test_files.py tests/snapshot/test_source.py

.PHONY: demo check test lint types tests docs gallery versions clean

demo: $(VENV)/.installed
	$(BIN)/reprokit demo

check: lint types
	$(BIN)/pytest -q $(QUICK)

test: lint types docs tests

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.installed-dev
	$(BIN)/mypy

tests: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

gallery: $(VENV)/.installed
	$(BIN)/python examples/gallery/make.py

# Each version in an environment of its own, of about 5 GB; hours. `make versions TORCH="2.6.0 2.15.0" CORPUS=folder`
versions: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/versions.py --torch $(TORCH) --python $(PYTHON) $(if $(CORPUS),--corpus $(CORPUS))

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
