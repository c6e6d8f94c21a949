"""What both sides of GRPO Hub speak: run files, states, S3 layout, checkpoint protocol, events.

Pure: pydantic and the standard library only. The same code judges a run file in the CLI, the API
and the container, and judges a checkpoint in the trainer, the Lambdas and the exporter.
"""
