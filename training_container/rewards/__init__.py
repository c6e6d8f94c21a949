"""The reward plane: every way a completion can be scored, behind one interface.

```
interface.py   Sample, RewardRequest, Scores, SourceResult, PlaneResult, the errors
registry.py    built-in functions by name, their parameters and the catalogue
builtin/       the built-in functions themselves
plane.py       RewardPlane: all sources of a stage at once, combined, measured, held to ceilings
policy.py      a source's raw scores under its `on_error`, and the numbers that are logged
sources.py     one class per kind of source, and how a run file's entry becomes one
sandbox.py     pools of killable worker processes (the trainer's side)
worker_process.py  one of them, as the trainer sees it
worker.py      the worker process itself: supervisor and loop
confine.py     what a worker process takes away from itself
egress.py      where it may connect when its source declares the network
scorer.py      a loaded function, its results normalised
user_file.py   a user's Python file: its signature recognised
judge.py       a generative reward model; judge_http.py and judge_local.py are where it runs,
               judge_parser.py and judge_reader.py read its words, judge_cache.py remembers them
trial.py       sources tried out on sample answers; reward_dry_run.py is the hub's Lambda for
               that, __main__.py the command on a user's machine
model_source.py, model_http.py: a classifier in this process, or served
client.py      a synchronous judge for use inside a reward file
endpoint.py    calls to a service: capped, bounded, retried, given up on
assets.py      weights from S3, keys from Secrets Manager
plugin.py      a model loaded in a worker, for a user's plugin class
wire.py        frames between trainer and worker
```

Several sources become one reward in `engine/advantages.py` (`fuse_rewards`).
"""
