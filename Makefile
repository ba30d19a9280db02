# make demo: train a real model on two processes.  make test: lint and the whole suite.  Both set up all they need.
PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
RANKS ?= 2
# Of the suite: past it pytest is interrupted, prints what it has, and the target fails.
TEST_SECONDS ?= 1500
# What `make bench` measures: all-reduce on two processes, beside what is installed of the others.
BENCH_ARGS ?= --sizes 1K,16K,256K,1M,4M,25M,64M --zero-copy both --peers gloo,mpi4py-openmpi
# Why a test was skipped stands in the summary.
PYTEST_ARGS ?= -rfEs
# Test files that run side by side, each in a process of pytest's. Most start two ranks or more.
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# What the installed project is made of, Python files excepted: those an editable install reads in place.
BUILT_FROM := pyproject.toml setup.py $(wildcard MANIFEST.in collectives/*.pyx collectives/*.pxd collectives/*.pxi collectives/*.h host/* kernels/host/* kernels/include/coll/*)

# CuPy, NVRTC and NCCL for the CUDA that torch is built for: of another one they would overwrite what torch has brought.
# The CPU build brings none, and then any will do: kernels are compiled, and the real NCCL's calls without a GPU tested.
CUDA_EXTRA_OF := "cuda13" if (torch.version.cuda or "").startswith("13.") else "cuda12"
CUDA_EXTRA := import torch; print($(CUDA_EXTRA_OF))

.DELETE_ON_ERROR:
.PHONY: demo test thorough matrix lint sanitize bench counts gpu docs wheel wheel-aarch64 mpi setup clean FORCE

demo: $(VENV)/.built
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --nproc-per-node $(RANKS) examples/train_digits.py

# --foreground: Ctrl-C reaches pytest. It gets the same signal at the end of its time, and can then end its rank processes.
LIMITED = timeout --foreground --signal=INT --kill-after=30 $(TEST_SECONDS)
test: lint mpi
	$(BIN)/python -m compileall -q collectives tests benchmarks examples  # else each process does it where Python writes no .pyc
	$(LIMITED) $(BIN)/python -m pytest $(PYTEST_ARGS) -m "not thorough" -n $(JOBS) --dist loadfile --no-loadscope-reorder

thorough: setup
	failed=0; \
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m thorough || failed=1; \
	$(MAKE) matrix || failed=1; \
	exit $$failed

# The demo and some tests of every front end on each of these versions, `===` being the registry's build, which has CUDA: some
# minutes and 6 GB each. Environments in .venv-matrix; MATRIX_KEEP=1 keeps those that passed.
MATRIX ?= 2.8.0 2.11.0 2.13.0 2.15.0
matrix: setup
	PYTHON=$(PYTHON) bash tests/matrix.sh $(MATRIX)

lint: setup
	$(BIN)/ruff check .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/cython-lint collectives  # it calls pycodestyle by name

sanitize: setup
	PYTHON=$(abspath $(BIN)/python) bash tests/sanitize/run.sh

bench: setup
	$(BIN)/python -m collectives.bench --ranks $(RANKS) $(BENCH_ARGS)

# The table of docs/counts.md: launches, passes, bytes and waits of a step, on the simulated GPU.
counts: setup
	$(BIN)/python -m benchmarks.counts --write

# What only a GPU can show, with the torch, CuPy, Cython, pytest and g++ that $(PYTHON) has: no virtual environment, no network.
# GPU_PART=1, 2 or 3: at most nine minutes each. DRY=1: every stage without a GPU. The report: out/gpu/report.json.
GPU_PART ?= all
gpu:
	@$(PYTHON) -m benchmarks.gpu --part $(GPU_PART) $(if $(filter-out 0,$(DRY)),--dry)

# The site of docs/ and of the docstrings, in out/site. Strict: a link that leads nowhere is a failure, and so is an argument in a
# docstring that its function hasn't. Not --quiet, which drops the warnings before --strict counts them. The site needs neither torch
# nor a build, since docstrings are read from the sources; so its environment is its own.
DOCS_VENV ?= .venv-docs
docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "site: python3 -m http.server --directory out/site"

$(DOCS_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(PYTHON) tools/requirements.py docs >$(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check --no-input install --quiet -r $(DOCS_VENV)/requirements.txt
	@touch $@

# In dist/: the sdist, and a manylinux wheel for each Python that is found here, PYTHONS="python3.11 ..." naming others. Built by
# tools in an environment of their own; torch is not needed.
WHEEL_VENV ?= .venv-wheel
PYTHONS ?=
wheel: $(WHEEL_VENV)/.installed
	$(WHEEL_VENV)/bin/python tools/wheel.py $(if $(PYTHONS),--python $(PYTHONS))

# The same for aarch64, by the cross compiler (Debian: apt-get install g++-aarch64-linux-gnu).
wheel-aarch64: $(WHEEL_VENV)/.installed
	$(WHEEL_VENV)/bin/python tools/wheel.py --aarch64 $(if $(PYTHONS),--python $(PYTHONS))

$(WHEEL_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(PYTHON) tools/requirements.py wheel >$(WHEEL_VENV)/requirements.txt
	$(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check --no-input install --quiet -r $(WHEEL_VENV)/requirements.txt
	@touch $@

setup: $(VENV)/.installed

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.10 or newer, or give PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; $(PYTHON) is $$($(PYTHON) -V)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) can't make virtual environments: install its venv package (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Holds the torch version; rewritten, and so newer than the install below, only when TORCH changes.
$(VENV)/.torch: FORCE | $(BIN)/python
	@if [ "$$(cat $@ 2>/dev/null)" != "$(TORCH)" ]; then $(PIP) install "torch==$(TORCH)" && echo "$(TORCH)" >$@; fi

# The package, built in place, and what the demo needs.
$(VENV)/.built: $(VENV)/.torch $(BUILT_FROM)
	@command -v g++ >/dev/null || { echo "g++ not found: a C++17 compiler builds the host engine (Debian: apt-get install g++)" >&2; exit 1; }
	$(PIP) uninstall -qq --yes collectives  # the name that this distribution had, and that a stranger has on PyPI
	extra=$$($(BIN)/python -c 'import torch; print("," + ($(CUDA_EXTRA_OF)) if torch.version.cuda else "")') && $(PIP) install -e ".[demo$$extra]"
	@touch $@

# What the tests need beside it.
$(VENV)/.installed: $(VENV)/.built
	extra=$$($(BIN)/python -c '$(CUDA_EXTRA)') && $(BIN)/python tools/requirements.py test $$extra >$(VENV)/requirements.txt && $(PIP) install -r $(VENV)/requirements.txt
	@touch $@

# Open MPI and MPICH for the tests that start ranks with the real mpirun; without them those tests are skipped, so this never
# fails: it says what it could not do.
MPI_LOG := out/mpi.log
mpi:
	@if command -v mpirun.openmpi >/dev/null && command -v mpiexec.hydra >/dev/null; then :; \
	elif ! command -v apt-get >/dev/null; then echo "mpi: no apt-get here; tests that need Open MPI or MPICH will be skipped"; \
	elif [ "$$(id -u)" != 0 ]; then echo "mpi: not root, so Open MPI and MPICH are not installed; their tests will be skipped"; \
	else echo "mpi: installing openmpi-bin and mpich"; mkdir -p $(dir $(MPI_LOG)); \
	  { timeout 120 apt-get -qq update; DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -qq --no-install-recommends openmpi-bin mpich; } </dev/null >$(MPI_LOG) 2>&1 \
	  || echo "mpi: apt-get could not install them (see $(MPI_LOG)); tests that need them will be skipped"; \
	fi

clean:
	rm -rf $(VENV) .venv-matrix $(DOCS_VENV) $(WHEEL_VENV) build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis collectives/*.so collectives/_lib collectives/*.cpp collectives/*.c
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
