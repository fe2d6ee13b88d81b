# promptmill: `make help` lists what can be made. Only Python 3.11+, pip and make are needed; uv is used where it is.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
EXTRAS := embedded,gateway,parquet,postgres,dev
STAMP  := $(VENV)/.installed
UV     := $(shell command -v uv 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help setup demo serve check test test-gpu drill bench clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 14

setup: $(STAMP) ## Make .venv with the promptmill command in it

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$($(PYTHON) --version) is too old; Python 3.11 or newer is needed (make setup PYTHON=/path/to/python)"; exit 1; }
ifdef UV
	@test -x $(BIN)/python || $(UV) venv --quiet --python "$$(command -v $(PYTHON))" $(VENV)
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python -e '.[$(EXTRAS)]'
else
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "error: no virtual environment could be made; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "installing promptmill and what it needs (about 800 MB; a few minutes on a slow line)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
endif
	@touch $@

demo: setup ## Answer forty questions about a handbook with a real small model
	@$(BIN)/promptmill convert demo --if-missing
	@$(BIN)/promptmill run examples/questions.csv --model smollm2-135m-instruct --template examples/question.txt.j2 \
	  --context examples/handbook.md --max-tokens 48 --temperature 0 --output answers.results.jsonl
	@$(BIN)/python examples/show_answers.py examples/questions.csv answers.results.jsonl

serve: setup ## Take work over HTTP (the OpenAI API) on 127.0.0.1:8000
	@$(BIN)/promptmill serve

check: setup ## Lint, format, types, layering
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python tests/layering.py

test: setup ## Run the tests (a few minutes on two cores)
	@$(BIN)/python -m pytest

test-gpu: setup ## Run the tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest -m gpu

drill: setup ## Kill everything at random times and count what is lost (most of an hour; JSON=FILE keeps the table)
	@DRILL_JSON=$(JSON) $(BIN)/python -m pytest -m drill

bench: setup ## Measure the engine and the whole path beside llama.cpp (about ten minutes)
	@$(BIN)/python -m benchmarks.cpu

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
