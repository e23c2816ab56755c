# Every target sets up what it needs. The only prerequisites are make and Python 3.11 or newer.
# `make` lists the targets.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest

# Packages are installed without byte code (see below), which Python writes at the first import unless this is set; then
# every process would compile torch again, which doubles its start-up time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo dev check test lint browser nightly coverage dist api news \
        bench strategies-table picture pictures charts docs docs-serve clean

help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Set-up in two weights: what users need, and what developers need on top of it.

setup: $(READY)  ## Install syncline into .venv, with what users need and nothing else.

# --no-compile: Python compiles what it imports anyway; compiling all of torch takes 15 seconds.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile -e .
	@touch $(READY)

dev: $(DEV)  ## Add everything that the tests and the documentation need.

$(DEV): $(READY)
	$(PIP) -e ".[dev]"
	@touch $(DEV)

demo: $(READY)  ## Train a digit classifier on two workers, in seconds.
	$(BIN)/syncline train mlp --data digits --workers 2 --epochs 20

# The gate.

lint: $(DEV)  ## Run ruff, mypy and the import contracts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint  ## Run the fast part of the gate: lint, types, unit and property tests.
	$(PYTEST) -n 2 --dist loadgroup -m "not slow" tests/architecture tests/unit tests/property

# Two tests at a time even on larger machines: each test starts processes of its own. Tests that share a cluster or a
# trained run are in one xdist_group, so that it is started once per session.
test: lint browser  ## Run the whole gate.
	$(PYTEST) -n 2 --dist loadgroup --durations 25

# Some tests open pages in Chromium. Install it where that is possible; without it, those tests are skipped.
browser: $(DEV)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Installing Chromium for the browser tests." && \
	  { apt-get install -y -q --no-install-recommends chromium || \
	    { apt-get update -q && apt-get install -y -q --no-install-recommends chromium; }; } >/dev/null 2>&1; } || \
	echo "Chromium is missing and could not be installed: browser tests will be skipped."

SEED ?= $(shell $(PYTHON) -c "import secrets; print(secrets.randbelow(2**32))")

nightly: $(DEV)  ## Run the property tests on new random examples, large floods of connections, all exports, and all layouts. SEED=n repeats a run.
	@$(eval SEED := $(SEED))echo "Hypothesis seed: $(SEED). To repeat this run: make nightly SEED=$(SEED)"
	$(PYTEST) -n 2 --dist loadgroup --hypothesis-profile nightly --hypothesis-seed $(SEED) tests/property \
	  tests/integration/test_random_loops.py || \
	  { echo "Failed with Hypothesis seed $(SEED). To repeat this run: make nightly SEED=$(SEED)"; exit 1; }
	SYNCLINE_TEST_STRANGERS=50000 $(PYTEST) tests/integration/test_strangers.py
	SYNCLINE_TEST_EXPORTS=all $(PYTEST) tests/integration/test_export.py -k zoo
	SYNCLINE_TEST_LAYOUTS=all $(PYTEST) tests/integration/test_layout_results.py tests/integration/test_any_checkpoint.py

COVERED ?= tests/unit tests/property tests/contract

coverage: $(DEV)  ## Measure coverage, worker processes included. COVERED=tests measures all tests.
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q $(COVERED); status=$$?; \
	  $(BIN)/coverage combine --quiet && $(BIN)/coverage report && $(BIN)/coverage html --quiet; exit $$status

dist: $(DEV)  ## Build the wheel and the sdist into dist/.
	rm -rf build dist
	$(BIN)/python -m build --no-isolation

api: $(DEV)  ## Rewrite the snapshot of the public API after an intended change.
	$(BIN)/python tests/architecture/public_api.py > tests/architecture/public_api.txt

news: $(DEV)  ## Show the next section of CHANGELOG.md, made from newsfragments/.
	$(BIN)/towncrier build --draft --version "$$($(BIN)/python -c 'import syncline; print(syncline.__version__)')"

# Measurements and pictures.

bench: $(READY)  ## Run all benchmarks.
	$(BIN)/syncline bench

# Takes a while: it trains LeNet on MNIST with every strategy. Ctrl-C keeps what has been measured.
strategies-table: $(READY)  ## Compare all strategies on one task, for docs/strategies-table.md.
	$(BIN)/syncline strategies --compare --out docs/strategies-table.md

picture: $(DEV)  ## Redraw the terminal picture of the README from a real run.
	$(BIN)/python docs/make_picture.py

pictures: $(DEV) browser  ## Retake the screenshots of docs/report.md.
	$(BIN)/python docs/make_screenshots.py

charts: $(DEV)  ## Measure again and redraw the charts of the README.
	$(BIN)/python docs/make_charts.py measure

docs: $(DEV)  ## Build the documentation as a site in site/.
	$(BIN)/mkdocs build --strict

docs-serve: $(DEV)  ## Serve the documentation on this machine, and rebuild it on every change.
	$(BIN)/mkdocs serve

clean:  ## Remove the environment, caches and builds.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage* htmlcov \
	  build dist site *.egg-info
