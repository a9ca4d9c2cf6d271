# Set-up, tests and the demonstration. Every target creates what it needs: `make demo` and `make test` work
# from a fresh clone, in any order and again. `make test` runs the quick tests, `make test-slow` the
# slow ones too, `make test-all` also those that cross options with more options than the gate has time for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes of the test run. Two on two cores: XLA's compilation is mostly single threaded.
JOBS ?= 2

# Without bytecode every process of a run compiles the project again, and rewrites the asserts of all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-all lint format docs gpu-test faults fuzz neighbours release clean
demo: $(VENV)/experiments.done
	$(BIN)/gdn train bytes --max-minutes 4.5 --out runs/demo-$$(date +%Y%m%d-%H%M%S)
	@echo "the command gdn lies in $(BIN); to type it without the folder: . $(BIN)/activate"

test: $(VENV)/test.done
	$(BIN)/python -m pytest -m "not slow and not crossed" --changed -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/test.done
	$(BIN)/python -m pytest -m "not crossed" --changed -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Compiles everything anew: what another run has kept is not looked at.
test-all: $(VENV)/test.done
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && JAX_COMPILATION_CACHE_DIR=$$folder \
	  $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# The tests that need a GPU, in PER_CARD processes for each card; then those that need a card's memory or several cards.
# Eight minutes on two H200s with 32 cores, but for the last tests. GPU_PYTHON= another Python that has JAX with CUDA.
CARDS = $(shell nvidia-smi --list-gpus 2>/dev/null | wc -l)
PER_CARD ?= 16
GPU_PYTHON ?= $(BIN)/python
gpu-test: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/test.done)
	XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform GDN_TEST_CARDS=$(CARDS) \
	  $(GPU_PYTHON) -m pytest -m "gpu and not alone" -n $$(($(CARDS) * $(PER_CARD))) --dist worksteal
	$(GPU_PYTHON) -m pytest -m "gpu and alone"

# Whether the tests notice the faults listed in tests/faults/, put into a copy one by one: twenty minutes.
# FAULTS="--report FILE" keeps each verdict, so that a run that is cut goes on from there.
faults: $(VENV)/test.done
	$(BIN)/python tests/faults/run.py --jobs $(JOBS) $(FAULTS)

# Random legal calls against the oracle and random illegal ones; FUZZ="--seed 3 --legal 100" for another campaign.
fuzz: $(VENV)/test.done
	$(BIN)/python tests/fuzz/run.py $(FUZZ)

# Builds dist/ and tries the wheel in an environment of its own; RELEASE="--python python3.13 --with jax==0.11.2".
release: $(VENV)/release.done
	$(BIN)/python tests/release/run.py $(RELEASE)

# MaxText's, SkyRL's and keras-hub's own layers and tokamax's operation with this rule inside, and transformers' models on checkpoints that
# this library writes, in environments of their own, which it fills from the package index. NEIGHBOURS="tokamax" for one of them.
neighbours: $(VENV)/test.done
	$(BIN)/python tests/neighbours/run.py $(NEIGHBOURS)

lint: $(VENV)/test.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check

format: $(VENV)/test.done
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site of docs/, the notebooks and the docstrings. A warning, a dead link or anchor is an error.
docs: $(VENV)/docs.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "gdn-jax needs Python 3.12 or newer; try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/%.done: pyproject.toml | $(BIN)/python
	@echo "installing what .[$*] needs into $(VENV): minutes, in which pip prints nothing"
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[$*]'
	@touch $@
