# Two commands matter to a user: `make train-ctr` and `make test`. Each builds .venv first where it must.

PYTHON ?= python3
VENV := .venv
# Prefect asks a terminal about telemetry on first use otherwise.
export DO_NOT_TRACK := 1
# A run starts many processes of the same modules, which one of them compiles for all.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete

# Parameters of train-ctr, for instance: make train-ctr DATA=clicks.tsv.gz MODEL=2emb ARGS="--epochs 2"
DATA ?=
SCHEMA ?=
MODEL ?=
ARGS ?=

.PHONY: setup train-ctr serve test test-all test-weekly check lock clean

setup: $(STAMP)

# pip compiles one file at a time, tests too; those of packages are left out, and a file for a later Python does not compile.
$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	$(BIN)/python -m compileall -qq -j 0 -x '/tests/' $(VENV)/lib || true
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

train-ctr: $(STAMP)
	@$(BIN)/python -m flows.train_ctr $(if $(DATA),--data "$(DATA)") $(if $(SCHEMA),--schema-file "$(SCHEMA)") \
		$(if $(MODEL),--model "$(MODEL)") $(ARGS)

serve: $(STAMP)
	@$(BIN)/heterps serve

# Processes take whole files in turn, as the tests of a file share what they start.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

# Fast tests: no server, no long process. They wait a fifth of the time, so a third process takes 7 % off on 2 cores.
test: $(STAMP)
	$(PYTEST) -n 3 -m "not slow"

# Fast tests and whole nights, as continuous integration runs them.
test-all: $(STAMP)
	$(PYTEST) -n 2 -m "not weekly"

# All tests, with kills, proofs and long searches for faults.
test-weekly: $(STAMP)
	$(PYTEST) -n 2

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Writes the lock file from what is installed, after pyproject.toml was changed and installed by hand.
lock:
	( echo "# Exact versions of a tested environment, Python 3.11; written by 'make lock'."; \
	  $(BIN)/python -m pip freeze --all --exclude-editable | grep -v '^pip==' | sed 's/+cpu$$//' ) > requirements.lock

# Leaves .heterps alone: it holds bills and champions.
clean:
	rm -rf $(VENV) build *.egg-info
