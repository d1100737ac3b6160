# make help
SHELL := bash
.ONESHELL:
.SHELLFLAGS := -eu -o pipefail -c

PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH  ?= $(PINNED)
VENV   ?= $(if $(filter $(PINNED),$(TORCH)),.venv,.venv-$(TORCH))
CORES  ?= $(shell nproc 2>/dev/null || echo 2)
BIN    := $(abspath $(VENV))/bin
ARGS   ?=

# Inductor's compiled kernels: kept between runs, and gone with `make clean`.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/build/inductor
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test lint types pytest bench clean venv compiler
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small GPT in bf16 and in FP8 and compare; ARGS='--steps 100' passes flags"
	@echo "make test    lint, types and tests; ARGS='-k policy' passes flags to pytest"
	@echo "make lint    ruff only"
	@echo "make bench   loss against bf16 over three seeds, and what our passes cost in compile time"
	@echo "make clean   remove caches, build outputs and the demo's results; the virtual environments stay"
	@echo
	@echo "TORCH=2.11.0  with this version of torch, in a virtual environment of its own ($(PINNED) if not given)"
	@echo "VENV=folder   in this virtual environment; made if it is not there"
	@echo "PYTHON=path   the Python, 3.10 or newer, to make the virtual environment with"

# Passive waiting: threads that spin for each other take a shared machine's cores from everyone, themselves included.
demo: venv compiler
	@OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-PASSIVE} $(BIN)/python examples/train_gpt.py $(ARGS)

test: lint types pytest

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# On an installed copy: mypy does not follow the editable install's mapping of passes/ to fp8compile.passes.
types: venv
	@rm -rf build/lib build/bdist.* build/mypy
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --no-index --target build/mypy .
	cd build/mypy
	$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p fp8compile

pytest: venv compiler
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest -n $(CORES) $(ARGS)

bench: venv compiler
	$(BIN)/python benchmarks/convergence.py
	$(BIN)/python benchmarks/compile_time.py

clean:
	rm -rf build dist demo .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# Installs again only if the requirements, torch's version or this folder's path changed since the last time.
venv:
	@stamp=$(VENV)/.installed
	wanted="$(CURDIR) $(TORCH) $$(cat pyproject.toml constraints.txt | cksum)"
	if [ "$$(cat $$stamp 2>/dev/null)" = "$$wanted" ]; then exit 0; fi
	if [ ! -x $(BIN)/python ]; then
		python=
		for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10); do
			if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
				python=$$candidate
				break
			fi
		done
		if [ -z "$$python" ]; then
			echo "make: needs Python 3.10 or newer; found $$($(or $(PYTHON),python3) --version 2>&1 | head -n 1 || true)." \
				"Name one with PYTHON=/path/to/python3" >&2
			exit 1
		fi
		echo "Creating $(VENV) with $$($$python --version)"
		if ! $$python -m venv $(VENV); then
			rm -rf $(VENV)
			echo "make: $$python cannot make a virtual environment; on Debian and Ubuntu install python3-venv" >&2
			exit 1
		fi
	fi
	echo "Installing torch $(TORCH) and fp8compile into $(VENV); the first time this downloads a few GB"
	mkdir -p build
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > build/constraints-$(TORCH).txt
	# --no-compile: Python compiles what is imported, not all that there is: half a minute less
	install="$(BIN)/python -m pip install --quiet --no-compile --constraint build/constraints-$(TORCH).txt"
	$$install 'setuptools>=77' wheel
	$$install --no-build-isolation --editable '.[demo,test]'
	echo "$$wanted" > $$stamp

compiler:
	@if ! command -v "$${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
		echo "make: needs a C++ compiler (g++ or clang++): Inductor builds its CPU kernels with it" >&2
		exit 1
	fi
	if ! $(BIN)/python -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'; then
		echo "make: needs Python's headers, which Inductor includes; on Debian and Ubuntu install python3-dev" >&2
		exit 1
	fi
compiler: venv
