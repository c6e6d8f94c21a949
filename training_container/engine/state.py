"""What a checkpoint holds, and how a training loop talks to whatever keeps checkpoints.

All randomness of training is a pure function of (seed, step, prompt, sample, rank): sampling seeds,
data order and dropout are derived anew in each step. So a checkpoint taken between two steps needs
no generator states, and resuming on another number of ranks stays defined.

The loops know nothing of S3: they call a `Checkpointer` after each step and obey its decision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Protocol

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from training_container.engine.errors import DataChangedError

__all__ = [
    "Best",
    "Checkpointer",
    "Decision",
    "PolicyWeights",
    "Progress",
    "TrainState",
    "Trainable",
]


class Trainable(Protocol):
    """The part of a policy that a checkpoint sees."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def optimizer(self) -> Optimizer: ...


@dataclass(frozen=True, slots=True)
class Best:
    """The best value so far of the metric that `checkpoint.keep_best` names, and its step."""

    metric: str
    value: float
    step: int


@dataclass(slots=True)
class Progress:
    """Everything of a stage that is not a tensor. JSON, because a checkpoint outlives code."""

    data_fingerprint: str
    config_fingerprint: str
    step: int = 0
    """Finished steps."""
    position: int = 0
    """Rows drawn since the start, over all epochs; the epoch is `position // rows`."""
    kl_control: dict[str, float] = field(default_factory=dict)
    best: Best | None = None
    validation: dict[str, float] = field(default_factory=dict)
    """Newest validation metrics, `validation/...`."""
    counters: dict[str, int] = field(default_factory=dict)
    """Running totals such as samples and tokens."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def restore(self, text: str) -> None:
        """Take over what `to_json` wrote.

        Raises:
            DataChangedError: when data or settings differ from those of the checkpoint.
        """
        document = json.loads(text)
        for name, what in (("data_fingerprint", "dataset"), ("config_fingerprint", "stage")):
            if document[name] != getattr(self, name):
                raise DataChangedError(
                    f"the {what} is not the one this checkpoint was made with "
                    f"({name} {document[name][:12]} then, {getattr(self, name)[:12]} now); "
                    "start a new run to train on it"
                )
        best = document.pop("best")
        for name, value in document.items():
            setattr(self, name, value)
        self.best = None if best is None else Best(**best)

    def consider(self, metric: str, mode: str, metrics: Mapping[str, Any], step: int) -> bool:
        """Record ``metrics[metric]`` of ``step`` when it is the best so far; whether it is."""
        value = metrics.get(metric)
        if not isinstance(value, float | int):
            return False
        better = (
            self.best is None
            or (mode == "max" and value > self.best.value)
            or (mode == "min" and value < self.best.value)
        )
        if better:
            self.best = Best(metric, float(value), step)
        return better


class TrainState:
    """A `torch.distributed.checkpoint` Stateful of one stage: weights, optimizer and progress.

    Frozen weights (the base under a LoRA adapter) are not part of it: they come from the stage's
    model. Take it between steps only.
    """

    def __init__(self, policy: Trainable, progress: Progress) -> None:
        self.policy = policy
        self.progress = progress

    def state_dict(self) -> dict[str, Any]:
        """References to the live (sharded) tensors, and `progress` as one JSON string."""
        module, optimizer = self.policy.module, self.policy.optimizer
        return {
            "policy": get_model_state_dict(module, options=_SAVE),
            "optimizer": get_optimizer_state_dict(module, optimizer, options=_SAVE),
            "progress": self.progress.to_json(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in place, resharding as needed.

        Raises:
            DataChangedError: before anything is changed, when data or settings differ.
        """
        self.progress.restore(state["progress"])
        module, optimizer = self.policy.module, self.policy.optimizer
        set_model_state_dict(module, state["policy"], options=_LOAD)
        set_optimizer_state_dict(module, optimizer, state["optimizer"], options=_LOAD)


class PolicyWeights:
    """Only the weights of a checkpoint: for a stage that *continues* from an earlier one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {"policy": get_model_state_dict(self.module, options=_SAVE)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.module, state["policy"], options=_LOAD)


# `strict=False` excuses absent frozen weights only: torch.distributed.checkpoint itself refuses a
# checkpoint that lacks a key asked for.
_SAVE = StateDictOptions(ignore_frozen_params=True)
_LOAD = StateDictOptions(ignore_frozen_params=True, strict=False)


class Decision(Enum):
    """What the loop does after a step."""

    CONTINUE = "continue"
    STOP = "stop"


class Checkpointer(Protocol):
    """Keeps checkpoints. But for `load_weights`, every method is called by every rank, in the same
    order."""

    def load_weights(self, weights: PolicyWeights) -> bool:
        """Load the named checkpoint of an earlier stage (`weights_from`); False if none is named.

        Called by the leader on the freshly loaded model, before the reference model is made from it
        and the weights are dealt to the other ranks.
        """

    def restore(self, state: TrainState) -> bool:
        """Resume from the newest complete checkpoint; False on a legitimate start from step 0."""

    def after_step(
        self,
        state: TrainState,
        step: int,
        metrics: Mapping[str, Any],
        *,
        last: bool,
        step_seconds: float,
    ) -> Decision:
        """Save if due. ``metrics`` is the step's row; keys `checkpoint/...` are added by the caller
        from `take_metrics`. ``last`` steps are always saved. Every rank gets the same decision.
        """

    def take_metrics(self) -> dict[str, float]:
        """`checkpoint/...` numbers since the last call (leader; empty elsewhere)."""

    def close(self) -> None:
        """Finish uploads under way and release everything."""
