"""The loop: generate, score, update, publish, prove, report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from grpo import data
from grpo.collectors.base import Collector
from grpo.envs.rewards.batch import check_rewards
from grpo.report.reporter import Reporter
from grpo.training.adaptation import Adaptation
from grpo.training.checkpoint import (
    Checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
    save_final,
)
from grpo.training.checkpoint_files import NotSavedError, check_room, saved_bytes
from grpo.training.evaluation import Evaluator
from grpo.training.evaluations import Evaluations
from grpo.training.going_on import how_to_go_on
from grpo.training.learner import Learner
from grpo.training.rollout_metrics import advantage_counts, advantage_metrics, rollout_metrics
from grpo.training.stopping import Stopped, StopRequests
from grpo.weights.canary import Canary, StaleWeightsError
from grpo.weights.proof import WeightProof
from grpo.weights.shared import WeightSync
from grpo.weights.tolerance import CanaryReport


class Trainer:
    """On-policy GRPO with rollouts on demand.

    An iteration: collect a rollout with the current weights, score it with the frozen models,
    turn rewards into advantages, take the optimizer steps, adapt the coefficients that follow a
    measurement, publish the weights to the engine, let the canary prove that they arrived.

    Args:
        collector: rollouts.
        advantage: rewards to advantages, on whole groups.
        learner: advantages to weights.
        weights: weights to the engine.
        canary: the proof after each update.
        overlap_canary: let the engines answer the canary and hash their weights while the next
            rollout is trained on, and compare before the next optimizer step; for engines beside
            the trainer.
        evaluator: held-out accuracy; None: nothing is held out here, as where environments
            evaluate themselves, and with ``train.eval_frequency=never``.
        reporter: screen, files and loggers.
        tokenizer: saved beside the model.
        run_dir, config: folder and resolved configuration of the run, saved with checkpoints.
        iterations: how many to run in all.
        eval_frequency: iterations between evaluations; 0: only at the start and the end. Before
            each the engine gets the present weights, also where updates would wait on purpose.
        checkpoint_frequency: iterations between checkpoints; 0: none.
        keep_checkpoints: how many of them stay.
        reference: writes the reference policy's log-probs into a rollout, where anything is
            compared with it.
        teacher: writes a teacher's opinion into a rollout, for distillation.
        adaptations: coefficients that follow a metric.
        max_reward_errors: greatest share of a batch for which reward functions may fail.
        proof_interval: updates within which all of the engine's tensors are compared with the
            trainer's, to the bit; see :class:`~grpo.weights.proof.WeightProof`.
    """

    def __init__(
        self, *, collector: Collector, advantage: TensorDictModuleBase, learner: Learner,
        weights: WeightSync, canary: Canary, reporter: Reporter,
        evaluator: Evaluator | Evaluations | None, tokenizer: Any, run_dir: Path,
        config: dict[str, Any], iterations: int,
        eval_frequency: int = 10, checkpoint_frequency: int = 0, keep_checkpoints: int = 3,
        reference: Callable[[TensorDictBase], TensorDictBase] | None = None,
        teacher: Callable[[TensorDictBase], TensorDictBase] | None = None,
        adaptations: Sequence[Adaptation] = (), overlap_canary: bool = False,
        proof_interval: int = 10, max_reward_errors: float = 0.5,
    ) -> None:
        self.collector, self.advantage, self.learner = collector, advantage, learner
        self.weights, self.canary, self.evaluator = weights, canary, evaluator
        self.proof = WeightProof(weights, interval=proof_interval)
        self.reporter, self.tokenizer = reporter, tokenizer
        self.run_dir, self.config = run_dir, config
        self.frozen = {"reference": reference, "teacher": teacher}
        self.adaptations = list(adaptations)
        self.iterations, self.eval_frequency = iterations, eval_frequency
        self.checkpoint_frequency, self.keep_checkpoints = checkpoint_frequency, keep_checkpoints
        self.max_reward_errors = max_reward_errors
        self.after_saving: list[Callable[[Checkpoint], None]] = []  # told of each that is written
        self.step = 0
        self.resumed_from: Path | None = None
        self.first_accuracy = self.last_accuracy = float("nan")
        self.evaluated: int | None = None  # the last step that was
        self.requests = StopRequests()
        self.saved: Checkpoint | None = None
        self.compared: Checkpoint | None = None  # the last whose weights all were the engine's
        self._kept: tuple[Any, ...] | None = None  # the progress that it has
        self._looked = False  # at what there is before any update
        self._before_batch: dict[str, Any] | None = None
        self._before_evaluation: dict[str, Any] | None = None
        self._unlogged: dict[str, float] | None = None
        self._seconds: dict[str, float] = {}
        self._report: CanaryReport | None = None
        self._unproven = False
        self.overlap_canary = overlap_canary
        if overlap_canary:
            learner.before_step.finish_proof = self._finish_proof

    @property
    def model(self) -> torch.nn.Module:
        return self.learner.loss.actor_network

    def fit(self) -> None:
        """Run all iterations that are left, save the result, write the report.

        The result is in ``final_model/``, or in ``final_adapter/`` where adapters are trained. A
        run that ends early leaves a checkpoint and the report.

        Raises:
            Stopped: on SIGTERM or SIGINT, when all is saved.
            NotSavedError: if the disk had no room for the result.
        """
        try:
            with self.reporter.console, self.requests:
                try:
                    self._train()
                # Also what a user's own reward, environment or estimator raises.
                except (Stopped, Exception) as reason:
                    self._end_early(reason)
                    # A signal to all processes of a job takes from the step what it needs.
                    if self.requests.asked is not None and not isinstance(reason, Stopped):
                        raise Stopped(self.requests.asked) from reason
                    raise
                self._finish()
        finally:
            self.reporter.loggers.close()

    def _train(self) -> None:
        if self.step == 0 and not self._looked:
            self._first_look()
        elif self._to_evaluate() and self.evaluated != self.step:
            self._make_up_evaluation()
        while self.step < self.iterations:
            self.iterate()
            if self.step < self.iterations:  # else it is over anyway
                self.requests.check()

    def _finish(self) -> None:
        failed, result = None, self.run_dir
        try:
            check_room(self.run_dir, saved_bytes(self.model))
            result = save_final(self.model, self.tokenizer, self.run_dir,
                                gathering=self.learner.gathering)
        except NotSavedError as error:
            failed = error
        headline = f"{self.step} iterations"
        if self.evaluator is not None:
            headline = (f"held-out accuracy {self.first_accuracy:.3f} -> {self.last_accuracy:.3f} "
                        f"in {headline}")
        self._write_report(headline, result)
        if failed is not None:
            raise failed

    def _write_report(self, headline: str, result: Path, *, early: bool = False) -> None:
        self.reporter.finish(self.config, result=result, title=self.config["train"]["exp_name"],
                             headline=headline, early=early)

    def _end_early(self, reason: BaseException) -> None:
        """Keep what was trained, and say how the run goes on."""
        console, summary = self.reporter.console, str(reason).partition("\n")[0]
        if self._unlogged is not None:  # something failed when the step was trained
            self.reporter.loggers.log(self.step, self._unlogged)
        if self.step == 0 and not self._looked:
            console.warn(f"{summary}; nothing has been trained yet")
            return
        try:
            if self.requests.insisted:
                raise NotSavedError("it was interrupted at once")
            if self._progress() != self._kept:
                self.save(stale=isinstance(reason, StaleWeightsError))
        except Exception as error:  # the disk is full, or a rank has died; the reason is raised
            console.warn(f"{summary}; the present state could not be saved: {error}")
        if self.saved is not None:
            self._write_report(f"{summary} after {self.step} of {self.iterations} iterations",
                               self.saved.folder, early=True)
            console.info(how_to_go_on(self.run_dir, self.saved, self.compared, reason))

    def _first_look(self) -> None:
        """Before any update: do engine and trainer agree, and how good is the model?"""
        with self.requests.at_once():
            self._prove_start()
        metrics = self._evaluate()
        if metrics:
            self.reporter.step(0, metrics)
        self._looked = True

    def _make_up_evaluation(self) -> None:
        """Evaluate what was to be evaluated where the run ended, as a further line of that step."""
        self._seconds = {}
        metrics = self._evaluate()
        self.reporter.step(self.step, metrics | {"time/eval": self._seconds["eval"]})

    def iterate(self) -> dict[str, float]:
        """One iteration; returns its metrics."""
        start, self._seconds = time.perf_counter(), {}
        self._before_batch = self._position()
        with self.requests.at_once():
            rollout = self.collector.collect()
        self.reporter.failures(self.step + 1, self.collector.failures)
        check_rewards(rollout, self.collector.failures, limit=self.max_reward_errors,
                      when=f"iteration {self.step + 1}")
        metrics = rollout_metrics(rollout) | self.collector.metrics
        metrics |= data.staleness(rollout, self.weights.version)
        for name, scorer in self.frozen.items():
            if scorer is not None:
                with self._timed(name):
                    scorer(rollout)
        with self._timed("advantage"):
            self.advantage(rollout)
            metrics |= advantage_metrics(rollout) | advantage_counts(rollout)
        metrics |= self.learner.update(rollout, iteration=self.step)
        self.step += 1  # the model is that of the next step, whoever gets to know its weights
        self._before_batch, self._before_evaluation, self._unlogged = None, None, metrics
        for adaptation in self.adaptations:  # part of the step, as what follows may fail
            metrics |= adaptation.update(metrics)
        save, evaluate = self._to_save(), self._to_evaluate()
        with self._timed("sync"):
            # An accuracy is that of its step's model, the last one that of the model that is kept.
            metrics["policy/version"] = self.weights.publish(now=evaluate)
        if waited := self.weights.waited:  # for groups that run, which is no cost of the weights
            self._seconds["border"] = waited
            self._seconds["sync"] -= waited
        first = self._report is None
        kept = evaluate or save or self.step == self.iterations
        self._prove(now=not self.overlap_canary or kept or first, whole=kept)
        metrics["canary/mean_abs_diff"] = self._report.mean_abs_diff
        metrics["canary/max_abs_diff"] = self._report.max_abs_diff
        self._seconds |= self.collector.seconds | self.learner.seconds
        metrics["time/step"] = seconds = time.perf_counter() - start
        metrics["tokens/per_second"] = metrics.pop("tokens/total") / seconds
        if evaluate:
            metrics |= self._evaluate()
        metrics |= {f"time/{phase}": value for phase, value in self._seconds.items()}
        self._unlogged = None
        self.reporter.step(self.step, metrics)
        if save:
            try:
                saved = self.save()
                self.compared = self.compared if self.weights.pending else saved
            except NotSavedError as error:  # the next one may find room
                self.reporter.console.warn(f"no checkpoint of step {self.step}: {error}")
        return metrics

    def _prove_start(self) -> None:
        """Before any step: do updates arrive, and do engine and trainer agree?"""
        with self._timed("canary"):
            self.proof.self_test(self.learner, begin=self.learner.before_step)
            self._report = self.canary.check()

    def _prove(self, *, now: bool = True, whole: bool = False) -> None:
        """Let the canary check, ``now`` or before anything is changed or kept; and compare the
        ``whole`` of the weights, or a part of them."""
        with self._timed("canary"):
            if now:
                self._report = self.canary.check()
                self.proof.check(whole=whole)
            else:
                self.canary.start()
                self.proof.start(whole=whole)
                self._unproven = True

    def _finish_proof(self) -> None:
        if self._unproven:
            self._unproven = False
            with self._timed("canary"):
                self._report = self.canary.finish()
                self.proof.finish()

    def save(self, *, stale: bool = False) -> Checkpoint:
        """Write a checkpoint of the whole run. The last that was compared stays beside one that
        was not, as where weights wait for their engine, or it was found to be ``stale``.

        Raises:
            NotSavedError: if the disk has no room for it, or the weights are those of no iteration.
        """
        if self.learner.halfway:
            raise NotSavedError("the optimizer has taken some of its steps on a batch, but not all")
        progress, state = self._progress(), self.state_dict()  # in which more may be finished
        beside = self.compared if stale or self.weights.pending else None
        check_room(self.run_dir / "checkpoints", saved_bytes(self.model, state))
        self.saved = save_checkpoint(
            self.run_dir, self.step, model=self.model, tokenizer=self.tokenizer, state=state,
            config=self.config, keep=self.keep_checkpoints, gathering=self.learner.gathering,
            protect=filter(None, [self.resumed_from, beside and beside.folder]))
        self._kept = progress
        for tell in self.after_saving:
            tell(self.saved)
        return self.saved

    def _progress(self) -> tuple[Any, ...]:
        """What a checkpoint of this moment has and an earlier one, also of this step, may lack."""
        return self.step, self.evaluated, self.collector.finished

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model that the next iteration depends on.

        In the middle of a batch that was not trained on, or of an evaluation, this is where it
        began, but for groups that were finished since, where the collector keeps them.
        """
        return {
            "step": self.step,
            "optimizer": self.learner.optimizer.state_dict(),
            "version": self.weights.version,
            "accuracy": [self.first_accuracy, self.last_accuracy],
            "evaluated": self.evaluated,
            "sample_rows": self.reporter.sample_rows,
            "adaptations": {a.name: a.state_dict() for a in self.adaptations},
            **(self._before_batch or self._before_evaluation or self._position()),
            **({"env": self.collector.state_dict()} if self.collector.keeps_untrained else {}),
        }

    def _position(self) -> dict[str, Any]:
        """What a rollout moves on: all random numbers, and the data, unless the collector knows at
        any moment what of it was trained."""
        data_too = {} if self.collector.keeps_untrained else {"env": self.collector.state_dict()}
        return {**data_too, "random": random_state(),
                "calls": {name: policy.calls for name, policy in self._policies().items()}}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint whose model has already been loaded."""
        state = checkpoint.state()
        # Engines that die later are started anew from its weights.
        self.resumed_from, self._looked = checkpoint.folder, True
        self.saved = self.compared = checkpoint  # with the engine, before the next step
        self.step = state["step"]
        self.learner.optimizer.load_state_dict(state["optimizer"])
        self.collector.load_state_dict(state["env"])
        self.weights.version = state["version"]
        self.collector.policy.start_at(state["version"])
        self.first_accuracy, self.last_accuracy = state["accuracy"]
        self.evaluated = state.get("evaluated", self.step)  # as earlier versions took for granted
        self.reporter.sample_rows = state["sample_rows"]
        saved = state.get("adaptations", {})
        for adaptation in self.adaptations:
            if adaptation.name in saved:  # one that is new in this run starts at its beginning
                adaptation.load_state_dict(saved[adaptation.name])
        if checkpoint.run_dir.resolve() == self.run_dir.resolve():  # a branch has none yet
            self._kept = self._progress()
        self._prove_start()
        # Last, because loading and checking may have drawn numbers and counted calls.
        for name, policy in self._policies().items():
            policy.calls = state["calls"].get(name, 0)  # 0: new in this run, as its evaluations
        restore_random_state(state["random"])

    def _policies(self) -> dict[str, Any]:
        policies = {"train": self.collector.policy, "canary": self.canary.policy}
        return policies if self.evaluator is None else {
            **policies, "eval": self.evaluator.policy}

    def _evaluate(self) -> dict[str, float]:
        if self.evaluator is None:
            return {}
        options = {"checkpoint": self._to_save()} if self.evaluator.at_checkpoints else {}
        self._before_evaluation = self._position()
        with self.requests.at_once(), self._timed("eval"):
            evaluation = self.evaluator.run(**options)
        self._before_evaluation, self.evaluated = None, self.step
        self.last_accuracy = evaluation.accuracy
        if math.isnan(self.first_accuracy):  # also where earlier parts of a run had none
            self.first_accuracy = self.last_accuracy
        self.reporter.samples(self.step, evaluation.batch, evaluation.problems)
        self.reporter.evaluation(self.step, evaluation.record)
        return evaluation.metrics()

    def _to_save(self) -> bool:
        return self.step > 0 and self.checkpoint_frequency > 0 and self._due(
            self.checkpoint_frequency)

    def _to_evaluate(self) -> bool:
        return self.evaluator is not None and (
            self._due(self.eval_frequency) or self.evaluator.at_checkpoints and self._to_save())

    def _due(self, frequency: int) -> bool:
        """Whether the step is one of every ``frequency``, or the run's last one."""
        return self.step == self.iterations or (frequency > 0 and self.step % frequency == 0)

    @contextmanager
    def _timed(self, phase: str):
        start = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start
