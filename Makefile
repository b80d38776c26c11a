# Two commands on a fresh machine: `make demo` and `make test`. Without make: see README.md.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

SLOWEST = $(BIN)/python -m pytest --durations=25 --durations-min=1

.PHONY: demo test check format clean

demo: $(VENV)/.installed
	$(BIN)/farandole demo

test: $(VENV)/.installed-check
	$(BIN)/python -m pytest

check: $(VENV)/.installed-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@echo "Tests that need the machine to themselves, then the others side by side"
	$(SLOWEST) -m alone; alone=$$?; \
	$(SLOWEST) -m "not alone" -n auto --maxprocesses=4 --dist=worksteal && exit $$alone

format: $(VENV)/.installed-check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Making a virtual environment in $(VENV) and installing farandole (once, about a minute)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-check: $(VENV)/.installed
	@echo "Installing what the tests and checks need"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[check]'
	@touch $@
