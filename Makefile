# RoLaQ: 2-bit KV caches for Multi-head Latent Attention models.
# Variables: MODEL (a file of conf/model/), SUITE (conf/suite/), NAME (of an experiment), ARTIFACT (a folder, for serve),
# GPU_GB (for plan), ARGS (more Hydra overrides), PYTHON (the interpreter that makes .venv and .venv-serve).

MODEL ?= tiny
SUITE ?= quick
NAME ?=
ARTIFACT ?=
GPU_GB ?=
ARGS ?=
PYTHON ?= python3
EXTRAS ?= dev,eval
SERVE_EXTRAS ?= serve,test

VENV := .venv
BIN := $(VENV)/bin
# written last, so that an interrupted installation is not taken for a finished one
STAMP := $(VENV)/.installed
# SGLang pins its own torch and Transformers
SERVE_VENV := .venv-serve
SERVE_BIN := $(SERVE_VENV)/bin
SERVE_STAMP := $(SERVE_VENV)/.installed
# SGLang without its GPU packages, beside .venv, for tests on a CPU: 0.5.17 or 0.5.23
SGLANG ?= 0.5.17
SGLANG_CPU := .sglang-$(SGLANG)
SGLANG_STAMP := $(SGLANG_CPU)/.installed

export PYTHONSAFEPATH := 1
export TOKENIZERS_PARALLELISM ?= false
# CPU threads that sleep while they wait, which on shared cores is up to three times faster than spinning
export OMP_WAIT_POLICY ?= passive
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup calibrate eval experiment serve plan report bench prove test test-serve lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  e.g. make calibrate MODEL=tiny ARGS='seed=43 folder=artifacts/seed43'"

setup: $(STAMP) ## make the environment .venv (the other targets do it when needed)

calibrate: $(STAMP) ## learn rotations and thresholds for MODEL into artifacts/
	@$(BIN)/python -m rolaq.calib model=$(MODEL) $(ARGS)

eval: $(STAMP) ## compare all methods on MODEL with SUITE into results/
	@$(BIN)/python -m rolaq.eval model=$(MODEL) suite=$(SUITE) $(ARGS)

experiment: $(STAMP) ## one table or figure of the paper, NAME=table1 … figure8 or all: calibrations, evaluations, report
	@$(BIN)/python -m rolaq.eval.experiments $(NAME) model=$(MODEL) $(ARGS)

serve: $(SERVE_STAMP) ## serve MODEL with SGLang on the packed INT2 cache of ARTIFACT
	@$(SERVE_BIN)/python -m rolaq.serve model=$(MODEL) $(if $(ARTIFACT),artifact=$(ARTIFACT)) $(ARGS)

plan: $(STAMP) ## tokens that fit on a GPU of GPU_GB in BF16, FP8 and INT2
	@$(BIN)/python -m rolaq.serve.planner model=$(MODEL) $(if $(GPU_GB),gpu_gb=$(GPU_GB)) $(ARGS)

report: $(STAMP) ## make the HTML page, figures and README tables from what was measured
	@$(BIN)/python -m rolaq.eval.report model=$(MODEL) $(ARGS)

bench: $(SERVE_STAMP) ## time kernels and serving on this GPU against BF16 into results/ (ARGS go to the serving part)
	@$(SERVE_BIN)/python -m rolaq.kernels.bench
	@$(SERVE_BIN)/python -m rolaq.serve.bench $(ARGS)

prove: $(SERVE_STAMP) $(STAMP) ## prove on this GPU that what is served is what is simulated, also under load and faults
	@$(SERVE_BIN)/python -m rolaq.serve.bench run=[parity,soak,conversation] $(ARGS)
	@$(BIN)/python -m rolaq.serve.bench run=[compare] $(ARGS)

# one thread a process: two that share two cores with more wait for each other
test: $(STAMP) ## run the tests (ARGS go to pytest)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

test-serve: $(STAMP) $(SGLANG_STAMP) ## run the serving tests on SGLang's own scheduler, on a CPU (SGLANG=0.5.23 for the newest)
	@PYTHONPATH=$(CURDIR)/$(SGLANG_CPU) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
		$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/serve $(ARGS)

lint: $(STAMP) ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean: ## remove the environments and caches; artifacts/ and results/ stay
	@rm -rf $(VENV) $(SERVE_VENV) .sglang-* build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(1) the environment, $(2) constraints, $(3) extras, $(4) what is said to be installed
define install
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
		|| { echo "error: $(PYTHON) is not Python 3.11 or 3.12; name one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Making $(1): installs $(4). This takes some minutes, once."
	@rm -f $@
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || { rm -rf $(1) && $(PYTHON) -m venv $(1); } \
		|| { echo "error: $(PYTHON) cannot make environments; on Debian install python3-venv" >&2; exit 1; }
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check -c $(2) -e '.[$(3)]' \
		|| { echo "error: the installation failed; see above, then run make again" >&2; exit 1; }
	@touch $@
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt,$(EXTRAS),torch and transformers)

$(SERVE_STAMP): pyproject.toml constraints-serve.txt
	$(call install,$(SERVE_VENV),constraints-serve.txt,$(SERVE_EXTRAS),SGLang 0.5.17 with its torch)

$(SGLANG_STAMP): tests/serve/sglang-$(SGLANG).txt tests/serve/sglang-needs.txt $(STAMP)
	@echo "Making $(SGLANG_CPU): SGLang $(SGLANG) without its GPU packages, 50 MB to load."
	@rm -rf $(SGLANG_CPU)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
		--target $(SGLANG_CPU) -r tests/serve/sglang-$(SGLANG).txt \
		|| { echo "error: the installation failed; see above, then run make again" >&2; exit 1; }
	@touch $@
