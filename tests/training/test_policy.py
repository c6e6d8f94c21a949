"""Forward passes, gradients and batches of the policy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM

from contracts.failures import ExitCode
from contracts.stages import GrpoStage, LoraSpec
from tests.training import tiny
from training_container.engine import scorer as scorer_module
from training_container.engine.batches import MicroBatch, TokenSequence, collate, cut, deal
from training_container.engine.distributed import single_process
from training_container.engine.errors import NonFiniteError
from training_container.engine.lora import adapter_off
from training_container.engine.policy import Policy
from training_container.engine.reference import AdapterReference
from training_container.engine.state import Progress, TrainState
from training_container.failure import StageError

CPU = torch.device("cpu")


def stage_of(**changes: object) -> GrpoStage:
    return GrpoStage.model_validate({**tiny.grpo_stage(), **changes}, strict=False)


def policy_of(*, tied: bool = True, family: str = "qwen2", **changes: object) -> Policy:
    torch.set_num_threads(1)
    model = tiny.model(hidden=32, tied=tied, family=family)
    return Policy(model, stage_of(**changes), single_process())


def sequences_of(*lengths: tuple[int, int], seed: int = 0) -> list[TokenSequence]:
    """Random prompts and responses of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    built = []
    for prompt, response in lengths:
        ids = torch.randint(3, 300, (prompt + response,), generator=generator).tolist()
        built.append(TokenSequence.of(ids[:prompt], ids[prompt:]))
    return built


LENGTHS = [(5, 7), (3, 1), (9, 4), (4, 12), (2, 5)]


