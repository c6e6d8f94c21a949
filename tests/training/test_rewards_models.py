"""Classifiers and judges in the job: real models, made on the spot."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from contracts.rewards import RewardSpec
from tests.training import tiny
from tests.training.reward_models import config, save_classifier, save_judge
from training_container.rewards.interface import (
    Failure,
    FailureKind,
    RewardConfigError,
    RewardError,
    RewardRequest,
    RewardSource,
    Sample,
    Scores,
)
from training_container.rewards.judge import seed_of
from training_container.rewards.judge_local import LocalAsker
from training_container.rewards.model_source import ModelSource
from training_container.rewards.plane import RewardPlane
from training_container.rewards.sources import SourceContext, build_source

torch.set_num_threads(1)
PROMPT = ({"role": "user", "content": "How to move from (0,0) to (0,1)?"},)
TEXTS = ("RIGHT", "LEFT", "DOWN DOWN DOWN DOWN", "U", "RIGHT RIGHT")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    return save_classifier(folder)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("causal")
    torch.manual_seed(2)
    Qwen2ForCausalLM(config()).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def source(kind: str, files: Path = Path(), **settings: Any) -> RewardSource:
    spec = {"name": "rm", "weight": 1, kind: settings, "timeout_seconds": 60}
    return build_source(RewardSpec.model_validate_json(json.dumps(spec)), SourceContext(files))


def score(source: RewardSource, *texts: str) -> Scores:
    return source.score(RewardRequest(tuple(Sample(text, prompt=PROMPT) for text in texts)))


def plugin(folder: Path, code: str, **parameters: Any) -> RewardSource:
    (folder / "plugin.py").write_text(textwrap.dedent(code))
    spec = {
        "name": "mine",
        "weight": 1,
        "file": "plugin.py",
        "function": "Plugin",
        "parameters": parameters,
    }
    made = build_source(
        RewardSpec.model_validate_json(json.dumps(spec)), SourceContext(folder, workers=1)
    )
    made.prepare()
    return made


def by_hand(folder: Path, text: str) -> float:
    model = Qwen2ForSequenceClassification.from_pretrained(folder)
    said = [*PROMPT, {"role": "assistant", "content": text}]
    ids = tiny.tokenizer().apply_chat_template(said, tokenize=False)
    inputs = tiny.tokenizer()(ids, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits[0, 0].item()


# --- classifiers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "passes"),
    [
        ({"micro_batch_size": 1}, 5),
        ({"micro_batch_size": 2}, 3),
        ({"micro_batch_size": 16}, 1),
        ({"micro_batch_tokens": 8}, 5),
        ({"micro_batch_tokens": 60}, 3),
    ],
)
def test_the_reward_is_the_first_logit_however_the_batch_is_cut(
    classifier: Path, bounds: dict[str, int], passes: int
) -> None:
    """modelscope/ms-swift#3843, #9991: one forward pass over the whole batch ran out of memory."""
    model = source("model", source=str(classifier), device="cpu", **bounds)
    model.prepare()
    assert isinstance(model, ModelSource)
    shapes: list[torch.Size] = []
    model._model.register_forward_pre_hook(
        lambda _, __, given: shapes.append(given["input_ids"].shape), with_kwargs=True
    )
    score(model, *TEXTS)
    assert len(shapes) == passes, shapes
    limit = bounds.get("micro_batch_tokens", 10**6)
    assert all(rows == 1 or rows * width <= limit for rows, width in shapes)
    wanted = [by_hand(classifier, text) for text in TEXTS]
    assert score(model, *TEXTS).values == pytest.approx(wanted, abs=1e-5)
    assert len(set(wanted)) == len(TEXTS)


def test_a_padding_token_that_also_ends_texts_does_not_move_the_score(
    classifier: Path, tmp_path: Path
) -> None:
    """The classifier takes the last token that is no padding: then it would step over the end."""
    Qwen2ForSequenceClassification.from_pretrained(classifier).save_pretrained(tmp_path)
    tokenizer = tiny.tokenizer().from_pretrained(classifier)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<|im_end|>"
    tokenizer.save_pretrained(tmp_path)
    alone = source("model", source=str(tmp_path), micro_batch_size=1, device="cpu")
    together = source("model", source=str(tmp_path), micro_batch_size=16, device="cpu")
    for model in (alone, together):
        model.prepare()
    wanted = score(alone, *TEXTS).values
    assert score(together, *TEXTS).values == pytest.approx(wanted, abs=1e-5)


