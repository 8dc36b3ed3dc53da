"""Commands."""

import sys
from types import TracebackType

from grpo.system.cores import share_cores


def _print_uncaught(kind: type[BaseException], error: BaseException,
                    trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):  # while a command still imports its parts
        print("\nstopped by SIGINT", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _print_uncaught
share_cores()  # before a command's own module imports PyTorch
