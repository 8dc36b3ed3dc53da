"""Commands."""

from grpo.system.cores import share_cores

share_cores()  # before a command's own module imports PyTorch
