"""The mathematics of a GRPO step: pure torch functions, no ray, no vllm, no distributed state.

Shape suffixes: B sequences, N groups (prompts), G sequences per group, T completion tokens,
K reward sources. B = N * G, and the rows of one group are adjacent.

Once per step, on the rewards of all ranks (the marked lines only when configured):

    rewards_B = fuse_rewards(scores_B_K, weights_K, mode=fusion, group_size=G)
    rewards_B = rewards_B + overlong_penalty(lengths_B, max_length=L, buffer=buffer)    # overlong
    keep_N = groups_with_signal(rewards_B, G, low=low, high=high)                 # dynamic sampling
    rewards_B = subtract_kl(rewards_B, kl_B_T, mask_B_T, controller.coefficient)      # KL in reward
    adv_B = advantages(name, rewards_B, G, scale=scale)
    mask_B_T = mask_truncated(mask_B_T, finished_B)                             # truncation masking

For each micro-batch of a mini-batch, with totals counted over the mini-batch on all ranks:

    loss_B_T, stats = policy_loss(name, logprobs_B_T, old_logprobs_B_T, adv_B, mask_B_T, **clips)
    kl_B_T = kl_per_token(estimator, logprobs_B_T, ref_logprobs_B_T, mask_B_T)
    loss_B_T = loss_B_T + controller.coefficient * kl_B_T                               # KL in loss
    loss = aggregate(
        loss_B_T, mask_B_T, mode, total_tokens=tokens, total_sequences=sequences, max_length=L
    )
    loss = loss + entropy_bonus(entropy_B_T, mask_B_T, coefficient=c, total_tokens=tokens)
    loss.backward()  # gradients add up over micro-batches; sum, do not average, over ranks

The names are those of the run file.
"""

from training_container.engine.advantages import (
    ADVANTAGE_FUSIONS,
    ADVANTAGE_SCALES,
    ADVANTAGES,
    FUSIONS,
    SCALES,
    advantages,
    fuse_rewards,
    groups_with_signal,
    scores_tensor,
    zero_variance_groups,
)
from training_container.engine.kl import (
    KL_CONTROLS,
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    kl_controller,
    kl_per_token,
    subtract_kl,
)
from training_container.engine.losses import (
    AGGREGATIONS,
    LOSS_SETTINGS,
    LOSSES,
    aggregate,
    entropy_bonus,
    policy_loss,
)
from training_container.engine.shaping import mask_truncated, overlong_penalty

__all__ = [
    "ADVANTAGES",
    "ADVANTAGE_FUSIONS",
    "ADVANTAGE_SCALES",
    "AGGREGATIONS",
    "FUSIONS",
    "KL_CONTROLS",
    "KL_ESTIMATORS",
    "LOSSES",
    "LOSS_SETTINGS",
    "SCALES",
    "AdaptiveKLController",
    "FixedKLController",
    "advantages",
    "aggregate",
    "entropy_bonus",
    "fuse_rewards",
    "groups_with_signal",
    "kl_controller",
    "kl_per_token",
    "mask_truncated",
    "overlong_penalty",
    "policy_loss",
    "scores_tensor",
    "subtract_kl",
    "zero_variance_groups",
]
