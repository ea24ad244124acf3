import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from lightrft.config import Config, DataConfig, ModelConfig, check_config, nearest_multiples
from lightrft.config.arguments import ADVANTAGE_NAMES, POLICY_LOSS_NAMES, REWARD_NAMES, RULE_NAMES, KLEstimator
from lightrft.config.checks import RANGES
from lightrft.config.flags import flag_types
from lightrft.config.sources import source_shares
from lightrft.ops.advantages import ADVANTAGE_ESTIMATORS
from lightrft.ops.kl import KL_ESTIMATORS
from lightrft.ops.losses import POLICY_LOSSES
from lightrft.rewards.builtin import REWARDS


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Valid settings: 32 prompts x 4 samples are two train batches of 64."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}")
    config = Config(ModelConfig("model"), DataConfig(str(prompts)))
    return changed(
        config,
        rollout_batch_size=32,
        n_samples_per_prompt=4,
        train_batch_size=64,
        micro_train_batch_size=2,
        save_path=str(tmp_path / "run"),
    )


def changed(config: Config, **values: object) -> Config:
    """The config with some flags set, whoever owns them."""
    owners = {}
    for owner, section in vars(config).items():
        own = {name: values.pop(name) for name in vars(section) if name in values}
        owners[owner] = replace(section, **own)
    assert not values, f"no such flags: {values}"
    return Config(**owners)


def errors(config: Config, world_size: int = 1, **values: object) -> list[str]:
    with pytest.raises(ValueError) as caught:
        check_config(changed(config, **values), world_size)
    return str(caught.value).splitlines()


def test_valid_settings_pass_for_every_fitting_world_size(config):
    for world_size in (1, 2, 4, 8):
        check_config(config, world_size)


def test_a_world_size_that_tp_does_not_divide_is_refused_with_both_numbers(config):
    """DIST-04: 6 = 1 x 2 x 3, so TP can be 1, 2, 3 or 6."""
    assert errors(config, 6, engine_tp_size=4, train_batch_size=12, rollout_batch_size=3) == [
        "WORLD_SIZE must be a multiple of engine_tp_size: 6 ranks, engine_tp_size=4. "
        "Set --engine_tp_size to 1, 2, 3 or 6."
    ]


@pytest.mark.parametrize(("local", "tp_size", "choice"), [(1, 2, "1"), (2, 4, "1 or 2"), (6, 4, "1, 2, 3 or 6")])
def test_a_rollout_group_that_would_span_nodes_is_refused_with_the_sizes_that_do_not(config, local, tp_size, choice):
    """12 ranks, `local` of them on this node: groups are neighbours, so a size that divides 12 alone may cross."""
    sizes = {"train_batch_size": 48, "rollout_batch_size": 12, "n_samples_per_prompt": 4}
    fitting = changed(config, engine_tp_size=tp_size, **sizes)
    check_config(fitting, 12)
    check_config(fitting, 12, local_world_size=12)
    with pytest.raises(ValueError) as caught:
        check_config(fitting, 12, local_world_size=local)
    assert str(caught.value) == (
        "A rollout group must lie inside one node, so LOCAL_WORLD_SIZE must be a multiple of engine_tp_size: "
        f"{local} of 12 ranks on this node, engine_tp_size={tp_size}. Set --engine_tp_size to {choice}."
    )


def test_batch_arithmetic_names_the_numbers_and_valid_neighbours(config):
    """CLI-02: 7 ranks x 2 = 14; 256 = 18.3 x 14, 18 x 14 = 252, 19 x 14 = 266."""
    assert errors(config, 7, train_batch_size=256, micro_train_batch_size=2, rollout_batch_size=64) == [
        "train_batch_size must be a multiple of micro_train_batch_size x ranks: 256, 2 x 7 ranks = 14. "
        "Set --train_batch_size to 252 or 266."
    ]


def test_a_train_batch_below_one_forward_of_all_ranks_has_only_a_neighbour_above(config):
    (error,) = errors(config, 8, train_batch_size=8, micro_train_batch_size=2)
    assert error.endswith("Set --train_batch_size to 16.")


def test_a_token_budget_lifts_the_rule_on_micro_batches(config):
    check_config(changed(config, max_tokens_per_micro_batch=1000), 7)


