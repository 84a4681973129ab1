# RoLaQ: 2-bit KV caches for Multi-head Latent Attention models.
# Variables: MODEL (a file of conf/model/), SUITE (conf/suite/), NAME (of an experiment), ARGS (more Hydra overrides),
# PYTHON (the interpreter that makes .venv).

MODEL ?= tiny
SUITE ?= quick
NAME ?=
ARGS ?=
PYTHON ?= python3
EXTRAS ?= dev,eval

VENV := .venv
BIN := $(VENV)/bin
# written last, so that an interrupted installation is not taken for a finished one
STAMP := $(VENV)/.installed

export PYTHONSAFEPATH := 1
export TOKENIZERS_PARALLELISM ?= false
# CPU threads that sleep while they wait, which on shared cores is up to three times faster than spinning
export OMP_WAIT_POLICY ?= passive
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup calibrate eval experiment report bench test lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  e.g. make calibrate MODEL=tiny ARGS='seed=43 folder=artifacts/seed43'"

setup: $(STAMP) ## make the environment .venv (the other targets do it when needed)

calibrate: $(STAMP) ## learn rotations and thresholds for MODEL into artifacts/
	@$(BIN)/python -m rolaq.calib model=$(MODEL) $(ARGS)

eval: $(STAMP) ## compare all methods on MODEL with SUITE into results/
	@$(BIN)/python -m rolaq.eval model=$(MODEL) suite=$(SUITE) $(ARGS)

experiment: $(STAMP) ## one table or figure of the paper, NAME=table1 … figure8: calibrations, evaluations, report
	@$(BIN)/python -m rolaq.eval.experiments $(NAME) model=$(MODEL) $(ARGS)

report: $(STAMP) ## make the HTML page, figures and README tables from what was measured
	@$(BIN)/python -m rolaq.eval.report model=$(MODEL) $(ARGS)

bench: $(STAMP) ## time the kernels on this GPU against BF16 ones into results/kernels.json
	@$(BIN)/python -m rolaq.kernels.bench $(ARGS)

# one thread a process: two that share two cores with more wait for each other
test: $(STAMP) ## run the tests (ARGS go to pytest)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

lint: $(STAMP) ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean: ## remove .venv and caches; artifacts/ and results/ stay
	@rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
		|| { echo "error: $(PYTHON) is not Python 3.11 or 3.12; name one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Making $(VENV): installs torch, transformers and the rest. This takes some minutes, once."
	@rm -f $(STAMP)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); } \
		|| { echo "error: $(PYTHON) cannot make environments; on Debian install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' \
		|| { echo "error: the installation failed; see above, then run make again" >&2; exit 1; }
	@touch $(STAMP)
