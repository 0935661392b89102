# Every goal works from a bare clone with only Python >= 3.11, pip and make: the first one fills .venv, later ones need no network.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt Makefile | cksum | tr ' ' '-')
PIP_INSTALL := -m pip --disable-pip-version-check install -qq --no-compile --constraint constraints.txt

export JAX_PLATFORMS := cpu

.PHONY: help certificates demo docs test test-all test-stores test-codebases test-engines living fuzz fuzz-atheris soak serve test-service check format package bench bench-gpu tables clean

help:
	@echo "make demo      take a T5 that T5X trained and go on in Transformers"
	@echo "make test      run the tests, long sweeps as a sample"
	@echo "make test-all  run all tests in full"
	@echo "make test-stores  convert into and out of object stores and the Hub, servers of this machine, in full"
	@echo "make test-engines  carry conversions out by Ray, torchrun, and SLURM where Debian's is installed; installs Ray"
	@echo "make test-codebases  let MaxText and Megatron-Core go on from what is written for them; installs both"
	@echo "make living    hold our steps against the living originals, LIVING_CASES drawn runs; goes on where it was stopped, and writes docs/living.md"
	@echo "make fuzz      give every reader changed samples, FUZZ_CASES each; what is no value and no error of ours is printed"
	@echo "make fuzz-atheris  the same led by the lines that are run, ATHERIS_SECONDS each; installs atheris"
	@echo "make soak      SOAK_CASES drawn conversions while things go wrong: kills, full disks, failing calls, damage"
	@echo "make serve     show the checkpoints of tests/golden in a browser; ROOT=DIR for others"
	@echo "make test-service  a service under load, under kills and signals, and on a full disk; writes its table into docs/reliability.md"
	@echo "make check     lint, check the layout of the code, type-check"
	@echo "make format    lay out the code"
	@echo "make docs      build the site of the documentation below site/; it opens from a disk"
	@echo "make package   build what is published, and try it in empty environments; needs a registry"
	@echo "make bench     measure memory and speed"
	@echo "make bench-gpu  measure optimizers on a GPU, beside their peers, and write docs/performance.md"
	@echo "make certificates  convert recorded checkpoints and prove each conversion; write docs/certificates and docs/proof.md's table"
	@echo "make tables    write converters/cards.json, docs/architecture.md and docs/conversions.md; go on in each target's own library and write docs/resuming.md; replay every recording in every backend and write docs/accuracy.md; write docs/reliability.md from what the suites left"
	@echo "make clean     remove .venv and what the tools left"

# torch goes first: with its version settled, nothing that follows chooses another build of it.
$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "statekit needs Python 3.11 or newer; try make PYTHON=...")'
	@echo "Setting up $(VENV): torch, JAX and TensorFlow are large, this takes a few minutes once."
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python install -qq pip
	@rm -f $(VENV)/.ready-*
	@$(BIN)/python $(PIP_INSTALL) torch
	@$(BIN)/python $(PIP_INSTALL) --editable '.[torch,jax,tensorflow,remote,dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/statekit demo

docs: $(READY)
	@$(BIN)/python $(PIP_INSTALL) --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Triton is for the tests of kernels alone, through its interpreter, in a process without TensorFlow.
TRITON := .triton/.ready
$(TRITON): $(READY)
	@if $(BIN)/python $(PIP_INSTALL) --no-deps --upgrade --target .triton triton==3.9.0 2>/dev/null; then touch $@; \
		else echo "Triton couldn't be installed: the tests of kernels are skipped."; fi

# Servers of stores that others wrote; where they can't be installed, their tests are skipped.
MOTO := .moto/.ready
$(MOTO): $(READY)
	@if $(BIN)/python $(PIP_INSTALL) --target .moto 'moto[server]==5.2.5' 2>/dev/null; then touch $@; \
		else echo "moto couldn't be installed: the tests of its store are skipped."; fi

