# Two commands on a fresh machine: `make demo` and `make test`. Without make: see README.md.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

SLOWEST = $(BIN)/python -m pytest --durations=25 --durations-min=1
# `make check WORKERS=3`: tests side by side; by default as many as there are cores.
WORKERS ?= auto

.PHONY: demo test check format clean

demo: $(VENV)/.installed
	$(BIN)/farandole demo

test: $(VENV)/.installed-check
	$(BIN)/python -m pytest

check: $(VENV)/.installed-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "Tests that need the machine to themselves, then the others side by side, and mypy beside them"
	$(SLOWEST) -m alone; alone=$$?; \
	nice $(BIN)/mypy & mypy=$$!; \
	$(SLOWEST) -m "not alone" -n $(WORKERS) --maxprocesses=4 --dist=worksteal; others=$$?; \
	wait $$mypy && [ $$alone = 0 ] && [ $$others = 0 ]

format: $(VENV)/.installed-check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "1 of 2: making a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "2 of 2: installing farandole and torch (once; some hundred megabytes, minutes on a slow network)"
	$(BIN)/pip install --disable-pip-version-check --progress-bar on -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-check: pyproject.toml constraints.txt
	@echo "1 of 2: making a virtual environment in $(VENV)"
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "2 of 2: installing farandole, torch, and what the tests and checks need (once; some hundred megabytes)"
	$(BIN)/pip install --disable-pip-version-check --progress-bar on -c constraints.txt -e '.[check]'
	@echo "And TensorFlow, for its own tests, in a folder of its own: beside other packages, tensorboard would load it"
	$(BIN)/pip freeze --exclude-editable > $(VENV)/.pins
	$(BIN)/pip install --disable-pip-version-check --progress-bar on --upgrade --target $(VENV)/tensorflow -c $(VENV)/.pins \
	  'tensorflow-cpu>=2.16' || echo "No TensorFlow for this Python: its tests skip"
	@# Its requirements name the package tensorflow, which would come beside tensorflow-cpu, into the same folder.
	$(BIN)/pip install --disable-pip-version-check --progress-bar on --upgrade --target $(VENV)/tensorflow --no-deps \
	  'tf_keras>=2.16' || echo "No tf_keras: its tests skip"
	@touch $(VENV)/.installed $@