def test_a_rollout_that_is_no_multiple_of_the_train_batch_names_both_remedies(config):
    """24 x 4 = 96 is 1.5 x 64. Prompts: 64 / 4 = 16, so 16 or 32. Divisors of 96 that are even, beside 64: 48, 96."""
    assert errors(config, rollout_batch_size=24) == [
        "rollout_batch_size x n_samples_per_prompt must be a multiple of train_batch_size: 24 x 4 = 96, "
        "train_batch_size=64. Set --rollout_batch_size to 16 or 32, or --train_batch_size to 48 or 96."
    ]


def test_a_proposed_train_batch_fits_the_micro_batches_too(config):
    """On 4 ranks a train batch is a multiple of 8: the divisors of 40 x 4 = 160 beside 64 are 40 and 80, not 32."""
    (error,) = errors(config, 4, rollout_batch_size=40)
    assert error.endswith("or --train_batch_size to 40 or 80.")


def test_no_train_batch_is_proposed_where_none_fits(config):
    """3 x 1 samples on 2 ranks with micro-batches of 2: no divisor of 3 is a multiple of 4."""
    (error,) = errors(config, 2, rollout_batch_size=3, n_samples_per_prompt=1)
    assert error.endswith("Set --rollout_batch_size to 64.")


@pytest.mark.parametrize(
    ("value", "multiple", "nearest"), [(256, 14, (252, 266)), (5, 8, (None, 8)), (9, 8, (8, 16)), (17, 4, (16, 20))]
)
def test_nearest_multiples_are_positive_and_on_either_side(value, multiple, nearest):
    assert nearest_multiples(value, multiple) == nearest


def test_k1_as_a_loss_is_refused_unless_it_has_no_weight(config):
    """NUM-11"""
    (error,) = errors(config, use_kl_loss=True, kl_estimator="k1", init_kl_coef=0.1)
    assert "expected gradient of 0" in error and error.endswith("Set --kl_estimator to k2 or k3.")
    check_config(changed(config, use_kl_loss=True, kl_estimator="k1", init_kl_coef=0.0), 1)
    check_config(changed(config, use_kl_loss=True, kl_estimator="k2", init_kl_coef=0.1), 1)
    check_config(changed(config, use_kl_loss=False, kl_estimator="k1", init_kl_coef=0.1), 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_samples_per_prompt": 1, "rollout_batch_size": 64}, "n_samples_per_prompt=1 makes every advantage 0"),
        ({"freezing_actor_steps": 2}, "freezing_actor_steps=2 trains only the critic"),
        ({"truncation_bootstrap": True}, "truncation_bootstrap needs a critic"),
        ({"critic_pretrain": "critic"}, "critic_pretrain=critic needs a critic"),
    ],
)
def test_settings_of_a_critic_and_single_samples_are_refused_with_group_norm_only(values, message, config):
    (error,) = errors(config, advantage_estimator="group_norm", **values)
    assert message in error
    check_config(changed(config, advantage_estimator="gae", **values), 1)


def test_a_kl_target_needs_a_coefficient(config):
    (error,) = errors(config, kl_target=0.1, init_kl_coef=0.0)
    assert "kl_target=0.1, init_kl_coef=0" in error
    check_config(changed(config, kl_target=0.1, init_kl_coef=0.1), 1)


def test_cpu_offload_needs_fsdp_and_leaves_nothing_to_adam_offload(config):
    check_config(changed(config, fsdp=True, fsdp_cpu_offload=True), 1)
    check_config(changed(config, fsdp=True, adam_offload=True), 1)
    (error,) = errors(config, fsdp=True, fsdp_cpu_offload=True, adam_offload=True)
    assert error.endswith("Drop --adam_offload.")
    (error,) = errors(config, fsdp_cpu_offload=True)
    assert "fsdp=False" in error


@pytest.mark.parametrize("flag", ["adam_offload", "offload_actor", "offload_critic", "critic_cpu_offload"])
def test_nothing_is_left_to_move_where_actor_and_critic_live_on_the_host(config, flag):
    ppo = changed(config, fsdp=True, advantage_estimator="gae")
    check_config(changed(ppo, **{flag: True}), 1)
    (error,) = errors(ppo, fsdp_cpu_offload=True, **{flag: True})
    assert f"{flag} has nothing to move" in error and error.endswith(f"Drop --{flag}.")


