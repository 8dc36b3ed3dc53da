"""On two GPUs with NCCL: what test/training/test_parallel.py asks of two CPU ranks."""

from __future__ import annotations

import pytest
import torch

from ..training import test_parallel as on_cpu
from ..training.test_parallel import (  # noqa: F401
    cases,
    test_a_checkpoint_goes_on_at_another_number_of_ranks,
    test_a_tied_embedding_stays_one_parameter,
    test_accumulation_adds_gradients_up_over_ranks_once_a_step,
    test_each_rank_holds_its_slices_of_parameters_and_moments,
    test_engines_are_given_the_names_order_and_dtypes_of_one_process,
    test_gradients_are_those_of_one_process,
    test_half_precision_agrees_within_its_rounding,
    test_metrics_are_those_of_all_rows_and_the_same_on_every_rank,
    test_rank_0s_rollout_is_shared_and_the_rows_of_all_are_joined,
    test_ranks_make_the_same_number_of_passes,
    test_scores_of_divided_rows_are_those_of_one_process,
    test_updated_weights_are_those_of_one_process,
    test_what_cannot_work_is_refused_on_every_rank,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    if torch.cuda.device_count() < on_cpu.RANKS:
        pytest.skip(f"needs {on_cpu.RANKS} GPUs")
    return on_cpu.run_ranks("cuda", tmp_path_factory.mktemp("ranks"))
