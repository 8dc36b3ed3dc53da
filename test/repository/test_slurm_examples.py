"""The scripts of examples/slurm, with a stand-in for Python that serves and trains nothing."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys

import pytest

from grpo.run.build import build_task

from ..config.configs import composed_like
from ..support import REPO, free_port, wait_until
from .commands_page import Line

LOCAL = REPO / "examples" / "slurm" / "local.sh"

STAND_IN = f"""#!{sys.executable}
import http.server, os, sys
arguments, where = sys.argv[1:], os.environ["LOG_DIR"]
if "grpo.server.serve" in arguments:
    open(where + "/server.pid", "w").write(str(os.getpid()))
    print("server", *arguments, "GPU", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    if os.environ.get("BROKEN"):
        sys.exit("no such model")
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
    port = int(arguments[arguments.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
elif arguments and arguments[0].endswith("grpo.py") and "--cfg" not in arguments:
    print("trainer", *arguments, "GPU", os.environ["CUDA_VISIBLE_DEVICES"],
          "token", bool(os.environ["GRPO_SERVER_TOKEN"]))
    if os.environ.get("SLOW"):
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: (
            os.kill(int(open(where + "/server.pid").read()), 0),  # it is still there
            time.sleep(0.5), print("saved", flush=True), sys.exit(143)))
        open(where + "/trains", "w").close()
        time.sleep(30)
    sys.exit(int(os.environ.get("CODE", 0)))
else:
    os.execv({sys.executable!r}, [{sys.executable!r}, *arguments])
"""


@pytest.fixture
def run(tmp_path):
    """Run local.sh with variables; its result, and what server and trainer wrote."""
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def start(*arguments: str, **variables: str):
        done = subprocess.run(
            [str(LOCAL), *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path,
            env=os.environ | {"PYTHON": str(python), "LOG_DIR": str(tmp_path), "VLLM_MODEL": "m",
                              "VLLM_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": "4,5,6",
                              **variables})
        logs = [(tmp_path / f"{name}.log") for name in ("server", "trainer")]
        return done, *(log.read_text() if log.exists() else "" for log in logs)

    yield start
    pid = tmp_path / "server.pid"
    if pid.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_server_and_trainer_get_gpus_options_and_logs_of_their_own(run):
    done, server, trainer = run("train_model.torch_dtype=float32", "train.seed=3",
                                VLLM_TP_SIZE="2", VLLM_MAX_LEN="512", VLLM_MEM_UTIL="0.8")
    assert done.returncode == 0, done.stderr
    assert ("--tensor-parallel-size 2 --dtype float32 --max-model-len 512 "
            "--gpu-memory-utilization 0.8") in server
    assert server.splitlines()[0].endswith("GPU 4,5")
    assert "model.name=m" in trainer and "train.seed=3 GPU 6 token True" in trainer


def test_all_gpus_that_the_engine_leaves_train(run):
    _, server, trainer = run()
    assert server.splitlines()[0].endswith("GPU 4")
    assert "train_model.num_devices=2 GPU 5,6 token True" in trainer


def test_the_server_is_started_for_the_adapters_and_the_head_of_the_run(run):
    done, server, trainer = run("train_model.lora.enabled=true", "train_model.lora.r=32",
                                "train_model.fp32_head=true", "optimizer.lr=1e-4")
    assert done.returncode == 0, done.stderr
    assert "--fp32-head --enable-lora --max-lora-rank 32 GPU" in server
    given = trainer[:trainer.index(" GPU ")].split()
    config = composed_like(given[2:], script=given[1])
    assert (config.inference_model.weight_sync, config.train_model.lora.r) == ("lora", 32)


def test_what_the_server_has_to_know_is_read_as_hydra_does(run, tmp_path):
    done, server, trainer = run("train_model.lora.enabled=True", "train_model.fp32_head=TRUE",
                                "hydra.run.dir=/scratch/runs/${now:%H}/a", "optimizer.lr=1e-4")
    assert done.returncode == 0, done.stderr
    assert "--fp32-head --enable-lora --adapter-root /scratch/runs/ GPU" in server
    assert "inference_model.weight_sync=lora" in trainer
    _, server, _ = run("hydra.run.dir=/scratch/runs/a")  # where the server has no adapters
    assert "--adapter-root" not in server


def test_what_the_head_calls_a_default_is_one(run):
    head = dict(re.findall(r"^#     ([A-Z_]+) +([^\s:;]+)", LOCAL.read_text(), re.MULTILINE))
    assert head["VLLM_MODEL"] == "Qwen/Qwen2.5-1.5B-Instruct" and len(head) == 10
    _, server, _ = run(VLLM_MODEL="", VLLM_PORT="", BROKEN="1")  # somebody may have that port
    assert (f"--model {head['VLLM_MODEL']} --port {head['VLLM_PORT']} --tensor-parallel-size "
            f"{head['VLLM_TP_SIZE']} --dtype bfloat16 --max-model-len {head['VLLM_MAX_LEN']} "
            f"--gpu-memory-utilization {head['VLLM_MEM_UTIL']} GPU") in server
    _, _, trainer = run(VLLM_MODEL="")
    assert f"{head['TRAIN_ENTRYPOINT']} model.name={head['VLLM_MODEL']} inference" in trainer


def test_maxent_is_a_preset_that_arguments_win_over(run):
    _, _, trainer = run("maxent.tau=0.3", MAXENT="1")
    given = trainer[:trainer.index(" GPU ")].split()
    config = composed_like(given[2:], script=given[1])
    assert config.train.objective == "maxent_listwise" and config.maxent.tau == 0.3
    done, *_ = run(MAXENT="yes")
    assert done.returncode == 2 and "MAXENT=yes must be 0 or 1" in done.stderr


def test_another_script_can_train(run, tmp_path):
    script = tmp_path / "my-grpo.py"
    script.touch()
    _, _, trainer = run(TRAIN_ENTRYPOINT=str(script))
    assert trainer.startswith(f"trainer {script} model.name=m")
    done, *_ = run(TRAIN_ENTRYPOINT="nowhere.py")
    assert done.returncode == 2 and "TRAIN_ENTRYPOINT=nowhere.py is no file" in done.stderr


@pytest.mark.parametrize("name, value", [
    ("VLLM_PORT", "abc"), ("VLLM_TP_SIZE", "two"), ("VLLM_TP_SIZE", "0"), ("VLLM_MAX_LEN", "2k"),
    ("VLLM_TIMEOUT", "-1")])
def test_a_variable_that_is_no_number_is_named(run, name, value):
    done, server, _ = run(**{name: value})
    assert done.returncode == 2 and not server
    assert done.stderr == f"error: {name}={value} must be a whole number above 0\n"


def test_a_server_of_somebody_else_is_not_taken_for_the_own(run):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done, server, trainer = run(VLLM_PORT=str(port))
    assert done.returncode == 2 and not server and not trainer
    assert f"VLLM_PORT={port} is in use" in done.stderr


def test_a_misspelt_key_is_found_before_the_engine_starts(run):
    done, server, trainer = run("train.sead=3")
    assert done.returncode == 1 and not server and not trainer
    assert "train.sead: unknown key (given 3); did you mean 'seed'?" in done.stderr


def test_the_trainers_exit_code_is_that_of_the_script(run):
    assert run(CODE="7")[0].returncode == 7


def test_a_job_that_is_to_end_lets_the_trainer_save_before_the_server_goes(run, tmp_path):
    script = subprocess.Popen(
        [str(LOCAL)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHON": str(tmp_path / "python"), "LOG_DIR": str(tmp_path),
                          "VLLM_MODEL": "m", "VLLM_PORT": str(free_port()), "SLOW": "1",
                          "CUDA_VISIBLE_DEVICES": "4,5"})
    wait_until((tmp_path / "trains").exists)
    script.send_signal(signal.SIGTERM)  # as Slurm does, to the batch script alone
    output, _ = script.communicate(timeout=30)
    assert script.returncode == 143 and output.rstrip().endswith("saved")


def test_a_server_that_ends_is_an_error_with_its_last_lines(run):
    done, _, trainer = run(BROKEN="1")
    assert done.returncode == 1 and not trainer
    assert "the server ended" in done.stderr and "no such model" in done.stderr


def test_too_few_gpus_are_refused(run):
    done, *_ = run(CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 2 and "ask for 2" in done.stderr


def test_the_sbatch_file_says_where_it_must_be_submitted(tmp_path):
    done = subprocess.run([str(LOCAL.with_name("train.sbatch"))], capture_output=True, text=True,
                          env=os.environ | {"SLURM_SUBMIT_DIR": str(tmp_path)})
    assert done.returncode == 2 and "submit from there" in done.stderr


STAND_INS = {
    "scontrol": "printf 'node1\\nnode2\\n'",
    "hostname": '[[ $1 == -I ]] && echo "10.1.2.3 172.17.0.1" || echo 127.0.1.1',
    # Drops its own options and runs the rest, where it is not Ray.
    "srun": '''echo "srun cpus ${SRUN_CPUS_PER_TASK:-none} $*" >>"$LOG_DIR/srun.log"
while [[ $1 == -* ]]; do [[ $1 == -w ]] && shift; shift; done
[[ $1 == hostname ]] && exec "$@"
exit 0''',
    # Asked for Ray's nodes, it says that all are there when all steps have begun.
    "python": '''[[ $1 != -c ]] && exec echo "trainer $*"
[[ $2 == *secrets* ]] && exec echo a-token
[[ $(grep -c "^srun cpus" "$LOG_DIR/srun.log") == 3 ]] && echo "$SLURM_NNODES"'''}


@pytest.fixture
def submit(tmp_path):
    """Run train.sbatch on two nodes with stand-ins for Slurm, Ray and Python."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("S")}

    def start(*arguments: str, **variables: str):
        return subprocess.run(
            [str(LOCAL.with_name("train.sbatch")), *arguments], capture_output=True, text=True,
            timeout=60, cwd=tmp_path, env=inherited | {
                "PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG_DIR": str(tmp_path),
                "GRPO_REPO": str(REPO), "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "1",
                "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "VLLM_MODEL": "m",
                **variables})

    return start


@pytest.mark.parametrize("given, cpus", [({"SLURM_CPUS_PER_TASK": "16"}, "16"), ({}, "none")])
def test_several_nodes_join_at_the_heads_address_with_all_cpus_of_a_task(
        tmp_path, submit, given, cpus):
    done = submit("train.seed=3", **given)
    assert done.returncode == 0, done.stderr
    assert "model.name=m ray.address=10.1.2.3:6379" in done.stdout
    assert done.stdout.rstrip().endswith("train.seed=3")
    steps = (tmp_path / "srun.log").read_text().split("srun cpus ")[1:]
    assert len(steps) == 3 and all(step.startswith(f"{cpus} ") for step in steps)
    assert any("start --head --block --node-ip-address=10.1.2.3" in step for step in steps)
    join = tmp_path / "join.sh"  # which others are not to read
    assert "RAY_AUTH_TOKEN=a-token" in join.read_text() and join.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("given, keys", [
    ({}, []), ({"VLLM_MEM_UTIL": "0.8", "VLLM_MAX_LEN": "512", "VLLM_TIMEOUT": "70",
                "MAXENT": "1"}, [
        "inference_model.gpu_memory_utilization=0.8", "inference_model.max_model_len=512",
        "ray.start_timeout=70", "preset=maxent_listwise"])])
def test_variables_are_keys_of_the_engines_where_they_are_set(submit, given, keys):
    done = submit("train.seed=3", VLLM_TP_SIZE="2", **given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("ray.address=10.1.2.3:6379 ")[1].split() == [
        "inference_model.tensor_parallel_size=2", *keys, "train.seed=3"]


@pytest.mark.parametrize("given, train, generate", [
    ((), 8, 6), (("train_model.num_devices=2",), 2, 6),
    (("inference_model.num_devices=3",), 8, 3),
    (("train_model.devices=[0,1]", "inference_model.num_devices=3"), None, 3),
    (("train_model.compile=true", "inference_model.num_devices=3"), 8, 3),
    (("inference_model.temperature=0.7", "train_model.num_devices=4"), 4, 6),
    (("train.kl_to_ref_coeff=0.1", "ref_model.num_devices=2"), 8, 6),
    (("train.kl_to_ref_coeff=0.1", "ref_model.num_devices=3"), 8, 3)])
def test_all_gpus_of_the_first_node_train_and_those_of_the_others_generate(
        submit, given, train, generate):
    """Of eight two are left over, where an engine takes three."""
    done = submit("--config-name", "grpo_async_gsm8k", *given, SLURM_GPUS_ON_NODE="8",
                  VLLM_TP_SIZE="3")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("trainer ")[1].split()
    config = composed_like(words[1:], script=words[0])
    assert config.train_model.num_devices == train
    assert config.inference_model.num_devices == generate


@pytest.mark.parametrize("size, more, generate", [
    (4, (), 8), (3, (), 6), (5, (), 5), (3, ("inference_model.num_devices=3",), 3)])
def test_the_size_of_an_engine_may_be_an_argument_which_wins(submit, size, more, generate):
    done = submit("--config-name", "grpo_async_gsm8k", *more,
                  f"inference_model.tensor_parallel_size={size}", SLURM_GPUS_ON_NODE="8",
                  VLLM_TP_SIZE="2")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("trainer ")[1].split()
    inference = composed_like(words[1:], script=words[0]).inference_model
    assert (inference.tensor_parallel_size, inference.num_devices) == (size, generate)


def test_a_size_that_is_no_number_is_left_to_the_script_that_reads_it(submit):
    done = submit("inference_model.tensor_parallel_size=two", SLURM_GPUS_ON_NODE="8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("inference_model.tensor_parallel_size=two")


def test_an_engine_is_on_one_node(submit):
    """Sixteen GPUs on the nodes that generate have room for five engines of three, but two a node
    are left over."""
    done = submit("--config-name", "grpo_async_gsm8k", SLURM_GPUS_ON_NODE="8", VLLM_TP_SIZE="3",
                  SLURM_NNODES="3")
    assert done.returncode == 0, done.stderr
    assert "inference_model.num_devices=12" in done.stdout


@pytest.mark.parametrize("name, value, said", [
    ("MAXENT", "true", "must be 0 or 1"), ("VLLM_TP_SIZE", "0", "must be a whole number above 0"),
    ("VLLM_TP_SIZE", "two", "must be a whole number above 0"),
    ("VLLM_MAX_LEN", "2k", "must be a whole number above 0"),
    ("VLLM_TIMEOUT", "-1", "must be a whole number above 0")])
def test_several_nodes_refuse_what_one_does(submit, name, value, said):
    done = submit(**{name: value})
    assert done.returncode == 2 and f"{name}={value} {said}" in done.stderr


def shown(name: str) -> list[str]:
    """The commands in a script's header."""
    header = LOCAL.with_name(name).read_text().replace("\\\n#", "")
    return re.findall(rf"^#     (.*examples/slurm/{name} .*)$", header, flags=re.MULTILINE)


def arguments_of(command: str) -> list[str]:
    return shlex.split(command.partition(".sh ")[2] or command.partition(".sbatch ")[2])


def test_every_command_of_a_header_is_one_of_docs_commands_which_are_run():
    page = " ".join((REPO / "docs" / "commands.md").read_text().split())
    commands = [" ".join(line.split()) for name in ("local.sh", "train.sbatch")
                for line in shown(name)]
    assert len(commands) == 5 and [line for line in commands if f"`{line}`" not in page] == []


@pytest.mark.parametrize("command", [*shown("local.sh"), *shown("train.sbatch")[:2]])
def test_the_commands_for_one_node_are_configurations_of_grpo(command, run, gsm8k_rows):
    variables = Line.of(command).variables
    done, _, trainer = run(*arguments_of(command), f"env.data_path={gsm8k_rows}",
                           **(variables | {"VLLM_MODEL": "m"}))
    assert done.returncode == 0, done.stderr
    given = trainer[:trainer.index(" GPU ")].split()
    config = composed_like(given[2:], script=given[1])
    assert (config.model.name, config.inference_model.engine) == ("m", "server")
    assert config.train.is_maxent == ("MAXENT" in variables)
    assert build_task(config).name == "gsm8k" and config.max_tokens > 4


def test_the_command_for_several_nodes_is_a_configuration_of_grpo_async(submit, gsm8k_rows):
    [command] = shown("train.sbatch")[2:]
    done = submit(*arguments_of(command), f"env.data_path={gsm8k_rows}")
    assert done.returncode == 0, done.stderr
    given = done.stdout.split("trainer ")[1].split()
    config = composed_like(given[1:], script=given[0])
    assert (config.model.name, config.ray.address) == ("m", "10.1.2.3:6379")
    assert build_task(config).name == "gsm8k" and config.max_tokens > 4