def test_a_critic_that_lives_on_the_host_or_is_not_there_cannot_be_moved(config):
    ppo = changed(config, fsdp=True, advantage_estimator="gae")
    check_config(changed(ppo, critic_cpu_offload=True, adam_offload=True, offload_actor=True), 1)
    (error,) = errors(ppo, critic_cpu_offload=True, offload_critic=True)
    assert "offload_critic has nothing to move" in error
    for flag in ("critic_cpu_offload", "offload_critic"):
        (error,) = errors(config, fsdp=True, advantage_estimator="group_norm", n_samples_per_prompt=4, **{flag: True})
        assert "advantage_estimator=group_norm has none" in error


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("temperature", (0.1, 2.0), (0.0, -1.0, float("nan"), float("inf"))),
        ("top_p", (0.1, 1.0), (0.0, 1.1)),
        ("top_k", (0, 5), (-1,)),
        ("stop", ((), ("a",)), (("",),)),
        ("engine_mem_util", (0.1, 1.0), (0.0, 1.5)),
        ("gamma", (0.0, 1.0), (-0.1, 1.1)),
        ("lambd", (0.0, 1.0), (-0.1, 1.1)),
        ("eps_clip", (0.2,), (0.0, -0.2)),
        ("value_clip", (0.0, 0.2), (-0.2,)),
        ("adam_betas", ((0.0, 0.99),), ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, float("nan")))),
        ("min_lr_ratio", (0.0, 1.0), (-0.1, 1.1)),
        ("lr_warmup_ratio", (0.0, 1.0), (-0.1, 1.1)),
        ("lr_warmup_steps", (None, 0, 3), (-1,)),
        ("actor_learning_rate", (0.0, 1e-6), (-1e-6,)),
        ("max_norm", (0.0, 1.0), (-1.0,)),
        ("dist_timeout_seconds", (1.0,), (0.0,)),
        ("train_batch_size", (64,), (0, -64)),
        ("micro_train_batch_size", (64,), (0,)),
        ("rollout_batch_size", (16,), (0,)),
        ("engine_tp_size", (1,), (0,)),
        ("max_steps", (None, 1), (0,)),
        ("eval_steps", (-1,), (0, -2)),
        ("eval_temperature", (None, 0.0, 0.7), (-0.1,)),
        ("eval_n_samples_per_prompt", (1, 64), (0,)),
        ("eval_pass_threshold", (-1.0, 0.5), (float("inf"),)),
        ("max_tokens_per_micro_batch", (None, 1), (0,)),
        ("entropy_coef", (-0.1, 0.1), (float("nan"),)),
        ("reward_workers", (None, 1), (0,)),
        ("reward_timeout_seconds", (0.5,), (0.0, -1.0)),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(name, valid, invalid, config):
    if name.startswith("eval_"):
        config = changed(config, eval_data=config.data.prompt_data)
    for value in valid:
        check_config(changed(config, **{name: value}), 1)
    for value in invalid:
        (error,) = errors(config, **{name: value})
        assert error.startswith(f"{name} must be ") and f"{name}={value}" in error


def test_every_range_is_that_of_a_flag():
    assert RANGES.keys() <= flag_types().keys()


