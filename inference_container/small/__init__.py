"""A small server on transformers with vLLM's HTTP interface, for machines without vLLM.

One token at a time, one request's step at a time: for tests, demos and small models on a CPU, and
nothing else. What it cannot do (images, tools, log-probs, structured output) it refuses by name.
"""
