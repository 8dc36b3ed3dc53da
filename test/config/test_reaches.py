"""Every key of the configuration changes the part that it configures."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from grpo.config.schema import Config, ConfigError, load_config
from grpo.envs.tasks.base import Problem
from grpo.run import build, build_engine, build_model, build_objective
from grpo.weights.adapters import AdapterDisabledReference, adapters

from ..keys.watching import keys_of
from .configs import MAXENT, SECTIONS, small

CPU = torch.device("cpu")


class Built:
    """The parts of one configuration around the small model on disk."""

    def __init__(self, folder: Path, tokenizer) -> None:
        self.folder, self.tokenizer = str(folder), tokenizer

    def task(self, config: Config):
        return build.build_task(config)

    def prompts(self, config: Config):
        return build.build_prompts(config, self.task(config), self.tokenizer, self.folder)

    def actor(self, config: Config):
        return build_engine.build_actor(self.setup(config), backend="transformers")

    def setup(self, config: Config):
        return build_engine.Setup(
            config=config, path=self.folder, tokenizer=self.tokenizer, device=CPU,
            dtype=build.resolve_dtype(config, CPU), folder=Path("engine"),
            max_model_len=self.prompts(config).max_model_len)

    def model(self, config: Config):
        model = build_model.load_model(self.folder, config, device=CPU,
                                       dtype=build.resolve_dtype(config, CPU))
        build_model.prepare_model(model, config)
        return model

    def env(self, config: Config):
        return build.build_env(config, self.task(config), self.prompts(config), self.tokenizer,
                               self.actor(config).policy)

    def loss(self, config: Config):
        return build_objective.build_loss(config, self.model(config), self.tokenizer)

    def learner(self, config: Config):
        return build_objective.build_learner(config, self.loss(config))

    def teacher(self, config: Config):
        student = build_model.load_model(self.folder, config, device=CPU, dtype=torch.float32)
        return build_objective.build_teacher(config, student, lambda path: self.load(path, config))

    def load(self, path: str, config: Config):
        """The model on disk, whatever the name; it remembers which was asked for."""
        model = build_model.load_model(self.folder, config, device=CPU, dtype=torch.float32)
        model.asked_for = path
        return model

    def controller(self, config: Config):
        """That of the only coefficient that follows a measurement; None without one."""
        adaptations = build_objective.build_adaptations(config, self.loss(config),
                                                        build_objective.build_advantage(config))
        return adaptations[0].controller if adaptations else None


@pytest.fixture(scope="module")
def built(model_folder, tokenizer) -> Built:
    return Built(model_folder, tokenizer)


def contains_seven(completion: str, problem: Problem) -> float:
    return float("7" in completion)


LOSS = Built.loss
TERMS = lambda b, c: b.loss(c).terms  # noqa: E731
LEARNER = Built.learner
ADAMW = lambda b, c: b.learner(c).optimizer.adamw.param_groups[0]  # noqa: E731
POLICY = lambda b, c: b.actor(c).policy  # noqa: E731
ADAPTERS = lambda b, c: adapters(b.model(c))  # noqa: E731
SERVER = lambda b, c: build_engine.server_options(b.setup(c))  # noqa: E731
ADVANTAGE = lambda b, c: build_objective.build_advantage(c)  # noqa: E731
CONTROLLER = Built.controller
TEACHER = Built.teacher
REWARD = lambda b, c: build.reward_function(c, b.task(c))  # noqa: E731
FIRST_PROMPT = lambda b, c: b.prompts(c).test[0].problem.prompt  # noqa: E731
KL = {"train": {"kl_to_ref_coeff": 0.1}}
HORIZON = {**KL, "kl_controller": {"kind": "horizon", "target": 0.1, "horizon": 10}}
BAND = {**KL, "kl_controller": {"kind": "band", "target": 0.1}}
ENTROPY = {"train": {"entropy_coeff": 0.5},
           "entropy_controller": {"target": 0.1, "step": 0.1, "maximum": 1.0}}
REFERENCE = {**MAXENT, "maxent": {"beta": 0.3}}
TAU = {**MAXENT, "maxent": {"tau_target": 0.5}}
TOPK = {"distill": {"teacher": "some/model", "topk_coeff": 0.1}}
LORA = {"train_model": {"lora": {"enabled": True}}}
ADAFACTOR = {"optimizer": {"name": "adafactor"}}
LINEAR = {"optimizer": {"schedule": "linear", "warmup_steps": 1}}

# key: (part that is built, what is read from it, other keys that it needs, value, expected)
REACHES = {
    "train.objective": (TERMS, lambda x: x.objective.name, {}, "reinforce", "reinforce"),
    "train.clip_epsilon": (LOSS, lambda x: x.clip_epsilon, {}, [0.1, 0.3], (0.1, 0.3)),
    "train.objective_options": (TERMS, lambda x: x.objective_options["delta"], {}, {"delta": 3.0},
                                3.0),
    "train.aggregation": (LOSS, lambda x: (x.aggregation, x.constant_length), {}, "dr_grpo",
                          ("dr_grpo", 3)),
    "train.proximal": (LEARNER, lambda x: (x.loss.terms.proximal, x.proximal is not None), {},
                       "scored", ("scored", True)),
    "train.mismatch": (TERMS, lambda x: x.mismatch and dict(x.mismatch.bounds),
                       {"train": {"proximal": "current"}},
                       {"tis": 2.0, "geometric_reject": [0.9, 1.1]},
                       {"tis": (0.0, 2.0), "geometric_reject": (0.9, 1.1)}),
    "train.off_policy_delta": (TERMS, lambda x: x.off_policy_delta, {}, 0.1, 0.1),
    "train.entropy_top_fraction": (
        LEARNER, lambda x: (x.loss.terms.high_entropy_only,
                            x.proximal and x.proximal.entropy_fraction), {}, 0.2, (True, 0.2)),
    "train.kl_to_ref_coeff": (TERMS, lambda x: x.kl_to_ref_coeff, {}, 0.2, 0.2),
    "train.kl_to_inference_coeff": (TERMS, lambda x: x.kl_to_inference_coeff, {}, 0.2, 0.2),
    "train.kl_estimator": (TERMS, lambda x: x.kl_estimator, KL, "k1", "k1"),
    "train.kl_in_reward": (
        lambda b, c: (b.loss(c), ADVANTAGE(b, c)),
        lambda x: (x[0].terms.kl_to_ref_coeff, x[1].kl_in_reward_coeff), KL, True, (None, 0.1)),
    "train.entropy_coeff": (TERMS, lambda x: x.entropy_coeff, {}, 0.2, 0.2),
    "train.advantage_estimator": (
        lambda b, c: (b.loss(c), ADVANTAGE(b, c)),
        lambda x: (x[0].advantage_estimator, x[1].estimator), {}, "rloo", ("rloo", "rloo")),
    "train.advantage_eps": (ADVANTAGE, lambda x: x.eps, {}, 0.5, 0.5),
    "train.advantage_clip_percentile": (ADVANTAGE, lambda x: x.clip_percentile, {}, 5.0, 5.0),
    "train.zero_variance_filter": (ADVANTAGE, lambda x: x.zero_variance_filter, {}, True, True),
    "train.mask_truncated": (ADVANTAGE, lambda x: x.mask_truncated, {}, True, True),
    "train.overlong_buffer": (ADVANTAGE, lambda x: (x.overlong_buffer, x.max_response_tokens), {},
                              2, (2, 3)),
    "train.overlong_factor": (ADVANTAGE, lambda x: x.overlong_factor,
                              {"train": {"overlong_buffer": 2}}, 0.5, 0.5),
    "kl_controller.kind": (CONTROLLER, lambda x: type(x).__name__, HORIZON, "horizon",
                           "HorizonKL"),
    "kl_controller.target": (CONTROLLER, lambda x: x.target, BAND, 0.7, 0.7),
    "kl_controller.horizon": (CONTROLLER, lambda x: x.horizon, HORIZON, 7, 7),
    "kl_controller.step": (CONTROLLER, lambda x: x.step, HORIZON, 0.7, 0.7),
    "kl_controller.band": (CONTROLLER, lambda x: x.band, BAND, 1.7, 1.7),
    "kl_controller.factor": (CONTROLLER, lambda x: x.factor, BAND, 1.7, 1.7),
    "entropy_controller.target": (CONTROLLER, lambda x: x and x.target, ENTROPY, 0.7, 0.7),
    "entropy_controller.step": (CONTROLLER, lambda x: x.step, ENTROPY, 0.7, 0.7),
    "entropy_controller.minimum": (CONTROLLER, lambda x: x.minimum, ENTROPY, 0.2, 0.2),
    "entropy_controller.maximum": (CONTROLLER, lambda x: x.maximum, ENTROPY, 0.7, 0.7),
    "maxent.tau": (ADVANTAGE, lambda x: x.tau, MAXENT, 0.7, 0.7),
    "maxent.beta": (ADVANTAGE, lambda x: x.beta, MAXENT, 0.7, 0.7),
    "maxent.q_temperature": (ADVANTAGE, lambda x: x.q_temperature, MAXENT, 0.7, 0.7),
    "maxent.q_epsilon": (ADVANTAGE, lambda x: x.q_epsilon, MAXENT, 0.2, 0.2),
    "maxent.length_normalize_ref": (ADVANTAGE, lambda x: x.length_normalize_ref, REFERENCE, False,
                                    False),
    "maxent.tau_target": (CONTROLLER, lambda x: x and x.target, TAU, 0.6, 0.6),
    "maxent.tau_step": (CONTROLLER, lambda x: x.step, TAU, 0.7, 0.7),
    "maxent.tau_minimum": (CONTROLLER, lambda x: x.minimum, TAU, 0.7, 0.7),
    "maxent.tau_maximum": (CONTROLLER, lambda x: x.maximum, TAU, 7.0, 7.0),
    "distill.teacher": (TEACHER, lambda x: x and x.scorer.model.asked_for, TOPK, "other/model",
                        "other/model"),
    "distill.reverse_kl_coeff": (
        lambda b, c: (ADVANTAGE(b, c), b.teacher(c)),
        lambda x: (x[0].reverse_kl_coeff, x[1].sampled_tokens), TOPK, 0.7, (0.7, True)),
    "distill.topk_coeff": (
        lambda b, c: (b.loss(c), b.teacher(c)), lambda x: (x[0].distill_coeff, x[1].topk),
        {"distill": {"teacher": "some/model", "reverse_kl_coeff": 0.1}}, 0.7, (0.7, 20)),
    "distill.topk": (TEACHER, lambda x: x.topk, TOPK, 7, 7),
    "distill.temperature": (LOSS, lambda x: x.distill_temperature, TOPK, 0.7, 0.7),
    "train.packing": (LOSS, lambda x: x.scorer.packing, {}, True, True),
    "inference_model.temperature": (LOSS, lambda x: x.scorer.temperature, {}, 0.5, 0.5),
    "train.seed": (LEARNER, lambda x: x.seed, {}, 7, 7),
    "train.epochs": (LEARNER, lambda x: x.epochs, {}, 2, 2),
    "train.optim_batch_size": (LEARNER, lambda x: x.rows_per_step, {}, 2, 2),
    "train.gradient_accumulation_steps": (
        LEARNER, lambda x: x.split, {}, 3,
        {"num_micro_batches": 3, "max_tokens": None, "multiple_of": 1, "whole_groups": False,
         "packed": False}),
    "train.max_tokens_per_micro_batch": (
        LEARNER, lambda x: x.split, {}, 99,
        {"num_micro_batches": None, "max_tokens": 99, "multiple_of": 1, "whole_groups": False,
         "packed": False}),
    "train_model.compile": (
        # What torch.compile returns may be the function itself, after vLLM without compilation.
        lambda b, c: b.model(c), lambda x: "forward" in vars(x.model.layers[0]), {}, True, True),
    "train_model.gradient_checkpointing": (LEARNER, lambda x: x._probe is not None, {}, True, True),
    "train_model.head": (LOSS, lambda x: x.head, {}, "chunked", "chunked"),
    "train_model.fp32_head": (LOSS, lambda x: x.scorer.fp32_head, {}, True, True),
    "train_model.head_chunk_size": (LOSS, lambda x: x.scorer.chunk_size, {}, 7, 7),
    "train_model.layer_indices": (
        lambda b, c: b.model(c), lambda x: {name.split(".")[2] for name, param in
                                            x.named_parameters() if param.requires_grad},
        {}, [1], {"1"}),
    "train_model.quantization": (
        Built.setup, lambda x: Path(x.engine_path).name, LORA, "int8", "base_model"),
    "train_model.lora.enabled": (
        LEARNER, lambda x: {"lora" in name for name, param in
                            x.loss.actor_network.named_parameters() if param.requires_grad},
        {}, True, {True}),
    "train_model.lora.r": (ADAPTERS, lambda x: {a.shape[0] for a in x.values()}, LORA, 3, {3}),
    "train_model.lora.alpha": (ADAPTERS, lambda x: {a.scaling for a in x.values()}, LORA, 48,
                               {3.0}),
    "train_model.lora.dropout": (
        lambda b, c: b.model(c).model.layers[0].mlp.up_proj, lambda x: (
            getattr(x.lora_dropout["default"], "p", 0.0)), LORA, 0.25, 0.25),
    "train_model.lora.target_modules": (
        ADAPTERS, lambda x: {name.rpartition(".")[2] for name in x}, LORA, ["q_proj", "up_proj"],
        {"q_proj", "up_proj"}),
    "train_model.lora.layer_indices": (
        ADAPTERS, lambda x: {name.split(".")[2] for name in x}, LORA, [1], {"1"}),
    "inference_model.max_num_seqs": (SERVER, lambda x: x["max_num_seqs"], {}, 3, 3),
    "inference_model.kv_cache_memory_bytes": (SERVER, lambda x: x["kv_cache_memory_bytes"], {},
                                              77, 77),
    "inference_model.gpu_memory_utilization": (
        SERVER, lambda x: (x["gpu_memory_utilization"], x["kv_cache_memory_bytes"] is None), {},
        0.3, (0.3, True)),
    "inference_model.enforce_eager": (SERVER, lambda x: x["enforce_eager"], {}, True, True),
    "optimizer.name": (LEARNER, lambda x: (x.optimizer.name, type(x.optimizer.adamw).__name__), {},
                       "adafactor", ("adafactor", "Adafactor")),
    "optimizer.scale_parameter": (ADAMW, lambda x: x["scale_parameter"], ADAFACTOR, True, True),
    "optimizer.relative_step": (LEARNER, lambda x: x.optimizer.lr, ADAFACTOR, True, 0.01),
    "optimizer.lr": (LEARNER, lambda x: x.optimizer.lr, {}, 0.5, 0.5),
    "optimizer.betas": (ADAMW, lambda x: x["betas"], {}, [0.5, 0.6], (0.5, 0.6)),
    "optimizer.eps": (ADAMW, lambda x: x["eps"], {}, 0.5, 0.5),
    "optimizer.weight_decay": (ADAMW, lambda x: x["weight_decay"], {}, 0.5, 0.5),
    "optimizer.clip_grad_norm": (LEARNER, lambda x: x.optimizer.clip_grad_norm, {}, None, None),
    "optimizer.warmup_steps": (LEARNER, lambda x: x.optimizer._factor(0), {}, 4, 0.25),
    "optimizer.schedule": (LEARNER, lambda x: x.optimizer._factor(5), {}, "linear", 0.5),
    "optimizer.final_lr_fraction": (LEARNER, lambda x: x.optimizer._factor(10), LINEAR, 0.5, 0.5),
    "train.total_dialog_turns": (LEARNER, lambda x: x.optimizer._factor(4),
                                 {"optimizer": {"schedule": "linear"}}, 32, 0.5),
    "train.max_steps": (LEARNER, lambda x: x.optimizer._factor(4),
                        {"train": {"total_dialog_turns": None},
                         "optimizer": {"schedule": "linear"}}, 8, 0.5),
    "train.data_epochs": (  # of 20 problems, 2 a batch
        lambda b, c: c.for_problems(len(b.task(c).train)), lambda x: x.iterations,
        {"train": {"total_dialog_turns": None}}, 1.5, 15),
    "inference_model.max_tokens": (POLICY, lambda x: x.sampling.max_tokens, {}, 5, 5),
    "inference_model.max_model_len": (POLICY, lambda x: x.max_model_len, {}, 50, 50),
    "inference_model.ignore_eos": (POLICY, lambda x: x.ignore_eos, {}, True, True),
    "train_model.torch_dtype": (POLICY, lambda x: x.model.dtype, {}, "bfloat16", torch.bfloat16),
    "train_model.attn_implementation": (
        POLICY, lambda x: x.model.config._attn_implementation, {}, "eager", "eager"),
    "env.num_envs": (lambda b, c: b.env(c), lambda x: x.num_prompts, {}, 3, 3),
    "env.repeats": (lambda b, c: b.env(c), lambda x: x.group_size, {}, 4, 4),
    "env.task": (lambda b, c: b.env(c), lambda x: len(x.stream.prompts), {}, {"num_train": 9}, 9),
    "env.system_prompt": (FIRST_PROMPT, lambda x: x[0], {}, "Add.",
                          {"role": "system", "content": "Add."}),
    "env.thinking_prompt": (FIRST_PROMPT, lambda x: x[0], {}, "Think.",
                            {"role": "system", "content": "Think."}),
    "env.chat_template": (
        lambda b, c: Built(b.folder, copy.deepcopy(b.tokenizer)).prompts(c).test[0].tokens, len,
        {"env": {"system_prompt": "Add."}}, "{{ messages[0]['content'] }}", 4),
    "env.dataset": (lambda b, c: b.task(c), lambda x: x.name, {"env": {"task": {}}},
                    "test_dataset", "test_dataset"),
    "env.reward_timeout": (REWARD, lambda x: x.timeout, {}, 2.5, 2.5),
    "env.reward_workers": (REWARD, lambda x: x.workers, {}, 3, 3),
    "env.reward_weights": (
        REWARD, lambda x: x(["47"], [Problem("", "47", "p")]).reward.tolist(),
        {"env": {"reward": ["exact_match", "negative_length"]}}, [2.0, 1.0], [0.0]),
    "env.reward": (REWARD, lambda x: x(["47"], [Problem("", "0", "p")]).reward.tolist(), {},
                   {f"{__name__}:contains_seven": 0.5, "exact_match": 1.0}, [0.5]),
}


@pytest.fixture(scope="module", autouse=True)
def other_task():
    from grpo.envs.tasks.base import Task, register_task

    @register_task("test_dataset")
    class Other(Task):
        default_reward = "exact_match"

        def __init__(self) -> None:
            problem = Problem("1+1=", "2", "p")
            super().__init__(train=[problem], test=[problem], source="here")


# Without them the other keys of their section are refused, so the run before has none.
SWITCHES = {"kl_controller.kind", "entropy_controller.target", "maxent.tau_target",
            "distill.teacher"}


@pytest.mark.parametrize("key", sorted(REACHES))
def test_every_key_changes_the_part_it_configures(key, built):
    part, read, needed, value, expected = REACHES[key]
    section, *path, name = key.split(".")
    before = small(**needed)
    after = copy.deepcopy(before)
    place = after.setdefault(section, {})
    for part_of_path in path:
        place = place.setdefault(part_of_path, {})
    place[name] = value
    if key in SWITCHES:
        del before[section]
    changed = read(part(built, load_config(after)))
    assert changed == expected
    assert read(part(built, load_config(before))) != changed


def test_every_key_of_these_sections_is_covered():
    # Read by the loop, the loggers, the environment and the arrangement of trainer and engine;
    # tested where they are.
    elsewhere = {"train.exp_name", "train.dialog_turns_per_batch", "train.eval_frequency",
                 "train.checkpoint_frequency", "train.keep_checkpoints", "train.proof_interval",
                 "train.rollout_timeout",
                 "train.max_sampling_rounds", "inference_model.backend", "inference_model.engine",
                 "inference_model.url", "inference_model.weight_sync", "train_model.num_devices",
                 "inference_model.server", "inference_model.connections",
                 "train_model.devices", "inference_model.num_devices", "inference_model.devices",
                 "inference_model.tensor_parallel_size"}
    sections = ("train", "optimizer", "train_model", "inference_model", "kl_controller",
                "entropy_controller", "maxent", "distill")
    keys = {key for section in sections for key in keys_of(SECTIONS[section], f"{section}.")}
    assert keys == {key for key in REACHES if key.split(".")[0] in sections} | elsewhere


def test_the_data_path_reaches_the_task(gsm8k_folder):
    config = load_config(small(env={"dataset": "gsm8k", "data_path": str(gsm8k_folder),
                                    "task": {}}))
    assert len(build.build_task(config).test) == 1319


def test_the_columns_of_a_data_set_reach_the_task(tmp_path):
    (tmp_path / "sums.jsonl").write_text("".join(
        f'{{"q": "{n}+0?", "a": {n}}}\n' for n in range(3)))
    env = {"dataset": "dataset", "path": str(tmp_path / "sums.jsonl"), "prompt_column": "q",
           "answer_column": "a", "task": {"num_test": 1}, "system_prompt": ""}
    for more in ({}, {"path": None, "dataset_mixture": {
            "datasets": [{"id": env["path"]}], "test_split_size": 1}, "task": {}}):
        task = build.build_task(load_config(small(env=env | more)))
        assert (len(task.train), len(task.test), len(task.test[0].prompt)) == (2, 1, 1)
        assert {problem.answer for problem in task.train + task.test} == {"0", "1", "2"}


def test_an_option_the_task_does_not_have_is_refused():
    config = load_config(small(env={"task": {"max_operands": 9}}))
    with pytest.raises(ValueError, match="no option 'max_operands'.*max_operand"):
        build.build_task(config)


def test_the_prompt_limit_decides_which_prompts_are_kept(built):
    with pytest.raises(ValueError, match=r"env\.max_prompt_tokens=3 .*nothing is left"):
        built.prompts(load_config(small(env={"max_prompt_tokens": 3})))


@pytest.mark.parametrize(("inference", "parts"), [
    ({"max_model_len": 4096}, "max_model_len=4096 is more than the model's context of 2048"),
    ({"max_tokens": 2048}, "max_tokens=2048 leaves no room"),
])
def test_lengths_that_do_not_fit_the_model_are_refused(inference, parts, built):
    with pytest.raises(ConfigError, match=parts):
        built.prompts(load_config(small(inference_model=inference)))


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, None), (MAXENT, None), (KL, "the/start"), (REFERENCE, "the/start"),
    ({**KL, "ref_model": {"name": "some/model"}}, "some/model")])
def test_a_reference_is_only_loaded_where_it_is_compared_and_is_the_named_model(
        built, changes, expected):
    config = load_config(small(**changes))
    asked = []

    def start_model() -> str:
        asked.append("start")
        return "the/start"

    reference = build_objective.build_reference(config, built.model(config), start_model,
                                                lambda path: built.load(path, config))
    assert bool(asked) == (expected == "the/start")  # the embedded one is made when it is needed
    if expected is None:
        assert reference is None
        return
    assert reference.scorer.model.asked_for == expected
    assert not any(param.requires_grad for param in reference.scorer.model.parameters())


def test_a_teacher_with_another_vocabulary_is_refused(built, make_model):
    config = load_config(small(**TOPK))
    student = build_model.load_model(built.folder, config, device=CPU, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"distill.teacher='some/model' has a vocabulary of 23 "
                                          r"tokens, the policy one of 258.*tokenizer"):
        build_objective.build_teacher(config, student, lambda path: make_model())


def test_a_model_with_adapters_is_its_own_reference_unless_another_is_named(built):
    def reference(**changes):
        config = load_config(small(**KL, **LORA, **changes))
        model = built.model(config)
        return model, build_objective.build_reference(
            config, model, lambda: pytest.fail("a second model"),
            lambda path: built.load(path, config))

    model, own = reference()
    assert isinstance(own, AdapterDisabledReference) and own.scorer.model is model
    model, other = reference(ref_model={"name": "some/model"})
    assert other.scorer.model.asked_for == "some/model"
