# Every target sets up .venv by itself when it is missing. Only Python 3.11 or later is needed:
#   make demo PYTHON=/path/to/python3.12     uses another interpreter for the new .venv
#   make test ARGS='-k wire'                 hands arguments on
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN = $(VENV)/bin
STAMP = $(VENV)/.frogzmq-installed

all: test

demo: $(STAMP)
	@$(BIN)/python tools/demo.py $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	@$(BIN)/frogzmq bench $(ARGS)
	$(if $(ARGS),,@$(BIN)/frogzmq bench --collectives)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'frogzmq needs Python 3.11 or later; name one with: make ... PYTHON=/path/to/python3' >&2; exit 1; }
	@echo 'setting up $(VENV) (once; it installs PyTorch, which takes a few minutes)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo 'python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find frogzmq tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: all demo test check bench format clean