def test_reward_models_alone_make_a_reward_and_none_is_lost(
    classifier: Path, tmp_path: Path
) -> None:
    """huggingface/trl#3459: only models, no function; #2839: a second one was zipped away."""
    other = tmp_path / "other"
    torch.manual_seed(7)
    Qwen2ForSequenceClassification(config(num_labels=1)).save_pretrained(other)
    tiny.tokenizer().save_pretrained(other)
    entries = [
        {"name": name, "weight": weight, "model": {"source": str(folder), "device": "cpu"}}
        for name, weight, folder in (("one", 0.5, classifier), ("two", 2.0, other))
    ]
    specs = [RewardSpec.model_validate_json(json.dumps(entry)) for entry in entries]
    with RewardPlane(specs) as plane:
        plane.prepare()
        result = plane.score(RewardRequest((Sample("RIGHT", prompt=PROMPT),)))
    first, second = by_hand(classifier, "RIGHT"), by_hand(other, "RIGHT")
    assert result.scores_B_K == [pytest.approx([first, second], abs=1e-5)]
    assert result.fused() == [pytest.approx(0.5 * first + 2 * second, abs=1e-4)]


def test_a_conversation_that_is_too_long_is_unscored_and_never_cut(classifier: Path) -> None:
    model = source("model", source=str(classifier), max_length=64, device="cpu")
    model.prepare()
    scores = score(model, "RIGHT", "LEFT " * 64)
    assert scores.values == [pytest.approx(by_hand(classifier, "RIGHT"), abs=1e-5), None]
    assert scores.failures[1].kind is FailureKind.TOO_LONG


def of_64_positions(kind: str) -> Any:
    """GPT-2's and RoBERTa's positions are a table; the latter's begins after the padding's."""
    size = {"vocab_size": len(tiny.tokenizer()), "pad_token_id": tiny.PAD_ID}
    ends = {"bos_token_id": tiny.EOS_ID, "eos_token_id": tiny.EOS_ID}
    torch.manual_seed(5)
    if kind == "roberta":
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        table = RobertaConfig(max_position_embeddings=65, num_labels=1, **shape, **size, **ends)
        return RobertaForSequenceClassification(table)
    table = GPT2Config(n_positions=64, n_embd=32, n_layer=1, n_head=2, num_labels=1, **size, **ends)
    return GPT2ForSequenceClassification(table) if kind == "gpt2" else GPT2LMHeadModel(table)


def saved(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "odd", "failure"),
    [
        ("gpt2", Sample("x" * 65), "too_long"),
        ("roberta", Sample("x" * 65), "too_long"),
        ("gpt2", Sample("odd \ud83d"), "exception"),
        ("gpt2", Sample(""), "exception"),
        ("gpt2", Sample("odd", prompt=({"role": "user", "content": None},)), "exception"),
    ],
)
def test_one_odd_row_fails_alone(tmp_path: Path, kind: str, odd: Sample, failure: str) -> None:
    """A conversation beyond a table of positions is an error; on a GPU it ends the process."""
    (tmp_path / "rm.jinja").write_text("{% for m in messages %}{{ '' + m['content'] }}{% endfor %}")
    folder = saved(tmp_path / "model", of_64_positions(kind))
    model = source("model", tmp_path, source=folder, template_file="rm.jinja", device="cpu")
    model.prepare()
    scores = model.score(RewardRequest((odd, Sample("RIGHT"), Sample("x" * 64))))
    assert {index: str(one.kind) for index, one in scores.failures.items()} == {0: failure}
    assert None not in scores.values[1:]


def test_logits_that_are_no_numbers_are_failures(tmp_path: Path) -> None:
    """NaN would else pass for "not applicable", which no ceiling counts."""
    broken = of_64_positions("gpt2")
    broken.score.weight.data.fill_(float("nan"))
    entry = {"source": saved(tmp_path, broken), "device": "cpu"}
    spec = RewardSpec.model_validate_json(json.dumps({"name": "rm", "weight": 1, "model": entry}))
    samples = (Sample("RIGHT"), Sample("LEFT"))
    with RewardPlane([spec]) as plane:
        plane.prepare()
        with pytest.raises(RewardConfigError, match=r"all 2 rows.*not_finite"):
            plane.dry_run(samples)
        with pytest.raises(RewardError, match="not_finite"):
            plane.score(RewardRequest(samples))


