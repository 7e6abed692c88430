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

.PHONY: demo test tools check format test-system mutations chaos compare-trl install clean

demo: install
	$(BIN)/penstock demo

test: check tools
	$(BIN)/python -m pytest

# Prometheus and promtool from PATH, else from Debian's package, without root; where neither is to be had, it says so, and
# the tests that need them are skipped.
tools: install
	$(BIN)/python -m deploy.observability.tools $(VENV)/tools

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Needs the operating system's redis-server (7.0 or newer), and fails where it is missing.
test-system: install
	$(BIN)/python -m pytest -m system tests/system

# Breaks each formula once, in a copy, and fails if the conformance suite does not notice. Within an hour on two cores.
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

install: $(STAMP)

$(STAMP): pyproject.toml Makefile deploy/cpu-overrides.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --overrides deploy/cpu-overrides.txt \
	  --index-strategy unsafe-best-match $(TORCH_FROM) "torch==2.13.0+cpu" -e ".[cpu,dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-trl .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
