"""The built-in reward functions. Each takes one sample and its checked parameters."""
