# `make demo` and `make test` set up all they need. With PYTHON=/path/to/python they use that interpreter and the torch
# it has, and install into it only what is missing.
VENV := .venv
BASE := $(shell command -v python3.11 || command -v python3)

ifdef PYTHON
RUN := $(PYTHON)
INSTALLED := build/installed
CONSTRAIN :=
else
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
CONSTRAIN := --constraint constraints.txt
endif

OLDEST_TRITON := 3.6.0

.PHONY: demo test lint format kernels-check kernels-check-oldest sweep clean

demo: $(INSTALLED)
	$(RUN) examples/quickstart.py --output-dir runs/quickstart --overwrite

test: $(INSTALLED) lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal -m "not gpu and not optional and not sweep"

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

format: $(INSTALLED)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Compile the sizes that matter for six GPU architectures, without one, and hold them to benchmarks/compile_budget.json.
kernels-check: $(INSTALLED)
	$(RUN) benchmarks/compile_check.py --jobs 2

# The same with the oldest supported Triton, held to what processors have alone: budgets are of the newest.
kernels-check-oldest: $(INSTALLED)
	$(RUN) -m pip install --quiet --no-deps --target build/triton-$(OLDEST_TRITON) triton==$(OLDEST_TRITON)
	PYTHONPATH=build/triton-$(OLDEST_TRITON) $(RUN) benchmarks/compile_check.py --jobs 2

# Every configuration that Transformers registers: half an hour on two cores; writes docs/results/architectures.md.
sweep: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal -m sweep

$(INSTALLED): pyproject.toml constraints.txt
ifndef PYTHON
	$(BASE) -c "import sys; sys.exit(None if sys.version_info >= (3, 11) else 'Python 3.11 or newer is needed')"
	$(BASE) -m venv $(VENV)
endif
	$(RUN) -m pip install --quiet $(CONSTRAIN) --editable ".[dev,report]"
	mkdir -p $(dir $@) && touch $@

clean:
	rm -rf $(VENV) build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
