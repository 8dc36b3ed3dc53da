"""The one batch layout: key names, dtypes, shapes.

A rollout is a dense :class:`~tensordict.TensorDict` with ``batch_size [B]``. ``P`` is the padded
prompt length, ``R`` the padded response length, ``T = P + R``:

==============================================  ========  ==========  ==============================
key                                             dtype     shape       meaning
==============================================  ========  ==========  ==============================
``("tokens", "prompt")``                        int64     ``[B, P]``  prompt, right-padded
``("masks", "prompt_attention_mask")``          bool      ``[B, P]``  True on prompt tokens
``("tokens", "response")``                      int64     ``[B, R]``  sampled tokens, right-padded
``("tokens", "full")``                          int64     ``[B, T]``  prompt, response, padding
``("masks", "all_attention_mask")``             bool      ``[B, T]``  True on prompt and response
``("masks", "all_assistant_mask")``             bool      ``[B, T]``  True on sampled tokens
``("masks", "high_entropy")``                   bool      ``[B, T]``  tokens the objective is for
``("log_probs", "full")``                       float32   ``[B, T]``  of each sampled token, else 0
``("log_probs", "proximal")``                   float32   ``[B, T]``  the trainer's, before updates
``("next", "reward")``                          float32   ``[B, 1]``
``("next", "truncated")``                       bool      ``[B, 1]``  cut by the length limit
``("next", "reward_error")``                    bool      ``[B, 1]``  no reward: the row is masked
``("next", "reward_fault")``                    int64     ``[B, 1]``  why not (``FAULT_*``)
``("next", "reward_parts", NAME)``              float32   ``[B, 1]``  of several; NaN: it gave none
``("next", "success")``                         bool      ``[B, 1]``  the verifier's yes or no
``("next", "shaped_reward")``                   float32   ``[B, 1]``  reward behind the advantage
``("next", "ref_log_probs", "full")``           float32   ``[B, T]``  the reference policy's
``("next", "teacher_log_probs", "full")``       float32   ``[B, T]``  a teacher's
``("distill", "token_ids")``                    int64     ``[B,T,K]`` a teacher's most likely tokens
``("distill", "log_probs")``                    float32   ``[B,T,K]`` and their log-probs
``("policy_versions", "full")``                 int64     ``[B, T]``  weights that sampled it, or -1
``"policy_version"``                            int64     ``[B]``     the oldest of them in a row
``"group_id"``                                  int64     ``[B]``
``"advantage"``                                 float32   ``[B, 1]``  or ``[B, T]`` for token-level
``"listwise_weight"``                           float32   ``[B, 1]``  share of the group (MaxEnt)
``"row_mask"``                                  bool      ``[B, 1]``  enters the loss; absent = all
==============================================  ========  ==========  ==============================

The names are TorchRL's, so replay buffers, collectors and losses of either side read the other's
data. :mod:`grpo.data.torchrl` converts TorchRL's ragged chat batches to and from this layout.
"""
from __future__ import annotations

PROMPT_TOKENS = ("tokens", "prompt")
RESPONSE_TOKENS = ("tokens", "response")
TOKENS = ("tokens", "full")
PROMPT_MASK = ("masks", "prompt_attention_mask")
ATTENTION_MASK = ("masks", "all_attention_mask")
ASSISTANT_MASK = ("masks", "all_assistant_mask")
LOG_PROBS = ("log_probs", "full")
PROXIMAL_LOG_PROBS = ("log_probs", "proximal")
HIGH_ENTROPY_MASK = ("masks", "high_entropy")
REF_LOG_PROBS = ("next", "ref_log_probs", "full")
TEACHER_LOG_PROBS = ("next", "teacher_log_probs", "full")
DISTILL_IDS = ("distill", "token_ids")
DISTILL_LOG_PROBS = ("distill", "log_probs")
REWARD = ("next", "reward")
SHAPED_REWARD = ("next", "shaped_reward")
REWARD_ERROR = ("next", "reward_error")
REWARD_FAULT = ("next", "reward_fault")
REWARD_PARTS = ("next", "reward_parts")
SUCCESS = ("next", "success")
TRUNCATED = ("next", "truncated")
GROUP_ID = "group_id"
POLICY_VERSION = "policy_version"
POLICY_VERSIONS = ("policy_versions", "full")
ADVANTAGE = "advantage"
LISTWISE_WEIGHT = "listwise_weight"
ROW_MASK = "row_mask"
FINISH_REASON = "finish_reason"

#: Codes of ``finish_reason``: the model ended its turn, or the length limit did.
FINISH_STOP, FINISH_LENGTH = 0, 1

#: Codes of ``reward_fault``: there is a reward; the function returned None to leave the sample out,
#: raised, took too long, returned what is no reward, or ended its process.
(FAULT_NONE, FAULT_SKIPPED, FAULT_FAILED, FAULT_LATE, FAULT_INVALID,
 FAULT_ENDED) = range(6)

#: Entries whose second dimension runs over the ``T`` tokens of a row.
TOKEN_KEYS = (TOKENS, ATTENTION_MASK, ASSISTANT_MASK, HIGH_ENTROPY_MASK, LOG_PROBS,
              PROXIMAL_LOG_PROBS, REF_LOG_PROBS, TEACHER_LOG_PROBS, DISTILL_IDS, DISTILL_LOG_PROBS,
              POLICY_VERSIONS)

#: Version of a token that no policy sampled.
NO_VERSION = -1
