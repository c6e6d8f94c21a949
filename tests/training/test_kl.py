"""KL estimators and controllers."""

from __future__ import annotations

import json
import math

import pytest
import torch

from contracts import stages
from training_container.engine import algorithms
from training_container.engine.kl import AdaptiveKLController, FixedKLController

torch.set_num_threads(1)
NAN = float("nan")


def estimate(name: str, policy: list[float], reference: list[float]) -> list[float]:
    logprobs, ref = (torch.tensor([x], dtype=torch.float64) for x in (policy, reference))
    return algorithms.kl_per_token(name, logprobs, ref, torch.ones_like(ref))[0].tolist()


def test_estimators_by_hand() -> None:
    """Schulman's three, with d = log p_ref - log p."""
    policy, reference = [-1.0, -2.0, -0.5], [-1.1, -1.5, -0.5]
    d = [-0.1, 0.5, 0.0]
    assert estimate("k1", policy, reference) == pytest.approx([-x for x in d])
    assert estimate("k2", policy, reference) == pytest.approx([x * x / 2 for x in d])
    assert estimate("k3", policy, reference) == pytest.approx([math.exp(x) - x - 1 for x in d])


def test_estimators_agree_with_the_exact_divergence() -> None:
    """Over every token of a vocabulary, weighted by the policy: k1 and k3 are unbiased."""
    generator = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, 50, generator=generator, dtype=torch.float64).mul(0.5).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum().item()
    for name in ("k1", "k3"):
        per_token = algorithms.kl_per_token(name, p[None], q[None], torch.ones(1, 50))
        assert (p.exp() * per_token).sum().item() == pytest.approx(exact, rel=1e-12)
    k2 = (p.exp() * algorithms.kl_per_token("k2", p[None], q[None], torch.ones(1, 50))).sum()
    assert k2.item() == pytest.approx(exact, rel=0.2)


def expected_gradient(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient in the logits of the estimate's expectation (sampling held fixed), and of the KL."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(20, generator=generator, dtype=torch.float64, requires_grad=True)
    q = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)
    per_token = algorithms.kl_per_token(name, p[None], q[None], torch.ones(1, 20))
    (got,) = torch.autograd.grad((p.detach().exp() * per_token).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits)
    return got, exact


def test_k2_as_a_loss_has_the_gradient_of_the_divergence_and_k1_has_none() -> None:
    """huggingface/trl#3104: which estimator belongs in the loss."""
    got, exact = expected_gradient("k2")
    torch.testing.assert_close(got, exact)
    got, _ = expected_gradient("k1")
    torch.testing.assert_close(got, torch.zeros_like(got), atol=1e-12, rtol=0)


def test_far_apart_policies_stay_finite_with_clamped_values() -> None:
    """huggingface/trl#3015, huggingface/trl#6637; clamps of verl: log-ratio ±20, k3 at most 10."""
    policy, reference = [-1e4, -0.1, -math.inf], [-0.1, -1e4, -0.1]
    assert estimate("k1", policy, reference) == [-20.0, 20.0, -20.0]
    assert estimate("k2", policy, reference) == [200.0, 200.0, 200.0]
    assert estimate("k3", policy, reference) == pytest.approx([10.0, 10.0, 10.0])


def test_padding_carries_neither_value_nor_gradient() -> None:
    logprobs = torch.tensor([[-1.0, NAN, -math.inf]], requires_grad=True)
    mask = torch.tensor([[1, 0, 0]])
    for name in algorithms.KL_ESTIMATORS:
        kl_B_T = algorithms.kl_per_token(name, logprobs, torch.tensor([[-2.0, NAN, 1e30]]), mask)
        (grad,) = torch.autograd.grad(kl_B_T.sum(), logprobs)
        assert kl_B_T[0, 1:].tolist() == [0.0, 0.0]
        assert grad[0, 1:].tolist() == [0.0, 0.0]
        assert grad[0, 0] != 0


def test_k3_keeps_its_digits_near_zero_in_single_precision() -> None:
    kl_B_T = algorithms.kl_per_token(
        "k3", torch.zeros(1, 1), torch.full((1, 1), 1e-3), torch.ones(1, 1)
    )
    assert kl_B_T.item() == pytest.approx(5.0017e-7, rel=2e-4)


def test_subtract_kl_takes_the_sum_over_the_answer() -> None:
    kl_B_T = torch.tensor([[0.1, 0.2, 9.0], [1.0, 1.0, 1.0], [0.0, 0.0, NAN]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0]])
    got = algorithms.subtract_kl(torch.tensor([1.0, NAN, 0.5]), kl_B_T, mask, 0.5)
    assert got.tolist() == pytest.approx([0.85, NAN, 0.5], nan_ok=True)


def test_adaptive_coefficient_follows_the_published_rule() -> None:
    """beta * (1 + clip(kl / target - 1, ±0.2) * n / horizon), as in verl."""
    controller = AdaptiveKLController(0.01, target=0.1, horizon=1000)
    controller.update(0.11, 100)
    assert controller.coefficient == pytest.approx(0.01 * (1 + 0.1 * 100 / 1000))
    controller = AdaptiveKLController(0.01, target=0.1, horizon=1000)
    controller.update(5.0, 100)
    assert controller.coefficient == pytest.approx(0.01 * 1.02)
    controller.update(0.0, 100)
    assert controller.coefficient == pytest.approx(0.01 * 1.02 * 0.98)


def test_adaptive_state_survives_json_to_the_last_bit() -> None:
    """verl#2653: after a resume the controller goes on where it was."""
    first = AdaptiveKLController(0.01, target=0.1, horizon=777)
    for kl in (0.3, 0.123456789, 0.01):
        first.update(kl, 13)
    second = algorithms.kl_controller("adaptive", 0.01, target=0.1, horizon=777)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for controller in (first, second):
        controller.update(0.2, 13)
    assert first.coefficient == second.coefficient != 0.01


@pytest.mark.parametrize("kl", [NAN, math.inf])
def test_a_broken_measurement_does_not_poison_the_coefficient(kl: float) -> None:
    controller = AdaptiveKLController(0.01, target=0.1, horizon=1000)
    with pytest.raises(ValueError, match="measured KL is"):
        controller.update(kl, 8)
    assert controller.coefficient == 0.01


def test_fixed_coefficient_stays() -> None:
    controller = algorithms.kl_controller("fixed", 0.01, target=0.1, horizon=1000)
    assert isinstance(controller, FixedKLController)
    controller.update(50.0, 100)
    controller.load_state_dict(controller.state_dict())
    assert controller.coefficient == 0.01


def test_unknown_names_list_the_valid_ones() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="unknown KL estimator 'abs'; valid: k1, k2, k3"):
        algorithms.kl_per_token("abs", one, one, one)
    with pytest.raises(ValueError, match="unknown KL control 'off'; valid: fixed, adaptive"):
        algorithms.kl_controller("off", 0.1, target=0.1, horizon=1)


def test_names_are_those_of_the_run_file() -> None:
    fields = stages.KlSpec.model_fields
    assert fields["estimator"].annotation.__args__ == algorithms.KL_ESTIMATORS
    assert fields["control"].annotation.__args__ == algorithms.KL_CONTROLS
