# `make demo` and `make test` share one installation, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torch's CPU build is not on the package index: use PIP_FIND_LINKS if it is set, else PyTorch's index.
TORCH_FROM := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--extra-index-url https://download.pytorch.org/whl/cpu)

export PYTHONUNBUFFERED := 1
# Every process of a run imports the same large libraries; without byte code each process would compile them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all tools check types style imports helm format test-system test-gpu bench-gpu test-cluster test-kind mutations chaos chaos-stub compare-trl install clean

demo: install
	$(BIN)/penstock demo

# Test processes in parallel: one more than the two cores, because many tests mostly wait.
TEST_WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder
test: check tools
	$(PYTEST)

# Also the tests marked slow: clusters, chaos, resumed runs, stores, Sentinels, soak, planted faults, all gradient matrices.
# They mostly compute, and Ray's start-up deadlines are short for a busy machine: one test process per core.
test-all: TEST_WORKERS = 2
test-all: check tools
	$(PYTEST) -m "not system and not images and not gpu"

# Prometheus, promtool and busybox from PATH, else from Debian's packages, without root. If neither works, it names the
# missing package, and the tests that need it are skipped.
tools: install
	$(BIN)/python -m tests.harness.programs $(VENV)/tools

# Two at once: mypy, which takes longest, uses one core.
check: install
	$(MAKE) --no-print-directory --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) types style imports helm

types: install
	$(BIN)/mypy

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

imports: install
	$(BIN)/lint-imports
	$(BIN)/python -m deploy.cli.reference --check

# Lints the chart; tests/helm checks its objects.
helm: install
	$(BIN)/helm lint --strict helm/penstock
	$(BIN)/helm lint --strict helm/penstock --values helm/penstock/values-cpu.yaml
	$(BIN)/python -m deploy.kubernetes.chart_readme --check

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Needs the operating system's redis-server (7.0 or newer), redis-cli and openssl; if one is missing, it fails and names
# the package.
test-system: tools
	$(BIN)/python -m pytest -m system tests/system

# Need NVIDIA GPUs, and GPU_PYTHON: a Python with torch for CUDA, DeepSpeed, transformers, pydantic, safetensors, pyarrow
# and pytest. `make install` has torch for CPUs, with which no test on GPUs runs. What is missing is named.
GPU_PYTHON ?=
test-gpu: $(if $(GPU_PYTHON),,install)
	PYTHONPATH=. $(or $(GPU_PYTHON),$(BIN)/python) -m pytest tests/gpu