def test_a_causal_model_is_no_reward_model(causal: Path) -> None:
    """transformers gives it a random head, with a warning nobody reads."""
    with pytest.raises(RewardConfigError, match=r"no trained classifier.*score"):
        source("model", source=str(causal), device="cpu").prepare()


def test_the_template_of_the_run_is_used_and_none_at_all_is_refused(
    classifier: Path, tmp_path: Path
) -> None:
    """modelscope/ms-swift#8466: an unresolved template was found in mid-training."""
    (tmp_path / "rm.jinja").write_text("{{ messages[-1]['content'] }}")
    own = source("model", tmp_path, source=str(classifier), template_file="rm.jinja", device="cpu")
    usual = source("model", source=str(classifier), device="cpu")
    for model in (own, usual):
        model.prepare()
    assert score(own, "RIGHT").values != score(usual, "RIGHT").values
    bare = tmp_path / "bare"
    Qwen2ForSequenceClassification.from_pretrained(classifier).save_pretrained(bare)
    tokenizer = tiny.tokenizer().from_pretrained(classifier)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    with pytest.raises(RewardConfigError, match="give `template_file`"):
        source("model", source=str(bare), device="cpu").prepare()
    with pytest.raises(RewardConfigError, match=r"template_file none\.jinja"):
        source("model", tmp_path, source=str(classifier), template_file="none.jinja").prepare()


def test_an_adapter_is_put_on_the_classifier(classifier: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, TaskType, get_peft_model

    base = Qwen2ForSequenceClassification.from_pretrained(classifier)
    settings = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, init_lora_weights=False)
    torch.manual_seed(3)
    get_peft_model(base, settings).save_pretrained(tmp_path)
    plain = source("model", source=str(classifier), device="cpu")
    adapted = source("model", source=str(classifier), adapter=str(tmp_path), device="cpu")
    for model in (plain, adapted):
        model.prepare()
    assert score(adapted, "RIGHT").values != score(plain, "RIGHT").values


def test_an_adapter_may_bring_the_head_to_a_causal_model(causal: Path, tmp_path: Path) -> None:
    """A reward model trained with LoRA; the base model's random head is replaced by the saved one
    and takes nothing from the job's random numbers."""
    from peft import LoraConfig, TaskType, get_peft_model

    base = Qwen2ForSequenceClassification.from_pretrained(causal, num_labels=1)
    settings = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, init_lora_weights=False)
    get_peft_model(base, settings).save_pretrained(tmp_path)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = source("model", source=str(causal), adapter=str(tmp_path), device="cpu")
        model.prepare()
        found.append(score(model, "RIGHT").values)
        drawn = torch.rand(4)
        torch.manual_seed(seed)
        assert torch.equal(torch.rand(4), drawn)
    assert found[0] == found[1]


def test_loading_a_model_leaves_the_job_s_random_numbers_alone(
    classifier: Path, causal: Path
) -> None:
    torch.manual_seed(7)
    wanted = torch.rand(4)
    torch.manual_seed(7)
    model = source("model", source=str(classifier), device="cpu")
    judge = source("judge", source=str(causal), max_tokens=4, temperature=1.0)
    for one in (model, judge):
        one.prepare()
        score(one, "RIGHT", "LEFT")
    assert torch.equal(torch.rand(4), wanted)


