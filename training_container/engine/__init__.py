"""The training engine.

```
loop.py           step, validate, record, checkpoint, until the plan ends
grpo.py           the GRPO step: sample, score, advantages, clipped updates, weights to the rollout
grpo_loss.py      the loss of a mini-batch and the sums behind its metrics
sft.py            the SFT step
algorithms.py     advantages, losses, KL, shaping as pure functions (four files behind it)
experience.py     sampled and scored answers; what ranks exchange
rollout.py        how answers are sampled: protocol, Hugging Face engine
rollout_vllm.py   the same with vLLM
policy.py         the trained model: loading, sharding, passes, optimizer
scorer.py         log-probs without whole vocabulary logits
reference.py      the frozen policy that KL is measured against
lora.py           adapters
batches.py        token sequences dealt to ranks and cut into micro-batches
data.py           rows: reading, checking, order
prompts.py        rows to messages to tokens
conversations.py  SFT examples with the assistant's tokens marked
schedule.py       the end of a stage, the learning rate
seeds.py          every random number as a function of what it is for
state.py          what a checkpoint holds; the Checkpointer protocol
distributed.py    ranks and what they exchange
clock.py          seconds per phase
errors.py         what ends a stage
```

Shape suffixes: B sequences (answers), N groups (prompts) in `algorithms` and chosen positions in
`scorer` and `batches`, G answers per prompt, L tokens, T target tokens, V vocabulary, K reward
sources, P distinct prompts.

Nothing here imports ray, and only `rollout_vllm` imports vllm: the rest runs under plain torchrun.
"""
