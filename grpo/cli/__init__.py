"""Commands."""

from grpo.cores import share_cores

share_cores()  # before a command's own module imports PyTorch