def test_log_probs_are_those_of_the_plain_model() -> None:
    policy = policy_of(family="qwen3")
    sequences = sequences_of(*LENGTHS)
    found = policy.log_probs(sequences, temperature=0.7)
    for index, sequence in enumerate(sequences):
        logits_L_V = policy.model(input_ids=sequence.ids[None]).logits[0] / 0.7
        expected_L = logits_L_V.log_softmax(-1)[:-1].gather(1, sequence.ids[1:, None]).squeeze(1)
        torch.testing.assert_close(found[index], expected_L[sequence.target[1:]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunks_of_logits_change_nothing(
    monkeypatch: pytest.MonkeyPatch, entropy_gradient: bool
) -> None:
    """Chunked and recomputed logits give the values and gradients of whole ones."""

    def loss(micro: MicroBatch, logp_B_T: Tensor, entropy_B_T: Tensor) -> Tensor:
        return (logp_B_T + 0.3 * entropy_B_T).masked_select(micro.mask_B_T).sum()

    gradients = []
    for limit in (scorer_module._CHUNK_LOGITS, 3 * 329):
        monkeypatch.setattr(scorer_module, "_CHUNK_LOGITS", limit)
        policy = policy_of()
        policy.backward(sequences_of(*LENGTHS), loss, entropy_gradient=entropy_gradient)
        gradients.append([p.grad.clone() for p in policy.trainable if p.grad is not None])
    for whole, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_do_not_depend_on_the_cut(checkpointing: bool) -> None:
    """verl-project/verl#906, #5625, #7321: micro-batches and padding change nothing."""
    sequences = sequences_of(*LENGTHS)
    total = sum(int(sequence.target.sum()) for sequence in sequences)

    def loss(micro: MicroBatch, logp_B_T: Tensor, entropy_B_T: Tensor) -> Tensor:
        return -(logp_B_T * micro.mask_B_T).sum() / total

    gradients = []
    for tokens in (136, 10_000):
        policy = policy_of(micro_batch_tokens=tokens, gradient_checkpointing=checkpointing)
        value = policy.backward(sequences, loss)
        gradients.append((value, [p.grad.clone() for p in policy.trainable if p.grad is not None]))
    assert gradients[0][0] == pytest.approx(gradients[1][0], abs=1e-6)
    for small, large in zip(gradients[0][1], gradients[1][1], strict=True):
        torch.testing.assert_close(small, large, atol=1e-6, rtol=1e-5)


def test_silent_sequences_are_measured_without_a_backward_pass() -> None:
    """An advantage of 0 has no gradient: leaving its backward pass out changes nothing else."""
    weights_B = torch.tensor([1.0, 0.0, -0.5, 0.0, 0.0])
    found = []
    for silent in ((), (weights_B == 0).tolist()):
        policy = policy_of(micro_batch_tokens=136)
        entropies: dict[int, float] = {}
        graphs: dict[int, bool] = {}

        def loss(
            micro: MicroBatch,
            logp_B_T: Tensor,
            entropy_B_T: Tensor,
            entropies: dict[int, float] = entropies,
            graphs: dict[int, bool] = graphs,
        ) -> Tensor:
            rows = list(micro.indices)
            entropies |= dict(zip(rows, entropy_B_T.sum(dim=1).tolist(), strict=True))
            graphs |= dict.fromkeys(rows, logp_B_T.requires_grad)
            return -(logp_B_T * micro.mask_B_T * weights_B[rows, None]).sum() / 10

        value = policy.backward(sequences_of(*LENGTHS), loss, silent=silent)
        found.append((value, entropies, [p.grad for p in policy.trainable]))
    assert graphs == {0: True, 1: False, 2: True, 3: False, 4: False}
    (whole, entropy, gradients), (less, entropy_less, gradients_less) = found
    assert less == pytest.approx(whole, abs=1e-6)
    assert entropy_less == pytest.approx(entropy, abs=1e-5)
    for expected, gradient in zip(gradients, gradients_less, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


def test_a_batch_that_is_silent_throughout_still_has_a_gradient() -> None:
    """Without one the optimizer would leave momentum and weight decay out of this update."""
    policy = policy_of()
    policy.backward(
        sequences_of(*LENGTHS),
        lambda _micro, logp_B_T, _entropy: logp_B_T.sum() * 0,
        silent=[True] * len(LENGTHS),
    )
    assert all(p.grad is not None and not p.grad.any() for p in policy.trainable)


def test_a_loss_that_is_not_finite_ends_the_stage_before_it_spoils_gradients() -> None:
    """modelscope/ms-swift#8123: NaN went into the weights without a word."""
    policy = policy_of()
    nan = float("nan")
    with pytest.raises(NonFiniteError, match="loss is nan"):
        policy.backward(sequences_of((3, 3)), lambda _micro, logp, _entropy: logp.sum() * nan)
    assert all(p.grad is None for p in policy.trainable)


def test_a_gradient_that_is_not_finite_is_not_stepped_on() -> None:
    policy = policy_of()
    before = [p.detach().clone() for p in policy.trainable]
    policy.backward(sequences_of((3, 3)), lambda _micro, logp, _entropy: logp.sum())
    policy.trainable[0].grad[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="gradient norm"):
        policy.update(1e-3, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.trainable, strict=True))


def test_a_save_before_the_first_update_changes_nothing() -> None:
    """torch makes Adam's state by an update of its own when a checkpoint asks for it, and counts
    it: first steps without any signal would not resume exactly."""
    found = []
    for saved in (False, True):
        policy = policy_of()
        if saved:
            TrainState(policy, Progress("data", "config")).state_dict()
        for _ in range(2):
            policy.backward(sequences_of(*LENGTHS), lambda _micro, logp, _entropy: -logp.sum())
            policy.update(1e-3, 1.0)
        found.append(dict(policy.model.named_parameters()))
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
    assert {int(state["step"]) for state in policy.optimizer.state.values()} == {2}


def test_an_adapter_starts_as_the_model_and_is_its_own_reference() -> None:
    sequences = sequences_of(*LENGTHS)
    plain = policy_of().log_probs(sequences)
    policy = policy_of(lora={"rank": 4, "alpha": 8})
    reference = AdapterReference(policy)
    start = policy.log_probs(sequences)
    assert all(torch.equal(plain[index], start[index]) for index in plain)
    for _ in range(3):
        policy.backward(sequences, lambda _micro, logp, _entropy: -logp.sum() / 10)
        policy.update(1e-2, 1.0)
    moved = policy.log_probs(sequences)
    assert any((plain[index] - moved[index]).abs().max() > 1e-3 for index in plain)
    held = reference.log_probs(sequences)
    assert all(torch.equal(plain[index], held[index]) for index in plain)
    again = policy.log_probs(sequences)
    assert all(torch.equal(moved[index], again[index]) for index in moved)
    assert all(p.requires_grad for p in policy.trainable)


def test_merged_weights_compute_what_the_adapter_computes_and_leave_the_base_alone() -> None:
    """huggingface/trl#6688: merging and unmerging in place drifts the base."""
    policy = policy_of(lora={"rank": 4, "alpha": 8})
    sequences = sequences_of(*LENGTHS)
    policy.backward(sequences, lambda _micro, logp, _entropy: -logp.sum() / 10)
    policy.update(1e-2, 1.0)
    base = {n: p.clone() for n, p in policy.model.named_parameters() if not p.requires_grad}
    plain = tiny.model(hidden=32)
    plain.load_state_dict(dict(policy.full_weights()), strict=False)
    merged = Policy(plain, stage_of(), single_process()).log_probs(sequences)
    for index, expected in policy.log_probs(sequences).items():
        torch.testing.assert_close(merged[index], expected, atol=1e-5, rtol=0)
    with adapter_off(policy.model):
        pass
    for name, value in policy.model.named_parameters():
        assert name not in base or torch.equal(base[name], value)


def test_a_frozen_base_is_kept_in_the_type_it_computes_in() -> None:
    """Half the memory on GPUs; what is trained stays float32, or small updates would be lost."""
    policy = policy_of(lora={"rank": 4, "alpha": 8}, precision="bfloat16")
    sequences = sequences_of(*LENGTHS)
    types = {p.requires_grad: p.dtype for p in policy.model.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}
    rotary = [b.dtype for n, b in policy.model.named_buffers() if "inv_freq" in n]
    assert set(rotary) == {torch.float32}
    exact = policy_of().log_probs(sequences)
    for index, found in policy.log_probs(sequences).items():
        torch.testing.assert_close(found, exact[index], atol=0.05, rtol=0)
    policy.backward(sequences, lambda _micro, logp, _entropy: -logp.sum() / 10)
    policy.update(1e-6, 1.0)
    merged = dict(policy.full_weights())
    assert not any("lora" in name for name in merged)


def test_lora_targets_can_be_named_and_excluded() -> None:
    torch.set_num_threads(1)
    policy = policy_of(lora=LoraSpec(rank=2, exclude_modules=".*mlp.*").model_dump())
    names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert names
    assert not any("mlp" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"target_modules": ["q_prj"]}, "not found"),
        ({"target_modules": ["input_layernorm"]}, "not supported"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens is no linear layer"),
        ({"target_modules": ["lm_head"]}, "lm_head shares its weights"),
        ({"exclude_modules": ".*"}, "excluded"),
    ],
    ids=["misspelt", "norm", "embeddings", "tied head", "all excluded"],
)
def test_layers_that_take_no_adapter_are_refused_before_training(
    settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(StageError, match=reason) as caught:
        policy_of(lora={"rank": 2, **settings})
    assert caught.value.code is ExitCode.BAD_INPUT
    assert "lora.target_modules" in str(caught.value)


def test_an_untied_head_takes_an_adapter() -> None:
    policy = policy_of(tied=False, lora={"rank": 2, "target_modules": ["lm_head"]})
    policy.backward(sequences_of(*LENGTHS), lambda _micro, logp, _entropy: -logp.sum() / 10)
    before = policy.model.lm_head.base_layer.weight.clone()
    policy.update(1e-2, 1.0)
    assert not torch.equal(dict(policy.full_weights())["lm_head.weight"], before)


def test_a_model_whose_logits_are_more_than_its_head_is_refused() -> None:
    """Granite divides its logits: trained as they are, it would learn other probabilities."""
    config = GraniteConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, logits_scaling=0.1,
    )  # fmt: skip
    with pytest.raises(StageError, match="GraniteForCausalLM computes logits") as caught:
        Policy(GraniteForCausalLM(config), stage_of(), single_process())
    assert caught.value.code is ExitCode.BAD_INPUT


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    ranks=st.integers(1, 5),
    budget=st.integers(50, 400),
)
@settings(max_examples=60, deadline=None)
def test_dealing_and_cutting_use_every_sequence_once_within_the_budget(
    lengths: list[int], ranks: int, budget: int
) -> None:
    hands = deal(lengths, ranks)
    assert sorted(index for hand in hands for index in hand) == list(range(len(lengths)))
    for hand in hands:
        micros = cut(hand, lengths, budget)
        assert sorted(index for micro in micros for index in micro) == sorted(hand)
        for micro in micros:
            assert len(micro) * max(lengths[index] for index in micro) <= budget
            padded = len(micro) * max(lengths[index] for index in micro)
            real = sum(lengths[index] for index in micro)
            assert padded <= max(real / 0.8, budget / 4 + max(lengths))
    loads = [sum(lengths[index] for index in hand) for hand in hands]
    assert max(loads) - min(loads) <= max(lengths)


def test_a_micro_batch_finds_its_targets_again() -> None:
    sequences = sequences_of((2, 3), (4, 1))
    micro = collate(sequences, [1, 0], CPU)
    values_B_T = micro.spread(micro.targets_N.float())
    assert micro.rows(values_B_T)[0].tolist() == sequences[1].ids[4:].tolist()
    assert micro.rows(values_B_T)[1].tolist() == sequences[0].ids[2:].tolist()
    assert torch.equal(micro.pad(micro.rows(values_B_T)), values_B_T)
    empty = collate(sequences, [], CPU, filler=sequences[0])
    assert len(empty.targets_N) == 0
    assert not empty.mask_B_T.any()
