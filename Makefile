# What `make demo` and `make test` need is installed once, into .venv; both share the step.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torch's CPU build is not on the package index: take it from PIP_FIND_LINKS where that is set, else from PyTorch's own.
TORCH_FROM := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--extra-index-url https://download.pytorch.org/whl/cpu)

export PYTHONUNBUFFERED := 1
# Every process of a run imports the same big libraries; without byte code each would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all tools check helm format test-system test-cluster mutations chaos compare-trl install clean

demo: install
	$(BIN)/penstock demo

# Processes that run tests side by side: one more than two cores, for many tests wait more than they compute.
TEST_WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder
test: check tools
	$(PYTEST)

# Those marked slow besides: clusters, chaos, resumed runs, stores, Sentinels, soak, planted faults, every gradient matrix.
# They compute more than they wait, and Ray gives what it starts on a busy machine little time: one process a core.
test-all: TEST_WORKERS = 2
test-all: check tools
	$(PYTEST) -m "not system and not images"

# Prometheus, promtool and busybox from PATH, else from Debian's packages, without root; where neither is to be had, it
# names the package, and the tests that need it are skipped.
tools: install
	$(BIN)/python -m tests.harness.programs $(VENV)/tools

check: install helm
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The chart's own check; tests/helm asks what its objects mean.
helm: install
	$(BIN)/helm lint --strict helm/penstock
	$(BIN)/helm lint --strict helm/penstock --values helm/penstock/values-cpu.yaml
	$(BIN)/python -m deploy.kubernetes.chart_readme --check

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Needs the operating system's redis-server (7.0 or newer), redis-cli and openssl; where one is missing it fails, and names
# the package.
test-system: tools
	$(BIN)/python -m pytest -m system tests/system

# Part of make test-all: a run over pods that drain, die and come back, with the commands that the chart starts.
test-cluster: install
	$(BIN)/python -m pytest -m "not system and not images" tests/cluster

# Plants faults in a copy, in each formula and in the platform, and fails if `make test` would miss one. Within an hour on
# two cores.
mutations: install
	$(BIN)/python -m tests.mutations.run

# Kills, stops, cuts off and damages everything, 200 times at least, and fails unless nothing was lost and nothing came
# twice. Within four hours on two cores; called again with the same seed, it goes on where it was interrupted.
CHAOS_SEED ?= 1
CHAOS_RUNS ?= runs/chaos
chaos: install
	$(BIN)/python -m tests.chaos.campaign --seed $(CHAOS_SEED) --runs $(CHAOS_RUNS)

# TRL's own loss against ours, in an environment of its own; see benchmarks/trl/README.md.
compare-trl: .venv-trl/.installed
	PYTHONPATH=. .venv-trl/bin/python -m benchmarks.trl.compare

.venv-trl/.installed: benchmarks/trl/requirements.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet uv
	.venv-trl/bin/uv pip install --python .venv-trl/bin/python --index-strategy unsafe-best-match $(TORCH_FROM) \
	  "torch==2.13.0+cpu" -r benchmarks/trl/requirements.txt
	touch $@

.PHONY: lock image-cpu image-gpu sbom test-images
# Pins, with hashes, what the images are built from. What is locked already stays, unless UPGRADE=--upgrade is given.
UPGRADE ?=
COMPILE = UV_CUSTOM_COMPILE_COMMAND="make lock" nice $(BIN)/uv pip compile --quiet --python-version 3.11 \
  --python-platform x86_64-manylinux_2_28 --generate-hashes $(UPGRADE)
lock: install
	$(COMPILE) deploy/locks/build.in -o deploy/locks/build.lock
	$(COMPILE) pyproject.toml --extra cpu --overrides deploy/locks/cpu-overrides.txt --constraints deploy/locks/cpu-constraints.txt \
	  --index-strategy unsafe-best-match $(TORCH_FROM) -o deploy/locks/cpu.lock
	$(COMPILE) pyproject.toml --extra gpu --overrides deploy/locks/gpu-overrides.txt \
	  --constraints deploy/locks/gpu-constraints.txt -o deploy/locks/gpu.lock

# The images penstock:VERSION-cpu and -gpu; docs/operations/containers.md tells what BUILD_FLAGS are of use.
BUILDER ?= buildah bud --layers
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION ?= $(shell git rev-parse HEAD)
# The time that files and layers get: of the last commit which changed what most of them are made of.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct -- Dockerfile deploy/images deploy/locks pyproject.toml)
TIMESTAMP ?= $(if $(findstring buildah,$(BUILDER)),--timestamp $(SOURCE_DATE_EPOCH))
BUILD_FLAGS ?=
image-cpu image-gpu: image-%:
	$(BUILDER) --target $* --tag penstock:$(VERSION)-$* $(TIMESTAMP) --build-arg SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) \
	  --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) $(BUILD_FLAGS) .

# What is inside an image, as it says itself: make --silent sbom IMAGE=penstock:0.1.0-gpu
ENGINE ?= podman
IMAGE ?= penstock:$(VERSION)-cpu
sbom:
	@$(ENGINE) run --rm $(RUN_FLAGS) $(IMAGE) cat /usr/share/penstock/sbom.cdx.json

# Starts the image penstock:VERSION-cpu for real; needs podman (or another ENGINE) and root, and fails where they are missing.
test-images: install
	PENSTOCK_TEST_IMAGE=$(IMAGE) PENSTOCK_TEST_ENGINE="$(ENGINE)" PENSTOCK_TEST_RUN="$(RUN_FLAGS)" $(BIN)/python -m pytest -m images tests/images

install: $(STAMP)

$(STAMP): pyproject.toml Makefile deploy/locks/cpu-overrides.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --overrides deploy/locks/cpu-overrides.txt \
	  --index-strategy unsafe-best-match $(TORCH_FROM) "torch==2.13.0+cpu" -e ".[cpu,dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-trl .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
