"""The one batch layout, and converters between it and TorchRL's."""

from grpo.data.keys import *  # noqa: F403  names of entries and codes, nothing else
from grpo.data.layout import (
    check_right_padded,
    first_scored,
    join_prompt_response,
    lengths,
    pad_rows,
    scatter_tokens,
    staleness,
    stamp_versions,
    token_keys,
)
from grpo.data.splitting import row_units, split_rows, trim

__all__ = [
    "check_right_padded", "first_scored", "join_prompt_response", "lengths", "pad_rows",
    "row_units", "scatter_tokens", "split_rows", "staleness", "stamp_versions", "token_keys",
    "trim"]
