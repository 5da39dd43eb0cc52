# make demo   train a real model on this machine        make test   run the tests
# Everything lives in .venv; PYTHON=python3.12 chooses another interpreter.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
STAMP := .venv/razona-installed
export GOMP_SPINCOUNT ?= 3000
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: install demo test test-processors test-slow lint bench wheel clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tools/install.sh
	bash tools/install.sh "$(PYTHON)"
	touch $@

demo: install
	$(BIN)/razona demo $(ARGS)

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto $(ARGS)

# Each makes this processor behave as an older one; exactness, engines, loops, and a run of the command.
ISAS := DEFAULT AVX512_CORE_BF16 AVX512_CORE AVX2
PROCESSOR_TESTS := tests/test_processor.py tests/test_exact.py tests/test_engines.py \
  tests/test_grpo_loop.py tests/test_sft_loop.py tests/test_commands.py

test-processors: install
	set -e; for isa in $(ISAS); do echo "== ONEDNN_MAX_CPU_ISA=$$isa"; \
	  ONEDNN_MAX_CPU_ISA=$$isa OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto $(PROCESSOR_TESTS) $(ARGS); \
	  ONEDNN_MAX_CPU_ISA=$$isa $(BIN)/python tools/two_steps.py $(BIN)/razona; done

test-slow: install
	$(BIN)/python -m pytest -q -m slow $(ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# TRL gets an environment of its own, so that neither side bends the other's versions.
bench: install
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install -q torch==2.13.0
	.venv-bench/bin/pip install -q -c benchmarks/trl-constraints.txt trl==1.16.0 peft==0.21.2
	$(BIN)/python benchmarks/grpo_step.py --trl-python .venv-bench/bin/python $(ARGS)

wheel: install
	$(BIN)/pip wheel -q --no-deps -w dist .
	@ls dist/*.whl

clean:
	rm -rf .venv .venv-bench dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
