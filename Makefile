# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV ?= $(if $(filter-out python3,$(PYTHON)),.venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'),.venv)
RUN := $(VENV)/bin
# The first Python 3.12 that runs here, for the newest JAX: on the path, or kept by pyenv or uv.
NEWEST = $(shell for python in python3.12 "$$(pyenv prefix 3.12 2>/dev/null)/bin/python3.12" \
  "$$(uv python find --no-python-downloads 3.12 2>/dev/null)"; do \
  "$$python" -c "" 2>/dev/null && echo "$$python" && break; done)
OF_NEWEST := .venv-newest
PEERS := .venv-peers
MUTANTS := .venv-mutants
INTEGRATIONS := .venv-integrations
# What tests need that use no other library. Environments that run a few of them are not compiled to
# bytecode: that takes longer than to compile what is imported.
FEW = --quiet --disable-pip-version-check --no-compile -c constraints.txt
TESTING = beartype hypothesis pytest pytest-xdist
# Hundreds of processes import the same files: each is compiled to bytecode once, even where a
# container says that none is kept, as most images of Python do.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-ci test-gangs test-absent environments compilers chromium test-newest test-integrations test-all test-faults test-mutants lint format bench bench-maxtext echarts docs constraints package clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(VENV)/.installed ## create the virtual environment and install everything

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "plurax needs Python 3.11 or newer; say make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## real handwritten digits on all cores, then a hundred networks at once on spirals
	rm -rf runs/digits runs/spirals
	$(RUN)/plurax train examples/digits.py --devices cores --output runs/digits
	$(RUN)/plurax train examples/spirals.py --devices cores --output runs/spirals

# One worker runs a file: its tests share what one of them computes and compiles.
test: setup ## run the tests, or all of PART=showing, or of TESTS="tests/unit/test_plan.py ..."
	$(RUN)/python -m pytest -n 2 --dist loadfile \
	  $(if $(PART)$(TESTS),-m 'not slow and not gangs') \
	  $(if $(PART),$$($(RUN)/python tests/parts.py $(PART) || echo no-such-part)) $(TESTS)

test-ci: setup ## what make test leaves to CI: pages, kills, further cases of a contract
	$(RUN)/python -m pytest -n 2 --dist loadfile -m 'ci and not slow' tests

test-gangs: setup ## the tests with real gangs of processes, a cluster of Ray, kernels of notebooks
	$(RUN)/python -m pytest -n 2 --dist loadfile -m 'gangs and not slow' tests

chromium: ## install Chromium from Debian or Ubuntu, which the tests of the report page draw it with
	@for name in chromium google-chrome chrome; do command -v $$name && exit; done; \
	as=$$(test "$$(id -u)" = 0 || echo sudo); export DEBIAN_FRONTEND=noninteractive; \
	$$as apt-get update -qq && $$as apt-get install -qq -y --no-install-recommends chromium

$(OF_NEWEST)/.installed: pyproject.toml constraints.txt
	"$(NEWEST)" -m venv $(OF_NEWEST)
	$(OF_NEWEST)/bin/python -m pip install $(FEW) $(TESTING) -e '.[equinox,pictures]'
	@touch $@

test-newest: TESTS = $(addprefix tests/unit/test_,$(addsuffix .py,jaxpr batch_minor sharding \
  drawn_programs schedules stages candidates loop_constants loops remat stream \
  manual_axes recorded_collectives estimate)) tests/hlo/test_stages_hlo.py \
  tests/parity/test_early_reduction.py tests/parity/test_fused_attention.py \
  tests/parity/test_experts_over_data.py tests/parity/test_kernels_over_context.py \
  tests/parity/test_sorted_rows.py
test-newest: $(if $(NEWEST),$(OF_NEWEST)/.installed) ## the tests of jaxpr, partition and pipeline on Python 3.12, with the newest JAX
	@if [ -n "$(NEWEST)" ]; then \
	  $(OF_NEWEST)/bin/python -m pytest -n 2 --dist loadfile $(TESTS); \
	else \
	  echo "NOT TESTED on the newest JAX: there is no Python 3.12 on this machine"; \
	fi

$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt tests/integrations/requirements.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install $(FEW) \
	  -r tests/integrations/requirements.txt -e '.[dev]'
	@touch $@