def test_missing_files_and_a_file_in_the_place_of_the_run_folder_are_refused(config, tmp_path):
    prompts = config.data.prompt_data
    assert errors(config, prompt_data="gone.jsonl") == [
        "prompt_data must name files, folders or hub ids: 'gone.jsonl' is no file. Change --prompt_data."
    ]
    assert errors(config, eval_data=f"{prompts}, gone.csv,") == [
        "eval_data must name files, folders or hub ids: 'gone.csv' is no file. Change --eval_data.",
        "eval_data must name files, folders or hub ids: '' is no file. Change --eval_data.",
    ]
    assert errors(config, pretrain_data="gone.jsonl") == [
        "pretrain_data must name files, folders or hub ids: 'gone.jsonl' is no file. Change --pretrain_data."
    ]
    for path in (prompts, f"{prompts}/run"):
        assert errors(config, save_path=path) == [
            f"save_path must be a folder, or a place for a new one: {prompts} is a file. Change --save_path."
        ]
    check_config(changed(config, eval_data=f"{prompts},{tmp_path},owner/name", save_path=str(tmp_path)), 1)


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        ("0.7", "prompt_data_probs must have a share for each source: 1 shares (0.7), 2 sources in prompt_data."),
        ("0.7,0.2,0.1", "3 shares (0.7,0.2,0.1), 2 sources in prompt_data. Change one of them."),
        ("0.7,", "prompt_data_probs must be numbers separated by commas: '0.7,'. Set, for example, 0.7,0.3."),
        ("1.0,0", "prompt_data_probs must be finite and above 0: 1.0,0. Drop the source, or change its share."),
        ("nan,1", "prompt_data_probs must be finite and above 0: nan,1."),
        ("inf,1", "prompt_data_probs must be finite and above 0: inf,1."),
    ],
)
def test_shares_that_do_not_fit_the_sources_are_refused(probs, message, config):
    (error,) = errors(config, prompt_data="owner/a,owner/b", prompt_data_probs=probs)
    assert message in error


def test_shares_are_relative():
    """2 / (2 + 6) = 0.25"""
    assert source_shares("2, 6", 2) == [0.25, 0.75]
    assert source_shares("1.0", 1) == [1.0]


def test_the_two_templates_and_what_belongs_to_one_of_them_are_checked(config):
    template = "Q: {} A:"
    assert errors(config, input_template=template, apply_chat_template=True) == [
        "input_template is for plain text, and apply_chat_template writes prompts itself: both are set. "
        "Drop --input_template or --apply_chat_template."
    ]
    (error,) = errors(config, system_prompt="Be brief.")
    assert error.startswith("system_prompt is a message of the chat template: apply_chat_template=False.")
    for wrong in ("Q:", "{} {}", "{0}", "{name}", "{!r}", "{:>9}", "\\boxed{", "{{}}", "}"):
        (error,) = errors(config, input_template=wrong)
        assert error.startswith("input_template must have one {} for the prompt: ")
    for right in (template, "{} Write \\boxed{{}}."):
        check_config(changed(config, input_template=right), 1)
    check_config(changed(config, system_prompt="Be brief.", apply_chat_template=True), 1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("accurate", "Set --reward_fn to exact_match, contains_answer, last_number, answer, "),
        ("accurate", ", length or overlong, or to module:function."),
        (":f", "must name a module and a function"),
        ("module:", "must name a module and a function"),
        ("module:f()", "must name a module and a function"),
        ("gone.py:f", "gone.py is no file"),
    ],
)
def test_a_reward_that_cannot_exist_is_refused(spec, message, config):
    (error,) = errors(config, reward_fn=spec)
    assert message in error


@pytest.mark.parametrize(
    ("flag", "kind", "known"),
    [("advantage_estimator", "estimator", ADVANTAGE_NAMES), ("policy_loss", "policy loss", POLICY_LOSS_NAMES)],
)
def test_an_algorithm_that_is_not_known_is_refused_with_those_that_are(flag, kind, known, config):
    (error,) = errors(config, **{flag: "grpo"})
    assert error.startswith(f"{flag} must be a built-in {kind} or module:function: {flag}=grpo. Set --{flag} to ")
    assert error.endswith(f"{known[-2]} or {known[-1]}, or to module:function.")
    (error,) = errors(config, **{flag: "gone.py:f"})
    assert error == f"{flag} must name an existing file: gone.py is no file. Change --{flag}."


def test_known_names_and_functions_of_modules_pass(config):
    names = {
        "reward_fn": REWARD_NAMES + RULE_NAMES,
        "advantage_estimator": ADVANTAGE_NAMES,
        "policy_loss": POLICY_LOSS_NAMES,
    }
    for flag, known in names.items():
        for spec in (*known, "my.module:function", f"{__file__}:function"):
            check_config(changed(config, teacher_pretrain="teacher", **{flag: spec}), 1)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("{a: 1}", "a recipe must map components to weights: reward_recipe has 1 for a. "),
        ("gone.json", "reward_recipe must name an existing file: gone.json is no file. "),
        ("{a: {gone.py:f: 1}}", "reward_recipe must name an existing file: gone.py is no file. "),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(recipe, message, config):
    (error,) = errors(config, reward_recipe=recipe)
    assert error.startswith(message)


