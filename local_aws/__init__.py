"""The embedded mode: the deployed control plane on one machine, in one process, on one port.

`LocalCloud` (server.py) runs the *synthesised* template. moto serves S3, DynamoDB, Step Functions,
SQS, Logs and the like; Lambda, EventBridge delivery, HTTP API routes and SageMaker are ours,
because production code must meet the real contracts there: the real runtime client, the real
events, a real process tree under `/opt/ml`.
"""
