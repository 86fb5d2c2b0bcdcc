# Every target does the set-up it needs in $(VENV), once: it is repeated when pyproject.toml, setup.py or a
# file in csrc/ changes.

VENV ?= .venv
PYTHON ?= python3
TORCH ?= "torch>=2.11" torchvision
JOBS ?= 2
PYTHONS := 3.10 3.11 3.12 3.13

ifneq ($(words $(VENV)),1)
$(error VENV is "$(VENV)": give a path without spaces, for example VENV=.venv)
endif

end_to_end := tests/fedssl/engines/flower/test_deployment.py
python := "$(VENV)/bin/python"
installed := $(VENV)/.installed
count := import os; print(min(4, (os.cpu_count() or 1) + 1))
printed := $(VENV)/end_to_end.txt
types := $(VENV)/mypy.txt

version_of = $(shell "$(1)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
have = $(call version_of,$(VENV)/bin/python)
want = $(call version_of,$(PYTHON))
chosen = $(filter-out file,$(origin PYTHON))

.PHONY: help demo test test-nightly mutants lint style size docs wheels sanitize clean check-python

help:
	@echo 'make demo      run the comparison on the digits data and draw its picture (minutes)'
	@echo 'make test      lint, type checks and the tests'
	@echo 'make test-nightly  the tests that take minutes: memory of the emulated kernels, all of nvcc, a rehearsal'
	@echo 'make mutants   plant faults one at a time and tell which test finds each (hours; a second call goes on)'
	@echo 'make lint      ruff, the layers of imports and mypy only'
	@echo 'make size      the lines of Python by folder: all, code and docstrings'
	@echo 'make docs      the site in build/site; it needs no network to be read'
	@echo 'make wheels    fedkernels and fedssl as distributions of their own, in dist/ (minutes)'
	@echo 'make sanitize  the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer (half an hour)'
	@echo 'make clean     remove .venv, caches and build outputs; what you ran (runs/) stays'
	@echo
	@echo 'PYTHON=python3.12  the Python that makes the environment, 3.10 to 3.13 (default: python3)'
	@echo 'TORCH="torch==..." what pip installs first (default: torch>=2.11 and torchvision)'
	@echo 'VENV=DIR           where the environment lives (default: .venv)'
	@echo 'JOBS=N             runs at a time in make demo (default: 2)'

demo: $(installed)
	"$(VENV)/bin/fedssl" run-table digits_demo --jobs $(JOBS)

# The tests of what is compiled and packed are left out where nothing of it has changed since they passed.
# One thread a process: the processes share the cores. A file's tests stay together, as they share what is compiled.
# Files are started in the order of tests/conftest.py, the longest first, and not by their number of tests. There is one
# process more than processors, up to four, as many tests wait for processes of their own.
# The end-to-end tests start processes of Flower's, and wait for them most of the time: they run
# beside the others, one after another. So does mypy, which has one thread. What they print comes last. Where Flower is
# missing there are none of them, and pytest ends with 5.
# Compiled with warnings as errors; FEDKERNELS_WERROR=0 in the environment takes them as warnings.
# Python keeps its bytecode, also where the environment says not to: each process of a test would compile all sources.
unexport PYTHONDONTWRITEBYTECODE
test test-nightly: export FEDKERNELS_WERROR ?= 1

test: style
	$(python) -m mypy >"$(types)" 2>&1 & mypy=$$!; \
	OMP_NUM_THREADS=1 $(python) -m pytest -m "not nightly" $(end_to_end) >"$(printed)" 2>&1 & beside=$$!; \
	trap "kill $$mypy; kill -INT $$beside" INT TERM; \
	OMP_NUM_THREADS=1 $(python) -m pytest -m "not nightly" -n $$($(python) -c "$(count)") --dist loadfile \
	--no-loadscope-reorder $$($(python) -m tests.of_the_build) $(end_to_end:%=--ignore=%); \
	failed=$$?; test $$failed = 0 && $(python) -m tests.of_the_build --passed; \
	wait $$beside; case $$? in 0|5) ;; *) failed=1 ;; esac; cat "$(printed)"; wait $$mypy || failed=1; cat "$(types)"; exit $$failed

test-nightly: $(installed)
	OMP_NUM_THREADS=1 $(python) -m pytest -m nightly

mutants: $(installed)
	$(python) -m tests.mutants.kernels
	$(python) -c "import cosmic_ray" 2>/dev/null || $(python) -m pip install cosmic-ray
	$(python) -m tests.mutants.python_sources

lint: style
	$(python) -m mypy

style: $(installed)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	"$(VENV)/bin/lint-imports" --no-cache

size: $(installed)
	$(python) -m tests.size

# Strict: a broken link, a missing anchor, a missing docstring or a misspelt word ends it.
docs: $(installed)
	$(python) -c "import mkdocs, codespell_lib" 2>/dev/null || $(python) -m pip install --editable ".[docs]"
	$(python) -m codespell_lib *.md docs notebooks website fedkernels fedssl/*/README.md fedssl/README.md benchmarks/results csrc
	PYTHONPATH=. $(python) -m mkdocs build --strict

# Linked for an old glibc by zig, so that the wheel of fedkernels runs where torch's own wheels run.
wheels: $(installed)
	$(python) -m auditwheel --version >/dev/null 2>&1 || $(python) -m pip install --editable ".[wheels]"
	$(python) -m distributions.build

sanitize: $(installed)
	$(python) csrc/sanitize.py

# Fixed names only: an environment elsewhere (VENV=...) is its owner's to remove.
clean:
	rm -rf .venv build dist fedkernels/_C.* *.egg-info .benchmarks .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name '.?*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first: the module of csrc/ compiles against its headers, and an isolated build would fetch a torch of its own.
# The mark is the last step, so an installation that fails or is killed is taken up again by the next call.
$(installed): pyproject.toml setup.py $(wildcard csrc/*.py csrc/*/*) fedkernels/_schemas.inc | check-python
	$(python) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv "$(VENV)"
	$(python) -m pip install $(TORCH)
	$(python) -m pip install --editable ".[test,flower,export,lora,dicom,privacy,mlflow]"
	@touch "$@"

# An environment that exists keeps its Python; only a PYTHON given by hand is compared with it.
check-python:
	$(if $(filter $(PYTHONS),$(or $(have),$(want))),,$(error Python 3.10 to 3.13 is needed, \
	but $(if $(have),$(VENV) has Python $(have): run "make clean" or set VENV,$(PYTHON) is \
	$(if $(want),Python $(want),not a Python that runs): name another one, as in "make test PYTHON=python3.12")))
	$(if $(and $(have),$(chosen),$(if $(filter $(have),$(want)),,differs)),$(error $(VENV) has Python $(have), \
	but $(PYTHON) is $(if $(want),Python $(want),not a Python that runs): run "make clean" first or set another VENV))