def test_a_recipe_names_the_functions_itself(config):
    check_config(changed(config, reward_recipe="{'*': {answer: 0.9, my.module:function: 0.1}}"), 1)
    (error,) = errors(config, reward_recipe="{'*': {answer: 1}}", reward_fn="answer")
    assert error.startswith("reward_recipe names the functions itself: reward_fn=answer is set too. ")


def test_a_users_estimator_has_no_critic_and_may_take_single_samples(config):
    check_config(changed(config, advantage_estimator="my:f", n_samples_per_prompt=1, rollout_batch_size=64), 1)
    assert errors(config, advantage_estimator="my:f", critic_pretrain="critic") == [
        "critic_pretrain=critic needs a critic: advantage_estimator=my:f has none. "
        "Drop the flag, or set --advantage_estimator gae."
    ]


def test_prompts_come_from_one_place(config):
    without = changed(config, prompt_data=None, eval_steps=5)
    assert errors(without) == [
        "prompt_data names the prompts to train on: it is unset. Set --prompt_data, or give train_data to the trainer.",
        "eval_steps is a setting of eval_data: eval_steps=5, and eval_data is unset. "
        "Set --eval_data, or drop --eval_steps.",
    ]
    check_config(without, 1, rows_of=["prompt_data", "eval_data"])
    with pytest.raises(ValueError) as caught:
        check_config(config, 1, rows_of=["prompt_data"])
    assert str(caught.value) == (
        f"prompt_data must be unset where the trainer is given rows: prompt_data={config.data.prompt_data}. "
        "Drop one of them."
    )


def test_all_violations_are_listed_each_on_its_line(config):
    found = errors(config, 3, top_p=0.0, kl_target=0.1, init_kl_coef=0.0, prompt_data="gone.jsonl", reward_fn="right")
    assert [line.split()[0] for line in found] == ["top_p", "kl_target", "prompt_data", "reward_fn"]
    assert len(errors(config, 6, engine_tp_size=4, train_batch_size=100)) == 3


def test_names_in_the_config_are_the_keys_of_the_functions_behind_them():
    assert set(get_args(KLEstimator)) == KL_ESTIMATORS.keys()
    assert tuple(ADVANTAGE_ESTIMATORS) == ADVANTAGE_NAMES
    assert tuple(POLICY_LOSSES) == POLICY_LOSS_NAMES
    assert tuple(REWARDS) == REWARD_NAMES


def test_no_flag_has_two_owners(config):
    assert len(flag_types()) == sum(len(vars(section)) for section in vars(config).values())


