# Each target sets up what it needs in .venv, once; again when the project's requirements change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q install -c constraints.txt
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-for-docs

.DEFAULT_GOAL := help
.PHONY: help test test-all test-sample test-mpi test-nccl test-gpu fuzz docs demo demo-text demo-resume lint types imports check clean

help:  ## show this list
	@echo "varcomm: variable-size collectives, partitioned graph networks, tensor parallelism"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 make test   chooses another interpreter (3.11 or newer)"

test: $(STAMP)  ## run the first tier of tests: 8 minutes on 2 cores
	@$(BIN)/python -m pytest

test-all: $(STAMP)  ## run both tiers, and parts of them on MPI and with the NCCL engine
	@$(BIN)/python -m pytest --all
	@$(MAKE) test-mpi
	@$(MAKE) test-nccl

# SEED chooses the tests: the commit, so that every commit runs others.
test-sample: SEED ?= $(shell git rev-parse HEAD 2>/dev/null || date +%F)
test-sample: $(STAMP)  ## run one in 20 tests of the second tier, drawn by SEED
	@$(BIN)/python -m pytest --sample $(SEED)

# Without tests that compile, and without refusals: no message reaches the engine in these.
test-mpi: $(STAMP)  ## run the tests of primitives and plans on MPI
	@$(BIN)/python -m pytest --engine mpi -k "not compiled and not refus" tests/ops tests/plan

test-nccl: $(STAMP)  ## run primitives, plans and models with the NCCL engine on CPUs
	@$(BIN)/python -m pytest --engine strict-nccl \
		-k "not compiled and not refus and not cuda_graph" tests/ops tests/plan \
		tests/data_parallel/test_sharded_gradients.py tests/data_parallel/test_sharded_overlap.py \
		tests/models/test_mesh_networks.py tests/models/test_graph_transformer.py

# It needs no installation: only a Python with torch and torch_geometric. Each part takes less than
# eight minutes, and writes its page in docs/benchmarks/gpu; PART=right runs one of them.
# DEVICE=cpu PAGES=folder rehearses the same cases without a GPU.
test-gpu: GPU_PYTHON ?= python3
test-gpu: PART ?= right fast several
test-gpu: DEVICE ?= cuda
test-gpu: PAGES ?= docs/benchmarks/gpu
test-gpu:  ## on a GPU: what is right, fast and scales, as pages in docs/benchmarks/gpu
	@failed=0; for part in $(PART); do \
		PYTHONPATH=. OMP_NUM_THREADS=1 $(GPU_PYTHON) -m tests.gpu $$part --device $(DEVICE) --page $(PAGES) || failed=1; \
	done; exit $$failed

fuzz: $(STAMP)  ## draw programs and faulty calls at random, for half an hour
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run --minutes 30

# -a: the search finds index entries only of pages that this run has written
docs: $(DOCS_STAMP)  ## run the tutorials and build the pages: docs/_build/html/index.html
	@OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -a -b html docs docs/_build/html
	@if command -v node > /dev/null; then node docs/check_search.js docs/_build/html; \
	else echo "search of the pages: not checked, node is not installed"; fi
	@echo "docs/_build/html/index.html"

demo: $(STAMP)  ## train a graph network on the ocean, on 2 ranks, and check it against one
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/ocean/train.py --check 2

demo-text: $(STAMP)  ## train a GPT on Python's documentation, on 2 ranks, and check it against one
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/text/train.py --check

demo-resume: $(STAMP)  ## kill one of three ranks in training: two go on, and lose nothing
	@$(BIN)/python examples/resume/kill_and_resume.py

lint: $(STAMP)  ## ruff and codespell; habits of style in changed lines, which stop nothing
	@$(BIN)/ruff check .
	@$(BIN)/codespell
	-@$(BIN)/python docs/check_prose.py

types: $(STAMP)  ## mypy, strict
	@$(BIN)/mypy

imports: $(STAMP)  ## check the layers: imports only go down
	@$(BIN)/python -m pytest -q tests/test_architecture.py

check: lint types imports test  ## lint, mypy, layers and the first tier

clean:  ## remove .venv, caches and builds
	@rm -rf $(VENV) docs/_build docs/generated build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "varcomm needs Python 3.11 or newer: make PYTHON=...")'
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) -e '.[dev]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@$(PIP) -e '.[docs]'
	@touch $@
