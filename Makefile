# Two commands on a fresh machine: `make demo` and `make test`. Without make: see README.md.
# `make check` is what CI runs, `make test-all` every test there is: see CONTRIBUTING.md, "Tests".
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# `make test WORKERS=3`: tests side by side; by default as many as there are cores, and at most four.
TESTS = $(BIN)/python -m tests.run $(if $(WORKERS),--workers $(WORKERS))

.PHONY: demo test test-all check format docs dist clean

demo: $(VENV)/.installed
	$(BIN)/farandole demo

test: $(VENV)/.installed-check
	$(TESTS)

test-all: $(VENV)/.installed-check
	$(TESTS) --all

check: $(VENV)/.installed-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "mypy, beside the tests"
	nice $(BIN)/mypy & mypy=$$!; \
	$(MAKE) test; tests=$$?; \
	wait $$mypy && [ $$tests = 0 ]

format: $(VENV)/.installed-check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, into build/site: a dead link or a page without a place in the navigation is an error.
docs: $(VENV)/.installed
	$(BIN)/pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Wheel and sdist, into dist.
dist: $(VENV)/.installed
	$(BIN)/pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[build]'
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

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
