# Everything a developer runs. Needs python3 (3.10 or newer) with pip and venv; the first run of a target installs what
# that target needs into .venv, and changes of the sources need no new installation.
#
#   make test                       the full test suite
#   make test ARGS="-k frames -x"   a part of it
#   make test JOBS=0 ARGS="-s"      in one process, for a debugger or to see what is printed
#   make test PYTHON=python3.13     on another interpreter (.venv is rebuilt when PYTHON differs from last time)
#   make test EXTRAS=test,compat    with torch, so that nothing is skipped (its default build takes gigabytes)
#   make demo DEVICE=acl-emulator   the demo in the memory of an emulated NPU (needs gcc); DEVICE=acl: of a real one

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
DEVICE ?=
EXTRAS ?= test
JOBS ?= 2

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
BUILT_FOR := $(PYTHON) in $(CURDIR)
TESTED := $(VENV)/.test-$(EXTRAS)
# It looks for packages where the first python on PATH does. What numpy leaves unknown is no fault of ours.
COMPLETE := PATH="$(abspath $(BIN)):$$PATH" python -m pyright --ignoreexternal --verifytypes
TYPED := $(wildcard src examples benchmarks tests/conftest.py tests/house.py tests/typing)

ifneq ($(filter-out acl acl-emulator,$(DEVICE)),)
$(error DEVICE is "$(DEVICE)", it can be acl or acl-emulator)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test lint format type bench clean force

help:
	@echo "make demo    two processes: one prefills, the other pulls its KV cache and decodes;"
	@echo "             DEVICE=acl: in the memory of an NPU, DEVICE=acl-emulator: of an emulated one"
	@echo "make test    the full test suite"
	@echo "make lint    ruff: rules and formatting"
	@echo "make format  let ruff mend what it can"
	@echo "make type    mypy, strict; pyright: whether every public type is known"
	@echo "make bench   throughput and latency, beside plain sockets (ARGS=--help tells more)"
	@echo "make clean   remove .venv and everything generated"

# DEVICE=acl insists on an NPU, DEVICE=acl-emulator builds one in software; without it, whatever is there.
demo: $(VENV)/.run
ifeq ($(DEVICE),acl-emulator)
	home=$$($(BIN)/python -m tests.acl_emulator) && \
	ASCEND_HOME_PATH=$$home KVPULL_DEVICE_BACKEND=acl $(BIN)/python examples/prefill_decode.py $(ARGS)
else ifeq ($(DEVICE),acl)
	KVPULL_DEVICE_BACKEND=acl $(BIN)/python examples/prefill_decode.py $(ARGS)
else
	$(BIN)/python examples/prefill_decode.py $(ARGS)
endif

test: $(TESTED)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(VENV)/.lint
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

type: $(VENV)/.lint
	$(BIN)/python -m mypy $(ARGS) $(TYPED)
	for package in kvpull_async kvpull_sync; do $(COMPLETE) $$package || exit 1; done

# A picture takes more than the library needs: make bench ARGS="--limits --plot out.png"
bench: $(VENV)/.run $(if $(findstring --plot,$(ARGS)),$(VENV)/.bench)
	$(BIN)/python benchmarks/bench_pull.py $(ARGS)

clean:
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	find src -name '*.so' -delete
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Three stages, so that `make demo` does not fetch test tools, nor `make test` the linters.
$(VENV)/.run: pyproject.toml src/kvpull_async/memory/_speedups.c
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and "kvpull needs Python 3.10 or newer; $(PYTHON) is %d.%d. Choose another: make PYTHON=python3.12 ..." % v[:2])'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable .
	@echo '$(BUILT_FOR)' > $(VENV)/.built-for
	@touch $@

$(TESTED): $(VENV)/.run
	$(PIP_INSTALL) --editable '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.bench: $(VENV)/.run
	$(PIP_INSTALL) --editable '.[bench]'
	@touch $@

$(VENV)/.lint: $(TESTED)
	$(PIP_INSTALL) --editable '.[lint]'
	@touch $@

# Another interpreter, or a work tree that was copied together with its .venv (which still points at the old sources).
ifneq ($(shell cat $(VENV)/.built-for 2>/dev/null),$(BUILT_FOR))
$(VENV)/.run: force
endif