def test_a_missing_wandb_is_one_line_with_the_way_to_install_it(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_config(config, 1)
    assert errors(config, use_wandb=True) == [
        "use_wandb needs the package wandb, which is not installed. "
        "Run pip install 'lightrft[wandb]', or drop --use_wandb."
    ]


@pytest.mark.parametrize("flag", ["profile_steps", "memory_snapshot_steps"])
def test_steps_to_profile_are_numbers_between_commas(config, flag):
    assert errors(config, **{flag: "3;4"}) == [
        f"{flag}: steps must be numbers from 1 on, separated by commas: '3;4'. Write --{flag} 3,4."
    ]
    check_config(changed(config, **{flag: "3,4"}), 1)


def test_checkpoints_are_saved_every_so_many_steps_or_not_at_all(config):
    for steps in (0, -2):
        assert errors(config, save_steps=steps) == [
            f"save_steps must be -1 (off) or at least 1: save_steps={steps}. Change --save_steps."
        ]
    check_config(changed(config, save_steps=1, max_ckpt_num=1, save_hf_ckpt=True), 1)


def test_an_exported_model_without_a_checkpoint_is_refused(config):
    assert errors(config, save_hf_ckpt=True) == [
        "save_hf_ckpt writes a part of each checkpoint: save_steps=-1 and no ckpt_path save none. "
        "Set --save_steps, or drop --save_hf_ckpt."
    ]
    check_config(changed(config, save_hf_ckpt=True, ckpt_path="elsewhere"), 1)


def test_checkpoints_cannot_go_where_a_file_is(config):
    prompts = config.data.prompt_data
    assert errors(config, ckpt_path=f"{prompts}/ckpt") == [
        f"ckpt_path must be a folder, or a place for a new one: {prompts} is a file. Change --ckpt_path."
    ]


def test_settings_of_a_new_adapter_need_one(config):
    remedy = "and lora_rank=0 adds none. Set --lora_rank, or drop"
    for name, value in (("lora_alpha", 32), ("target_modules", ("q_proj",)), ("use_rslora", True)):
        assert errors(config, **{name: value}) == [
            f"{name} is a setting of a new adapter: {name}={value}, {remedy} --{name}."
        ]
        check_config(changed(config, lora_rank=8, **{name: value}), 1)
    assert errors(config, save_adapter=True) == [
        "save_adapter writes the adapter alone: lora_rank=0 adds none. Set --lora_rank, or drop --save_adapter."
    ]
    check_config(changed(config, lora_path="adapter", save_adapter=True), 1)


def test_weights_are_frozen_by_name_or_because_an_adapter_learns_alone(config):
    check_config(changed(config, freeze_prefix=("visual",)), 1)
    for name, value in (("lora_rank", 8), ("lora_path", "adapter")):
        assert errors(config, freeze_prefix=("visual",), **{name: value}) == [
            "freeze_prefix is about all weights, and with an adapter it alone learns: both are asked for. Drop "
            "--freeze_prefix, or --lora_rank and --lora_path."
        ]


def test_a_saved_adapter_brings_its_own_settings(config):
    for name, value in (("lora_rank", 8), ("lora_alpha", 32)):
        assert errors(config, lora_path="adapter", **{name: value}) == [
            f"{name} is a setting of a new adapter: {name}={value}, and lora_path=adapter brings its own. "
            f"Drop --{name}, or --lora_path."
        ]


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"lora_rank": -1}, "lora_rank must be at least 0: lora_rank=-1. Change --lora_rank."),
        ({"lora_rank": 8, "lora_alpha": 0}, "lora_alpha must be at least 1: lora_alpha=0. Change --lora_alpha."),
        (
            {"lora_rank": 8, "target_modules": ()},
            "target_modules must be names of layers: target_modules=(). Change --target_modules.",
        ),
    ],
)
def test_an_adapter_has_a_rank_a_scale_and_layers(values, rule, config):
    assert errors(config, **values) == [rule]


def test_training_without_fsdp_needs_deepspeed_and_says_how_to_install_it(config, monkeypatch):
    check_config(changed(config, zero_stage=3), 1)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    check_config(changed(config, fsdp=True), 1)
    assert errors(config) == [
        "training without fsdp needs the package deepspeed, which is not installed. "
        "Run pip install 'lightrft[deepspeed]', or add --fsdp."
    ]


def test_a_zero_stage_beside_fsdp_is_refused(config):
    assert errors(config, fsdp=True, zero_stage=3) == [
        "zero_stage is a setting of DeepSpeed, and fsdp trains with FSDP2: both are set, zero_stage=3. "
        "Drop --zero_stage (FSDP2 deals out what stage 3 does), or drop --fsdp."
    ]


def test_limits_of_images_and_columns_of_media_must_fit_each_other(config):
    assert errors(config, image_min_pixels=900, image_max_pixels=400) == [
        "image_max_pixels must be at least image_min_pixels: image_max_pixels=400, image_min_pixels=900. "
        "Raise --image_max_pixels, or lower --image_min_pixels."
    ]
    assert errors(config, image_key="input") == [
        "image_key must name a column of its own: image_key and input_key are 'input'. Change --image_key."
    ]
    assert errors(config, video_max_frames=0) == [
        "video_max_frames must be at least 1: video_max_frames=0. Change --video_max_frames."
    ]
    check_config(changed(config, media_workers=0, image_min_pixels=400, image_max_pixels=400), 1)
