# `make train` and `make test` work from a fresh clone: the first call builds .venv, later ones use it.
PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
# Written last, so a set-up that was cut short is taken up again. The name carries the device, so
# `GRPO_DEVICE=cuda make train` after a CPU set-up builds the right environment.
READY := .venv/ready-$(or $(GRPO_DEVICE),auto)
ATROPOS_RUN := outputs/atropos/$(shell date +%Y-%m-%d_%H-%M-%S)

.DEFAULT_GOAL := help
.PHONY: help setup atropos-env train train-atropos test test-slow gpu-acceptance docs lint clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r target text; do printf '%-20s %s\n' "$$target" "$$text"; done
	@echo "  GRPO_DEVICE=cpu|cuda chooses the build of torch; PYTHON=python3.12 the interpreter."

setup: $(READY)  ## build .venv with torch, vLLM and the tools (done by the others when needed)

$(READY): setup.py tools/setup_env.py
	@$(PYTHON) tools/setup_env.py
	@touch $@

atropos-env:  ## build .venv-atropos, in which atroposlib's environments run; ARGS=--all
	@$(PYTHON) tools/setup_atropos.py $(ARGS)

train: $(READY)  ## train; options as ARGS="train.seed=1 optimizer.lr=1e-3"
	$(BIN)/python sota-implementations/grpo/grpo.py $(ARGS)

train-atropos: $(READY)  ## the same on an Atropos environment; options as ARGS="--training-steps 9"
	@test -x .venv-atropos/bin/python || $(PYTHON) tools/setup_atropos.py
	$(BIN)/python -m grpo.run.cli.launch --model-name embedded --env examples/atropos/arithmetic_env.py \
		--training-steps 40 --batch-size 8 --gradient-accumulation-steps 8 --learning-rate 1e-4 \
		--max-model-len 64 --checkpoint-interval 0 --eval-task arithmetic --eval-max-tokens 4 \
		--save-path $(ATROPOS_RUN) --log-dir $(ATROPOS_RUN)/logs $(ARGS)

test: $(READY)  ## run the fast tests; pytest options as ARGS="-k surrogates"
	$(BIN)/python tools/run_tests.py $(ARGS)

test-slow: $(READY)  ## run slow tests, a part at each commit; ARGS="--budget 1700" in seconds
	$(BIN)/python tools/slow_tests.py $(ARGS)

gpu-acceptance: $(READY)  ## run on the GPUs what the pages promise, in nine minutes; ARGS=--list
	$(BIN)/python tools/gpu_acceptance.py $(ARGS)

docs: $(READY)  ## build the site of docs/ into site/, without warnings
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

lint: $(READY)  ## check the style, and that imports between rooms run one way
	$(BIN)/ruff check .
	$(BIN)/lint-imports

clean:  ## remove both .venv, builds and caches; what runs wrote stays
	rm -rf .venv .venv-atropos build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
