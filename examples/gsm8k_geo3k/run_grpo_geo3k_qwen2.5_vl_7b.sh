#!/usr/bin/env bash
# GRPO of Qwen2.5-VL-7B-Instruct on Geometry3K, with the values of public LightRFT's script, on one node of 8 GPUs.
#
#   python examples/gsm8k_geo3k/data_preprocess/geo3k.py --local_dataset_path GEOMETRY3K --local_save_dir runs/geo3k-data
#   examples/gsm8k_geo3k/run_grpo_geo3k_qwen2.5_vl_7b.sh [any other flag]
#
# Each variable below can be set in the environment. Flags given to the script come after its own, and a flag may be
# given once: to change a value that stands below, edit it here.
set -euo pipefail
cd "$(dirname "$0")/../.."

PRETRAIN=${PRETRAIN:-Qwen/Qwen2.5-VL-7B-Instruct}
DATA=${DATA:-runs/geo3k-data}
SAVE_PATH=${SAVE_PATH:-runs/grpo-geo3k-qwen2.5-vl-7b}
ENGINE=${ENGINE:-vllm}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-20091}

TORCHRUN=(torchrun --nproc_per_node "$GPUS_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK"
  --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT")

MODEL=(--pretrain "$PRETRAIN" --bf16 --gradient_checkpointing)

# 1,280 image tokens of 28 x 28 pixels would leave no room for the question.
DATA_FLAGS=(--prompt_data "$DATA" --prompt_split train --input_key prompt --image_key images --label_key label
  --reference_key reference --apply_chat_template --prompt_max_len 1024 --image_max_pixels 602112
  --eval_data "$DATA" --eval_split test --eval_steps 20 --max_eval_samples 700)

# 128 problems x 8 answers a step; 128 answers an optimizer step.
ROLLOUT=(--engine_type "$ENGINE" --engine_tp_size 2 --engine_mem_util 0.6 --enable_engine_sleep
  --rollout_batch_size 128 --n_samples_per_prompt 8 --generate_max_len 2048 --temperature 1.0)

ALGORITHM=(--advantage_estimator group_norm --use_kl_loss --init_kl_coef 0.01 --kl_estimator k3
  --reward_recipe '{geo3k: {geo3k: 0.9, think_box: 0.1}}')

TRAINING=(--num_episodes 20 --max_epochs 1 --train_batch_size 128 --micro_train_batch_size 4
  --actor_learning_rate 1e-6 --lr_warmup_ratio 0.03 --l2 1e-2 --seed 42 --save_steps 20 --max_ckpt_num 2)

STRATEGY=(--fsdp --adam_offload)

exec "${TORCHRUN[@]}" examples/gsm8k_geo3k/train_colocate.py "${MODEL[@]}" "${DATA_FLAGS[@]}" "${ROLLOUT[@]}" \
  "${ALGORITHM[@]}" "${TRAINING[@]}" "${STRATEGY[@]}" --save_path "$SAVE_PATH" "$@"