@pytest.mark.parametrize("device", ["cuda:15", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(RewardConfigError, match=f"{device}; this host has"):
        source("model", source="hub/model", device=device)


def test_a_source_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    for kind in ("model", "judge"):
        with pytest.raises(RewardConfigError, match="rm"):
            source(kind, source=str(tmp_path / "nothing")).prepare()


# --- judges --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judge_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judge(tmp_path_factory.mktemp("judge"))


def test_a_judge_in_the_job_scores_by_its_words(judge_model: Path) -> None:
    judge = source(
        "judge",
        source=str(judge_model),
        query_template="{{ completion }}",
        temperature=0,
        max_tokens=16,
        choices=2,
    )
    judge.prepare()
    scores = score(judge, "RIGHT", "LEFT", "RIGHT", "DOWN")
    assert scores.values == pytest.approx([0.9, 0.1, 0.9, 0.1])
    assert scores.metrics["asked"] == 3
    assert scores.metrics["judge_tokens"] > 0


def test_a_classifier_is_no_judge(classifier: Path) -> None:
    with pytest.raises(RewardConfigError, match=r"cannot write.*lm_head"):
        source("judge", source=str(classifier)).prepare()


def test_judgements_depend_on_what_is_asked_and_not_on_its_company(causal: Path) -> None:
    spec = RewardSpec.model_validate_json(
        json.dumps(
            {
                "name": "j",
                "weight": 1,
                "judge": {"source": str(causal), "max_tokens": 8, "temperature": 1.0, "choices": 3},
            }
        )
    )
    assert spec.judge is not None
    asker = LocalAsker("j", spec.judge, str(causal))
    asker.prepare()
    one = ({"role": "user", "content": "RIGHT"},)
    other = ({"role": "user", "content": "LEFT LEFT LEFT"},)
    alone = asker.ask([one], 60)[0]
    assert asker.ask([other, one], 60)[1] == alone
    assert isinstance(alone, list)
    assert len(set(alone)) == 3
    assert seed_of(one) != seed_of(other)


def test_one_odd_question_fails_alone(tmp_path: Path) -> None:
    entry = {"source": saved(tmp_path, of_64_positions("judge")), "max_tokens": 8}
    spec = RewardSpec.model_validate_json(json.dumps({"name": "j", "weight": 1, "judge": entry}))
    assert spec.judge is not None
    asker = LocalAsker("j", spec.judge, str(tmp_path))
    asker.prepare()
    asked = [({"role": "user", "content": text},) for text in ("x" * 57, "\ud83d", "RIGHT")]
    long, odd, usual = asker.ask(asked, 60)
    assert isinstance(long, Failure)
    assert long.kind is FailureKind.TOO_LONG
    assert isinstance(odd, Failure)
    assert odd.kind is FailureKind.EXCEPTION
    assert isinstance(usual, list)


def test_a_judgement_that_is_cut_off_is_none(judge_model: Path) -> None:
    """It begins with `Reward: 0.` on its way to 0.9."""
    settings = {"query_template": "{{ completion }}", "temperature": 0}
    for most in range(1, 17):
        judge = source("judge", source=str(judge_model), max_tokens=most, **settings)
        judge.prepare()
        scores = score(judge, "RIGHT")
        if scores.values != [None]:
            assert scores.values == [0.9]
            break
        assert "cut off at max_tokens: 'R" in scores.failures[0].detail
    assert most > 4


def test_a_judge_past_its_deadline_stops_between_batches(causal: Path) -> None:
    judge = source("judge", source=str(causal), max_tokens=4)
    judge.prepare()
    late = judge._asker.ask([({"role": "user", "content": "x"},)] * 3, -1.0)  # type: ignore[attr-defined]
    assert [failure.kind for failure in late] == [FailureKind.TIMEOUT] * 3


# --- plugins -------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_plugin_is_given_the_model_and_scores_rows(classifier: Path, tmp_path: Path) -> None:
    """The second seed's plugin interface, over a classifier, in a process without credentials."""
    code = """
        import torch
        class Plugin:
            def __init__(self, model, template, scale):
                self.model, self.template, self.scale = model, template, scale
            def __call__(self, inputs, **kwargs):
                assert inputs[0]["messages"][0]["role"] == "user"
                batch = self.template.data_collator([self.template.encode(r) for r in inputs])
                with torch.inference_mode():
                    return self.scale * self.model(**batch).logits[:, 0]
    """
    made = plugin(tmp_path, code, model={"weights": str(classifier)}, scale=2.0)
    scores = score(made, *TEXTS)
    made.close()
    wanted = [2 * by_hand(classifier, text) for text in TEXTS]
    assert scores.values == pytest.approx(wanted, abs=1e-4), scores.failures


@pytest.mark.long
def test_a_plugin_over_a_causal_model_generates(judge_model: Path, tmp_path: Path) -> None:
    code = """
        import re, torch
        class Plugin:
            def __init__(self, model, template):
                self.model, self.tokenizer = model, template.tokenizer
            def __call__(self, inputs):
                return [self.one(row["messages"][-1]["content"]) for row in inputs]
            def one(self, text):
                asked = self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
                ids = self.tokenizer(asked, add_special_tokens=False, return_tensors="pt")
                out = self.model.generate(**ids, do_sample=False, max_new_tokens=16)
                found = re.search(r"Reward: ([.0-9]+)", self.tokenizer.decode(out[0]))
                return float(found[1]) if found else None
    """
    made = plugin(tmp_path, code, model={"weights": str(judge_model)})
    scores = score(made, "RIGHT", "UP")
    made.close()
    assert scores.values == pytest.approx([0.9, 0.1]), scores.failures
