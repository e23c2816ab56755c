# Each target does all of its own set-up; nothing needs to be installed by hand but Python 3.11 or newer.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup demo test lint browser bench strategies-table picture pictures docs docs-serve clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(READY)

demo: $(READY)
	$(BIN)/syncline train mlp --data digits --workers 2 --epochs 20

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two tests at a time: most of them wait for processes that start or end.
test: lint browser
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 25

# Pages are tested in Debian's Chromium, which is installed where that is possible; without it those tests are skipped.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing Chromium for the tests of pages" && \
	  { apt-get install -y -q --no-install-recommends chromium || \
	    { apt-get update -q && apt-get install -y -q --no-install-recommends chromium; }; } >/dev/null 2>&1; } || \
	echo "There is no Chromium and it could not be installed: the tests of pages in a browser will be skipped."

bench: $(READY)
	$(BIN)/syncline bench

# Trains LeNet on MNIST with every strategy in turn, so it takes a while; Ctrl-C keeps what was measured by then.
strategies-table: $(READY)
	$(BIN)/syncline strategies --compare --out docs/strategies-table.md

picture: $(READY)
	$(BIN)/python docs/make_picture.py

# The pages and the terminal, as docs/report.md shows them.
pictures: $(READY) browser
	$(BIN)/python docs/make_screenshots.py

# The documentation as a site, in site/; docs-serve shows it on this machine, with search, and follows what you write.
docs: $(READY)
	$(BIN)/mkdocs build --strict

docs-serve: $(READY)
	$(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build site *.egg-info
