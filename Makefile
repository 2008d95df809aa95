# Thin: sets up .venv, then calls the tools. `make` alone says what there is.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
READY := .venv/.ready
UNDERWAY := .venv/.installing
CPU_WHEELS := https://download.pytorch.org/whl/cpu
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg --nbval-cell-timeout 300

.PHONY: help lab test jupyter
help:
	@echo 'make lab      set up, run every chapter, write report/index.html (ARGS="03 --no-live": see dsv4lab run --help)'
	@echo 'make test     set up, lint, run the tests, compare every chapter with its stored outputs'
	@echo 'make jupyter  set up, open JupyterLab on the chapters'

lab: $(READY)
	$(BIN)/dsv4lab run $(ARGS)

test: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 --dist loadfile
	$(BIN)/pytest -n 2 --dist loadfile $(NBVAL) notebooks

jupyter: $(READY)
	$(BIN)/jupyter lab --ip=127.0.0.1 --notebook-dir=notebooks $(ARGS)

# An install that was cut short leaves $(UNDERWAY) behind: what it left half done is thrown away, not trusted.
$(READY): pyproject.toml constraints/cpu.txt
	@test ! -e $(UNDERWAY) || rm -rf .venv
	@mkdir -p .venv && touch $(UNDERWAY)
	$(PYTHON) -m venv .venv
	@if nvidia-smi >/dev/null 2>&1; then \
		$(BIN)/pip install -e '.[kernels,notebook,dev]'; \
	else \
		echo 'no NVIDIA GPU answers: torch without CUDA'; \
		$(BIN)/pip install -q -c constraints/cpu.txt --no-deps --index-url $(CPU_WHEELS) --retries 0 --timeout 15 torch \
			2>/dev/null || true; \
		$(BIN)/pip install -c constraints/cpu.txt -e '.[kernels,notebook,dev]'; \
	fi
	@mv $(UNDERWAY) $@