AZURITE := .azurite/.ready
$(AZURITE): $(READY)
	@if npm install --silent --no-audit --no-fund --prefix .azurite azurite@3.35.0 >/dev/null 2>&1; then touch $@; \
		else echo "azurite couldn't be installed: the tests of its store are skipped."; fi

# A file is one worker's, which compiles, converts and starts once what its tests share.
# Three workers for two cores: many tests wait for a disk, a service or a child. Threads of frameworks would wait for
# each other on cores that the others have; `make test-all` lets them.
test: export OMP_NUM_THREADS := 1
test: export OPENBLAS_NUM_THREADS := 1
test: export TF_NUM_INTRAOP_THREADS := 1
test: export TF_NUM_INTEROP_THREADS := 1
test: $(READY) $(TRITON) $(MOTO) $(AZURITE)
	@$(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: $(READY) $(TRITON) $(MOTO) $(AZURITE)
	@$(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder

test-stores: $(READY) $(MOTO) $(AZURITE)
	@$(BIN)/pytest -q tests/test_places.py tests/test_stores.py tests/test_remote_targets.py tests/test_tree_laws.py tests/test_store_servers.py
	@$(BIN)/pytest -q tests/test_decoder_maps.py -k from_the_hub

test-engines: $(READY)
	@$(BIN)/python $(PIP_INSTALL) --editable '.[ray]'
	@$(BIN)/pytest -q tests/test_engines.py tests/test_work.py

test-codebases: $(READY)
	@bash tests/codebases.sh

LIVING_CASES ?= 20000
living: $(READY)
	@$(BIN)/python tests/living/sweep.py .living --cases $(LIVING_CASES) --table

FUZZ_CASES ?= 20000
fuzz: $(READY)
	@$(BIN)/python tests/fuzz/sweep.py --cases $(FUZZ_CASES)

ATHERIS_SECONDS ?= 60
fuzz-atheris: $(READY)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python $(PIP_INSTALL) atheris==3.0.0
	@$(BIN)/python tests/fuzz/atheris_driver.py | while read -r reader; do \
		$(BIN)/python tests/fuzz/atheris_driver.py "$$reader" -max_total_time=$(ATHERIS_SECONDS) || exit 1; done

SOAK_CASES ?= 1000
soak: $(READY)
	@$(BIN)/python tests/soak.py --cases $(SOAK_CASES)

ROOT ?= tests/golden
serve: $(READY)
	@$(BIN)/statekit serve --root $(ROOT) --data .service

test-service: $(READY)
	@$(BIN)/python tests/service_load.py
	@$(BIN)/pytest -q -m slow tests/test_service_*.py
	@$(BIN)/python tests/reliability_table.py

check: $(READY)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

format: $(READY)
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

package: $(READY)
	@$(BIN)/python tests/installing.py

bench: $(READY)
	@$(BIN)/python tests/benchmarks/limit.py --page
	@$(BIN)/python tests/benchmarks/memory.py
	@$(BIN)/python tests/benchmarks/convert.py
	@$(BIN)/python tests/benchmarks/opening.py
	@$(BIN)/python tests/benchmarks/transposes.py
	@$(BIN)/python tests/benchmarks/steps.py --page
	@$(BIN)/python tests/benchmarks/tpu_bytes.py
	@$(BIN)/python tests/benchmarks/verify.py

# With the Python that has torch for this GPU, which .venv has not.
GPU_PYTHON ?= python3
bench-gpu:
	@PYTHONPATH=. $(GPU_PYTHON) tests/benchmarks/gpu.py --jax --page

certificates: $(READY)
	@$(BIN)/python -W ignore tests/certificates.py

tables: $(READY)
	@$(BIN)/python tests/cards_table.py
	@$(BIN)/python tests/architecture.py
	@$(BIN)/python tests/conversion_table.py
	@$(BIN)/python tests/resuming_table.py
	@$(BIN)/python tests/accuracy_table.py
	@$(BIN)/python tests/reliability_table.py
	@$(BIN)/python tests/recognised_table.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .living .reliability .service .triton .moto .azurite
