#!/usr/bin/env bash
# SFT, then GRPO, of a small chat model on GSM8K, on one GPU: held-out accuracy before and after, and its curve.
#
#   PRETRAIN=path/to/SmolLM2-135M-Instruct GSM8K=path/to/gsm8k examples/sft/run_gsm8k.sh [any other flag of GRPO]
#
# Each variable below can be set in the environment. What is there already in RUN (data, sft) is not made again. Flags
# given to the script come after its own, and a flag may be given once: to change a value that stands below, edit it here.
set -euo pipefail
cd "$(dirname "$0")/../.."

PRETRAIN=${PRETRAIN:-runs/smollm2-data/model} # what `make smollm2` makes
GSM8K=${GSM8K:-openai/gsm8k:main}
RUN=${RUN:-runs/sft-gsm8k}
ENGINE_TYPE=${ENGINE_TYPE:-vllm}
PYTHON=${PYTHON:-python}
SFT_FLAGS=${SFT_FLAGS:-} # further ones of train.py
PROMPTS=${PROMPTS:-64}
SAMPLES=${SAMPLES:-8}
LEARNING_RATE=${LEARNING_RATE:-5e-5}

# The prompts ask for the answer as GSM8K's own answers have it: #### 72.
[ -d "$RUN/data" ] || "$PYTHON" examples/gsm8k_geo3k/data_preprocess/gsm8k.py --local_dataset_path "$GSM8K" \
  --local_save_dir "$RUN/data" --answer_form hashes

# 7,473 worked answers, three times.
[ -d "$RUN/sft" ] || "$PYTHON" examples/sft/train.py --pretrain "$PRETRAIN" --data "$RUN/data" --save_path "$RUN/sft" \
  --system_prompt "" --max_len 512 --num_epochs "${SFT_EPOCHS:-3}" --batch_size 32 --micro_batch_size 32 \
  --learning_rate "${SFT_LEARNING_RATE:-2e-4}" --bf16 $SFT_FLAGS

MODEL=(--pretrain "$RUN/sft" --bf16 --chunk_size 2048)

DATA_FLAGS=(--prompt_data "$RUN/data" --input_key prompt --label_key label --apply_chat_template --system_prompt ""
  --prompt_max_len 300)

# Every 20 steps, all 1,319 test questions, answered greedily.
EVALUATION=(--eval_data "$RUN/data" --max_eval_samples "${EVAL_SAMPLES:-1319}" --eval_temperature 0 --eval_steps 20)

# A step is 64 questions x 8 answers, which make one optimizer step.
ROLLOUT=(--engine_type "$ENGINE_TYPE" --engine_mem_util 0.1 --disable_engine_sleep --rollout_batch_size "$PROMPTS"
  --n_samples_per_prompt "$SAMPLES" --generate_max_len 256 --temperature 1.0)

ALGORITHM=(--advantage_estimator group_norm --init_kl_coef 0 --reward_fn last_number)

TRAINING=(--fsdp --train_batch_size $((PROMPTS * SAMPLES)) --max_tokens_per_micro_batch 8192 --max_steps "${STEPS:-100}" --num_episodes 2
  --actor_learning_rate "$LEARNING_RATE" --lr_scheduler constant --lr_warmup_steps 5 --seed 42)

exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 1 examples/gsm8k_geo3k/train_colocate.py \
  "${MODEL[@]}" "${DATA_FLAGS[@]}" "${EVALUATION[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" "${TRAINING[@]}" --save_path "$RUN/grpo" "$@"
