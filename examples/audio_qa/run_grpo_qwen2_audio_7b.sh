#!/usr/bin/env bash
# GRPO of Qwen2-Audio-7B-Instruct on questions about sounds, with the values of public LightRFT's audio script where
# they fit any number of GPUs, on one node of 8.
#
#   python examples/audio_qa/prepare.py --output runs/audio-qa-data
#   examples/audio_qa/run_grpo_qwen2_audio_7b.sh [any other flag]
#
# Each variable below can be set in the environment. Flags given to the script come after its own, and a flag may be
# given once: to change a value that stands below, edit it here.
set -euo pipefail
cd "$(dirname "$0")/../.."

PRETRAIN=${PRETRAIN:-Qwen/Qwen2-Audio-7B-Instruct}
DATA=${DATA:-runs/audio-qa-data}
SAVE_PATH=${SAVE_PATH:-runs/grpo-audio-qa}
ENGINE=${ENGINE:-vllm}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MASTER_PORT=${MASTER_PORT:-20092}

MODEL=(--pretrain "$PRETRAIN" --bf16 --gradient_checkpointing)

# 30 seconds of sound, which is what the model hears at most, are 750 tokens; those of prepare.py have 30.
DATA_FLAGS=(--prompt_data "$DATA" --prompt_split train --input_key prompt --audio_key audios --label_key label
  --reference_key reference --apply_chat_template --prompt_max_len 512
  --eval_data "$DATA" --eval_split test --eval_steps 50 --max_eval_samples 200)

ROLLOUT=(--engine_type "$ENGINE" --engine_tp_size 1 --engine_mem_util 0.3 --enable_engine_sleep
  --rollout_batch_size 32 --n_samples_per_prompt 4 --generate_max_len 1024 --temperature 1.0)

ALGORITHM=(--advantage_estimator group_norm --use_kl_loss --init_kl_coef 0.01 --kl_estimator k3
  --reward_recipe '{"*": {answer: 1.0}}')

TRAINING=(--num_episodes 10 --max_epochs 1 --train_batch_size 128 --micro_train_batch_size 1
  --actor_learning_rate 1e-6 --lr_warmup_ratio 0.03 --l2 1e-2 --seed 42 --save_steps 50 --max_ckpt_num 3)

STRATEGY=(--fsdp --adam_offload)

exec torchrun --nproc_per_node "$GPUS_PER_NODE" --master_port "$MASTER_PORT" examples/audio_qa/train.py "${MODEL[@]}" \
  "${DATA_FLAGS[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" "${TRAINING[@]}" "${STRATEGY[@]}" --save_path "$SAVE_PATH" "$@"
