"""The built-in rewards in one line each, for the API's catalogue and the command line."""

from __future__ import annotations

__all__ = ["REWARD_SUMMARIES"]

REWARD_SUMMARIES: dict[str, str] = {
    "think_answer_format": "1 when the answer is a think block and an answer block, else 0.",
    "boxed_math": "1 when the boxed result equals the reference, by symbolic comparison.",
    "open_math": "1 when the final expression anywhere in the answer equals the reference.",
    "exact_match": "1 when the answer equals the reference after the chosen normalisation.",
    "choice": "1 when the chosen option letter is the reference's.",
    "regex": "1 when the answer matches a pattern, or its captured part equals the reference.",
    "json_schema": "1 when the answer is JSON that a schema accepts.",
    "numeric_tolerance": "1 when the last number is within a tolerance of the reference.",
    "length": "Falls with the distance of the answer's length from a target.",
    "soft_overlong": "0 up to a length, then falls to -1 at the limit, and no lower (DAPO).",
    "cosine_length": "Correctness shaped by length along a cosine.",
    "repetition": "A penalty for repeated n-grams; characters where words are not spaced.",
    "grid_navigation": "How far a list of moves leads from the start to the goal of a grid.",
    "score_side": "Agreement of a judge's side or score with the reference.",
}
"""A test holds the keys against `built_in_rewards.BUILT_IN_PARAMETERS`."""