# One process a file, two at a time: libraries that bring a runtime of their own do not share one.
test-integrations: $(INTEGRATIONS)/.installed ## the tests with large libraries: PyTorch, TensorFlow, W&B
	@printf '%s\n' tests/integrations/test_*.py | \
	  xargs -n 1 -P 2 $(INTEGRATIONS)/bin/python -m pytest

# Outside of the checkout, since they are gigabytes: one for each set of versions.
COMPILERS = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/plurax-compilers/$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

$(COMPILERS)/.installed:
	$(PYTHON) -m venv $(COMPILERS)
	$(COMPILERS)/bin/python -m pip install $(FEW) $(TESTING) '.[pictures,tpu,cuda]'
	@touch $@

environments: $(INTEGRATIONS)/.installed $(COMPILERS)/.installed $(if $(NEWEST),$(OF_NEWEST)/.installed) ## install what CI needs beside `make setup`

compilers: $(COMPILERS)/.installed ## install the compilers of TPUs and GPUs, which need neither

test-absent: compilers ## what the compilers of TPUs and GPUs make of our programs
	PYTHONPATH=src $(COMPILERS)/bin/python -m pytest -m 'not slow' tests/absent/test_*.py

test-all: setup compilers ## the tests, the slow ones too, with many more draws
	PLURAX_TEST_PROFILE=all $(RUN)/python -m pytest -n 2 --dist loadfile -m ''
	PYTHONPATH=src $(COMPILERS)/bin/python -m pytest -m '' tests/absent/test_*.py

test-faults: export PLURAX_FAULT_ROUNDS ?= 200
test-faults: setup ## real gangs that are killed, cut off, stopped; PLURAX_FAULT_ROUNDS=200 kills of one
	$(RUN)/python -m pytest -m '' -rA --tb=short tests/faults tests/resume/test_watched.py

$(MUTANTS)/.installed:
	$(PYTHON) -m venv $(MUTANTS)
	$(MUTANTS)/bin/python -m pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	@touch $@

test-mutants: setup $(MUTANTS)/.installed ## do the tests notice changes? MODULE=resample (tests/mutants)
	$(MUTANTS)/bin/python tests/mutants/run.py $(MODULE) --python $(abspath $(RUN)/python)

lint: setup ## check style and types
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: setup ## mend style
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

$(PEERS)/.installed: benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

bench: setup $(PEERS)/.installed $(INTEGRATIONS)/.installed ## measure against the peers and write benchmarks/results, docs
	$(RUN)/python -m benchmarks --peers $(PEERS)/bin/python
	$(INTEGRATIONS)/bin/python -m benchmarks sources  # with the libraries that give the data
	$(RUN)/python -m benchmarks.report

# Outside of the checkout, as the compilers are: MaxText brings gigabytes, and a JAX of its own.
MAXTEXT = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/plurax-maxtext/$(shell cksum < benchmarks/maxtext.txt | cut -d' ' -f1)

$(MAXTEXT)/.installed:
	"$(NEWEST)" -m venv $(MAXTEXT)
	$(MAXTEXT)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  -r benchmarks/maxtext.txt
	@touch $@

bench-maxtext: $(MAXTEXT)/.installed ## compile steps beside MaxText's train_compile, for TPUs that are not here
	PYTHONPATH=src $(MAXTEXT)/bin/python -m benchmarks.maxtext

echarts: setup ## take Apache ECharts anew from npm, for the page of `plurax report`; VERSION=6.1.0
	$(RUN)/python packaging/vendor_echarts.py $(VERSION)

docs: setup ## build the documentation into site/
	$(RUN)/mkdocs build --strict

constraints: setup ## resolve constraints.txt anew, for Python 3.11 to 3.13
	$(RUN)/python -m pip install --quiet uv
	$(RUN)/uv pip compile --universal --python-version 3.11 --extra dev --upgrade --no-header \
	  --no-annotate --no-emit-index-url --no-emit-find-links pyproject.toml -o constraints.txt

package: setup ## build sdist and wheel into dist/, check them, and train from the wheel alone
	rm -rf dist
	$(RUN)/python -m build --outdir dist
	packaging/try_wheel.sh dist

clean: ## remove what was built, runs excepted
	rm -rf .venv .venv-* site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
