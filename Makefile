# Everything a fresh clone needs: `make demo`, `make test`. `make help` lists the rest.

# The interpreter that makes the environment: 3.11 if it is there.
PYTHON   ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
# Further arguments for pip, e.g. --extra-index-url https://download.pytorch.org/whl/cpu
PIP_ARGS ?=
# The engine: cpu or gpu.
ENGINE   ?= cpu
# Arguments for pytest instead of the whole suite, e.g. TESTS="tests/unit -k wire"
TESTS    ?=
# How many processes run the tests that start no service.
WORKERS  ?= 2
# Which layouts to measure for docs/fidelity.md, all unless it says, e.g. LAYOUTS="'TP 4' 'TP 2 × PP 2'"
LAYOUTS  ?=
# Which measurements of GPUs, all unless it says, e.g. RUNS="'V2, one rank'"
RUNS     ?=
# A folder with KubeRay's CRD files, for k8s-validate.
CRDS     ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed-$(ENGINE)

# tools/protos.sh reads these, also when a test runs it.
export PYTHON PIP_ARGS

.PHONY: help demo test test-cluster test-compose test-lowest test-unit fidelity fidelity-gpu four-gpus bench docs packages lint format protos k8s-validate clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo       small models served, one with TP=2, traces from a separate client, pictures of them'
	@echo 'make test       the test suite'
	@echo 'make test-cluster  several replicas, models and nodes, and what is lost of them: as root, with iproute2'
	@echo 'make test-lowest  the unit tests and a trace with the lowest versions that pyproject.toml allows: downloads them'
	@echo 'make test-compose  the image for CPUs built, and docker-compose.yml run with it: where a Docker daemon answers'
	@echo 'make test-unit  the tests that need no engine: seconds'
	@echo 'make fidelity   measure every location in every layout, and write docs/fidelity.md'
	@echo 'make fidelity-gpu ENGINE=gpu  the same on GPUs, with both model runners and in both precisions'
	@echo 'make four-gpus ENGINE=gpu  fidelity and benchmarks over four GPUs, in four parts of ten minutes at most'
	@echo 'make bench      benchmarks: a table, and JSON in benchmarks/results'
	@echo 'make docs       the documents as a site, in site/; a warning is an error'
	@echo 'make packages   the distributions interpose and interpose-server, in dist/'
	@echo 'make lint       ruff, mypy, and which folder imports from which'
	@echo 'make format     ruff, changing files'
	@echo 'make protos     generate interpose/v1 from protos/'
	@echo 'make k8s-validate CRDS=DIR  check k8s/ against the schemas of Kubernetes, of KubeRay (DIR), of Serve, and of the settings'
	@echo 'make clean      remove caches and build output; the environments stay'
	@echo
	@echo 'PYTHON=$(PYTHON)  ENGINE=$(ENGINE)  PIP_ARGS=$(PIP_ARGS)  TESTS=$(TESTS)  WORKERS=$(WORKERS)'

# On some machines pip finds torchvision and its kin only as builds for another torch. Importing one of those fails, and
# transformers imports it if it is installed; nothing here needs it.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV): 4 GB, a few minutes.'
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -e '.[$(ENGINE),dev]'
	$(BIN)/python -c 'import torchvision' 2>/dev/null || \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py --pip-args='$(PIP_ARGS)'

# What starts no service is spread over processes, each file whole to one of them; their threads would wait for each other's
# cores. The longest file is among the first.
SPREAD := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# Services are started one after the other; the rest is run also when a test of them has failed.
test: $(STAMP)
ifeq ($(strip $(TESTS)),)
	failed=0; \
	$(BIN)/python -m pytest tests/e2e || failed=1; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) tests/engine tests/gpu tests/packaging tests/pythons tests/unit || failed=1; \
	exit $$failed
else
	$(BIN)/python -m pytest $(TESTS)
endif

test-cluster: $(STAMP)
	$(BIN)/python -m pytest tests/cluster

test-lowest: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/lowest

# What it measures is printed as it comes.
test-compose: $(STAMP)
	$(BIN)/python -m pytest --capture=no --verbose tests/compose

test-unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) tests/unit

fidelity: $(STAMP)
	$(BIN)/python -m tests.fidelity $(LAYOUTS)

fidelity-gpu: $(STAMP)
	$(BIN)/python -m tests.fidelity.on_gpus $(RUNS)

# Each part ends in time, also if a process stands still; the rest is run also when a part has failed.
WITHIN := timeout --signal=INT --kill-after=20 590 $(BIN)/python -m

four-gpus: $(STAMP)
	failed=0; \
	$(WITHIN) tests.fidelity.on_gpus --layout 'TP 4' --seconds 520 || failed=1; \
	$(WITHIN) tests.fidelity.on_gpus --layout 'TP 2 × PP 2' --seconds 520 || failed=1; \
	$(WITHIN) benchmarks tier_ranks --tensor-parallel-size 1 4 --layout 2x2 --service --seconds 460 || failed=1; \
	$(WITHIN) benchmarks tensor_parallel --tensor-parallel-size 4 || failed=1; \
	exit $$failed

bench: $(STAMP)
	$(BIN)/python -m benchmarks

packages: $(STAMP)
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir dist server

# Material asks to try its successor at each build.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos:
	tools/protos.sh

k8s-validate: $(STAMP)
	$(BIN)/python -m tools.k8s --crds '$(CRDS)'
	$(BIN)/python -m pytest tests/k8s

clean:
	rm -rf build dist site .demo .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
