# Everything a fresh machine with Python 3.11+, make and pip needs: `make study` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The revision that `make bench-base` compares the working tree with.
BASE ?= 9fcc0ca

# Where `make study-full` writes its studies; with OUT=docs/results/full it goes on with the stored ones.
OUT ?= study-full

# Where `make prove-real` keeps checkpoints out of the package registries.
REAL ?= real

.PHONY: study study-full test check prove prove-real bench bench-full bench-base bench-model table screenshots clean

study: $(VENV)/ready
	$(BIN)/lengthwise study

study-full: $(VENV)/ready
	$(BIN)/lengthwise study --config configs/studies/one-rate.yaml --out $(OUT)-one-rate
	$(BIN)/lengthwise study --config configs/studies/full-stdlib.yaml --out $(OUT)-stdlib --beside $(OUT)-one-rate
	test -e wikipedia.jsonl || $(BIN)/python docs/wikipedia.py wikipedia.jsonl
	$(BIN)/lengthwise study --config configs/studies/full-wikipedia.yaml --out $(OUT)-wikipedia
	$(BIN)/lengthwise study --config configs/studies/other-rates.yaml --out $(OUT)-other-rates --beside $(OUT)-wikipedia
	$(BIN)/lengthwise study --config configs/studies/full-tasks.yaml --out $(OUT)-tasks

test: check
	$(BIN)/pytest -n auto -m "not prove"

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

prove: $(VENV)/ready
	$(BIN)/pytest -n auto -m prove

prove-real: $(VENV)/ready
	$(BIN)/python docs/real_models.py fetch $(REAL)
	LENGTHWISE_REAL=$(abspath $(REAL)) $(BIN)/pytest -m prove -rs tests/test_real_models.py tests/test_real_fits.py tests/test_real_encoders.py

bench: $(VENV)/ready
	$(BIN)/python benchmarks/attention.py

bench-full: $(VENV)/ready
	$(BIN)/python benchmarks/attention.py --form full
	$(BIN)/python benchmarks/figure.py
	$(BIN)/python docs/tables.py

bench-base: $(VENV)/ready
	$(BIN)/python benchmarks/attention.py --base $(BASE) --out benchmarks/results/attention-base.jsonl

bench-model: $(VENV)/ready
	for what in train study decode memory loss; do $(BIN)/python benchmarks/model.py $$what || exit 1; done
	$(BIN)/python docs/tables.py

table: $(VENV)/ready
	$(BIN)/python docs/tables.py

screenshots: $(VENV)/ready
	LENGTHWISE_SCREENSHOTS=docs $(BIN)/pytest tests/test_page_pictures.py

# One virtual environment, made anew when the pins change.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Lengthwise needs Python 3.11 or newer; set PYTHON=')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[lab,data,serve,dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
