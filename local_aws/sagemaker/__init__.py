"""SageMaker on one machine: training jobs and endpoints as process trees behind the real API shapes
and events.
"""
