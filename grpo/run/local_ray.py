"""Ray, as a run starts it or connects to it; needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from grpo.config.keys import ConfigError
from grpo.run.placement import DevicePlan
from grpo.run.ray_token import token_of_ray
from grpo.system.child_process import package_environment
from grpo.system.cores import share_cores
from grpo.system.descendants import gone_after
from grpo.system.processes import children
from grpo.training.stopping import handlers_kept

# Of the Ray that a run starts. Its head process would keep the timeline of each of the last 100,000
# calls; `enable_task_events` of an actor leaves out other records alone. Processes would be started
# ahead of work, but each of our actors has variables, hence a process, of its own.
_SETTINGS = {"enable_timeline": False, "prestart_worker_first_driver": False}


def start_own_ray(plan: DevicePlan) -> Callable[[], None]:
    """Start Ray on this machine, for a run of its own; see :func:`start_ray`.

    It is not a cluster that RAY_ADDRESS names, or that a `ray start` left on this machine.
    """
    return start_ray(
        address="local", include_dashboard=False, num_gpus=0, _system_config=_SETTINGS,
        num_cpus=4 + len(plan.engines) + len(plan.reference) + len(plan.train))


def start_ray(**options: Any) -> Callable[[], None]:
    """Connect to Ray or start it, with ``options`` of ``ray.init``; returns what ends that.

    Raises:
        ConfigError: if that does not work, with Ray's reason.
    """
    import ray

    if ray.is_initialized():  # by whoever embeds this run
        return lambda: None
    # Workers find this very package, not what lies in the folder of a script.
    variables = {"PYTHONPATH": package_environment()["PYTHONPATH"], **share_cores()}
    forget_token = token_of_ray(own=options.get("address") == "local")
    others = children()
    try:
        with ExitStack() as after_a_failure, handlers_kept():
            after_a_failure.callback(forget_token)
            ray.init(**options, runtime_env={"env_vars": variables}, log_to_driver=False,
                     logging_level="ERROR")
            after_a_failure.pop_all()
    except SystemError:  # a signal in its compiled code, see StopRequests.at_once
        raise
    except Exception as error:  # it raises bare ones, where a part of it was not up within 30 s
        ray.shutdown()
        address, reason = options.get("address"), " ".join(str(error).split())
        raise ConfigError(
            f"Ray could not be started: {reason}; something else may take the cores or the memory "
            "that it needs; try again, or start it yourself (ray start --head) and set "
            "ray.address=auto" if address in (None, "local") else
            f"ray.address={address}: {reason}; check the address and that `ray status` answers "
            "there") from error

    started = children() - others  # none where it has connected to another's

    def end() -> None:
        with gone_after(started):  # as workers are not when it returns: they still hold memory
            ray.shutdown()
        forget_token()

    return end