# Step time, tokens per second, MFU, memory against the plan: docs/performance.md. Exit status 2 without a device.
BENCH_FLAGS ?=
bench-gpu: $(if $(GPU_PYTHON),,install)
	PYTHONPATH=. $(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.learner.gpu $(BENCH_FLAGS)

# Part of make test-all: a run on pods that drain, die and restart, with the commands of the chart's pods.
test-cluster: install
	$(BIN)/python -m pytest -m "not system and not images and not gpu" tests/cluster

# The image, KubeRay and the chart on a real Kubernetes in containers (kind), `helm test`, then drills; deletes the cluster
# at the end. Needs kind, kubectl, helm, docker or podman, 4 CPUs, 16 GiB and access to registries; nothing of
# `make install`. KEEP=1 keeps the cluster.
test-kind:
	$(PYTHON) -m tests.kind.run

# Plants a fault in each formula and in the platform, in a copy, and fails if `make test` would miss one. Takes up to an
# hour on two cores.
mutations: install
	$(BIN)/python -m tests.mutations.run

# Kills, suspends, disconnects and damages processes, servers and files at least 220 times, rewinds runs in between, and
# fails if a group is lost or counted twice. Takes up to four hours on two cores; with the same seed it continues where
# it was interrupted.
CHAOS_SEED ?= 1
CHAOS_RUNS ?= runs/chaos
chaos: install
	$(BIN)/python -m tests.chaos.campaign --seed $(CHAOS_SEED) --runs $(CHAOS_RUNS)

# Trains at least 10,000 groups under kills, stops, cut connections, failovers, rewinds and damaged messages, with stub
# engines, and fails if a group is lost or counted twice. Takes up to ten minutes on two idle cores; continues like
# `make chaos`.
chaos-stub: install
	$(BIN)/python -m tests.chaos.stub --seed $(CHAOS_SEED) --runs $(CHAOS_RUNS)-stub

# Compares TRL's loss with ours, in a separate environment; see benchmarks/peers/trl/README.md.
compare-trl: .venv-trl/.installed
	PYTHONPATH=. .venv-trl/bin/python -m benchmarks.peers.trl.compare

.venv-trl/.installed: benchmarks/peers/trl/requirements.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet uv
	.venv-trl/bin/uv pip install --python .venv-trl/bin/python --index-strategy unsafe-best-match $(TORCH_FROM) \
	  "torch==2.13.0+cpu" -r benchmarks/peers/trl/requirements.txt
	touch $@

.PHONY: lock image-cpu image-gpu sbom test-images
# Pins the images' packages with hashes. Locked versions stay, unless UPGRADE=--upgrade is given. Records which of them
# owns which file (NAME.owners.json), and fails if two of them own one.
UPGRADE ?=
OWNERS = nice $(BIN)/python -m deploy.images.inventory
COMPILE = UV_CUSTOM_COMPILE_COMMAND="make lock" nice $(BIN)/uv pip compile --quiet --python-version 3.11 \
  --python-platform x86_64-manylinux_2_28 --generate-hashes $(UPGRADE)
lock: install
	$(COMPILE) deploy/locks/build.in -o deploy/locks/build.lock
	$(COMPILE) pyproject.toml --extra cpu --overrides deploy/locks/cpu-overrides.txt --constraints deploy/locks/cpu-constraints.txt \
	  --index-strategy unsafe-best-match $(TORCH_FROM) -o deploy/locks/cpu.lock
	$(COMPILE) pyproject.toml --extra gpu --overrides deploy/locks/gpu-overrides.txt \
	  --constraints deploy/locks/gpu-constraints.txt -o deploy/locks/gpu.lock
	$(OWNERS) deploy/locks/build.lock
	$(OWNERS) deploy/locks/cpu.lock --index-strategy unsafe-best-match $(TORCH_FROM)
	$(OWNERS) deploy/locks/gpu.lock

# The images penstock:VERSION-cpu and -gpu; docs/operations/containers.md describes useful BUILD_FLAGS.
BUILDER ?= buildah bud --layers
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION ?= $(shell git rev-parse HEAD)
# Time stamp of files and layers: the last commit that changed the inputs of most layers.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct -- Dockerfile deploy/images deploy/locks pyproject.toml)
TIMESTAMP ?= $(if $(findstring buildah,$(BUILDER)),--timestamp $(SOURCE_DATE_EPOCH))
BUILD_FLAGS ?=
image-cpu image-gpu: image-%:
	$(BUILDER) --target $* --tag penstock:$(VERSION)-$* $(TIMESTAMP) --build-arg SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) \
	  --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) $(BUILD_FLAGS) .

# Prints the bill of materials inside an image: make --silent sbom IMAGE=penstock:0.1.0-gpu
ENGINE ?= podman
IMAGE ?= penstock:$(VERSION)-cpu
sbom:
	@$(ENGINE) run --rm $(RUN_FLAGS) $(IMAGE) cat /usr/share/penstock/sbom.cdx.json

# The chart as a package, with the images of a registry: make chart REPOSITORY=registry.example.com/penstock CPU_DIGEST=...
# GPU_DIGEST=...; needs helm on PATH, and nothing of `make install`.
.PHONY: chart version
CHART_FOLDER ?= .
chart:
	$(PYTHON) -m deploy.kubernetes.chart_package "$(CHART_FOLDER)" --repository "$(REPOSITORY)" --cpu "$(CPU_DIGEST)" --gpu "$(GPU_DIGEST)"

version:
	@echo $(VERSION)

# Builds what the page uses of the npm registry again, after a change of its package.json; the result is committed. Needs
# node and npm, which nothing else does.
.PHONY: page
page:
	cd services/api/page/vendor && npm ci --ignore-scripts --no-audit --no-fund && npm run --silent build

# Runs the image penstock:VERSION-cpu; needs podman (or another ENGINE) and root, and fails without them.
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
