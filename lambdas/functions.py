"""Every Lambda function of the control plane as plain data: what it may do, read and be called by.

The CDK app builds functions, roles, rules and routes from this table and holds no second copy of
it; tests hold the handlers and the state machine against it. Nothing here imports AWS or the CDK.

Placeholders in resources and patterns, filled by the CDK app: `{partition}`, `{region}`,
`{account}`, `{table_arn}`, `{bucket_arn}`, `{bucket_name}`, `{data_bucket_arns}` (further buckets
users read from; each with its `/*` variant where the resource ends so; possibly none),
`{state_machine_arn}`, `{execution_arns}`, `{training_role_arn}`, `{inference_role_arn}`,
`{reward_dry_run_arn}`, `{stack_name}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lambdas.permissions import (
    CREATE_JOB,
    DELETE_ALARM,
    DELETE_HOSTING,
    DESCRIBE_HOSTING,
    DESCRIBE_JOB,
    ENDPOINT_LOGS,
    EXECUTIONS,
    INVOKE,
    LIST,
    LIST_DATA,
    LIST_JOBS,
    PUT_ALARM,
    READ_DATA,
    READ_RECIPES,
    READ_RUNS,
    SCALE,
    START,
    STOP_JOB,
    TABLE,
    TOKENS,
    UNSCALE,
    WRITE_RUNS,
    Permission,
    create_hosting,
    pass_role,
)  # fmt: skip

__all__ = [
    "COMMON_ENVIRONMENT",
    "ENVIRONMENT",
    "FUNCTIONS",
    "STATE_MACHINE_TASKS",
    "EventRule",
    "Function",
    "Permission",
    "function",
]


@dataclass(frozen=True, slots=True)
class EventRule:
    """An EventBridge rule with this function as its target (asynchronous, with a DLQ)."""

    name: str
    description: str
    pattern: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Function:
    """One Lambda function; its handler is `lambdas.handlers.<name>.handler` unless it has its own
    code."""

    name: str
    description: str
    timeout: int
    """Seconds."""
    memory: int
    """MB."""
    environment: tuple[str, ...]
    """Names out of ENVIRONMENT, beside COMMON_ENVIRONMENT."""
    permissions: tuple[Permission, ...]
    rules: tuple[EventRule, ...] = ()
    schedule_minutes: int | None = None
    """Invoked by a schedule at this period."""
    routes: tuple[str, ...] = ()
    """HTTP API route keys, IAM auth."""
    state_machine_task: bool = False
    """Invoked by the state machine."""
    code: Literal["lambdas", "rewards"] = "lambdas"
    """What its zip holds: this package, or the trainer's reward plane."""

    @property
    def handler(self) -> str:
        """Where Lambda finds it in the zip."""
        if self.code == "rewards":
            return f"training_container.rewards.{self.name}.handler"
        return f"lambdas.handlers.{self.name}.handler"

    @property
    def construct_id(self) -> str:
        """`prepare_run` -> `PrepareRun`."""
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def substitution(self) -> str:
        """Name of the function's ARN in the state machine's definition."""
        return f"{self.construct_id}FunctionArn"


ENVIRONMENT: Mapping[str, str] = {
    # Every function (COMMON_ENVIRONMENT).
    "POWERTOOLS_SERVICE_NAME": "grpohub",
    "POWERTOOLS_METRICS_NAMESPACE": "GrpoHub",
    "POWERTOOLS_LOG_LEVEL": "INFO",
    # What the functions below name.
    "TABLE_NAME": "The DynamoDB table.",
    "BUCKET_NAME": "The run bucket.",
    "STATE_MACHINE_ARN": "The grpo_run state machine.",
    "TRAINING_IMAGE_URI": "ECR image of the training container.",
    "TRAINING_ROLE_ARN": "Role of training jobs.",
    "INFERENCE_IMAGE_URI": "ECR image of the inference container.",
    "INFERENCE_ROLE_ARN": "Role of endpoints.",
    "REWARD_DRY_RUN_FUNCTION": "Name of the function that runs reward code.",
    "KMS_KEY_ARN": "Key for job volumes and output; empty: AWS-managed.",
    "VPC_SUBNET_IDS": "Comma-separated; empty: jobs and endpoints run outside a VPC.",
    "VPC_SECURITY_GROUP_IDS": "Comma-separated; goes with VPC_SUBNET_IDS.",
    "ENCRYPT_INTER_CONTAINER_TRAFFIC": "`true` or `false`.",
    "STACK_NAME": "Tag value that marks this stack's jobs, models and endpoints.",
}
"""Environment variables: constants for the first three, meaning for the rest. No secret is among
them."""

COMMON_ENVIRONMENT = (
    "POWERTOOLS_SERVICE_NAME",
    "POWERTOOLS_METRICS_NAMESPACE",
    "POWERTOOLS_LOG_LEVEL",
)

_TRAINING_EVENTS = EventRule(
    "TrainingJobStateChange",
    "Training jobs of the hub that change state.",
    {
        "source": ["aws.sagemaker"],
        "detail-type": ["SageMaker Training Job State Change"],
    },
)


def _task(
    name: str,
    description: str,
    *permissions: Permission,
    environment: tuple[str, ...] = (),
    timeout: int = 60,
) -> Function:
    return Function(
        name=name,
        description=description,
        timeout=timeout,
        memory=512,
        environment=("TABLE_NAME", "BUCKET_NAME", *environment),
        permissions=(TABLE, *permissions),
        state_machine_task=True,
    )


_JOB_SETTINGS = (
    "TRAINING_IMAGE_URI", "TRAINING_ROLE_ARN", "KMS_KEY_ARN", "VPC_SUBNET_IDS",
    "VPC_SECURITY_GROUP_IDS", "ENCRYPT_INTER_CONTAINER_TRAFFIC", "STACK_NAME",
)  # fmt: skip
_HOSTING_SETTINGS = (
    "INFERENCE_IMAGE_URI", "INFERENCE_ROLE_ARN", "VPC_SUBNET_IDS", "VPC_SECURITY_GROUP_IDS",
    "STACK_NAME",
)  # fmt: skip

FUNCTIONS: tuple[Function, ...] = (
    Function(
        name="api",
        description="The HTTP API.",
        timeout=29,
        memory=1024,
        environment=(
            "TABLE_NAME", "BUCKET_NAME", "STATE_MACHINE_ARN", "TRAINING_IMAGE_URI",
            "INFERENCE_IMAGE_URI", "REWARD_DRY_RUN_FUNCTION",
        ),
        permissions=(
            TABLE, READ_RUNS, WRITE_RUNS, LIST, START, EXECUTIONS, DESCRIBE_JOB, STOP_JOB,
            DESCRIBE_HOSTING, DELETE_HOSTING, DELETE_ALARM, *UNSCALE, INVOKE, TOKENS,
            ENDPOINT_LOGS,
            Permission(
                ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"),
                ("{bucket_arn}/recipes/*",),
                "Recipes are named by users.",
            ),
            Permission(
                ("logs:FilterLogEvents",),
                (
                    "arn:{partition}:logs:{region}:{account}:log-group:"
                    "/aws/sagemaker/TrainingJobs:*",
                ),
                "Log streams are named by training jobs.",
            ),
            Permission(("lambda:InvokeFunction",), ("{reward_dry_run_arn}",)),
        ),
        routes=("ANY /v1/{proxy+}",),
    ),
    _task(
        "prepare_run",
        "Check the run's inputs and say where the run begins.",
        READ_RUNS, LIST, LIST_DATA, READ_DATA,
    ),
    _task(
        "plan_attempt",
        "Plan the next training job of the run, or give up.",
        READ_RUNS, LIST,
    ),
    _task(
        "submit_attempt",
        "Create or adopt the training job and keep the token.",
        READ_RUNS, WRITE_RUNS, LIST, CREATE_JOB, DESCRIBE_JOB, STOP_JOB, TOKENS,
        pass_role("{training_role_arn}"),
        environment=_JOB_SETTINGS,
    ),
    _task("finish_stage", "Verify a stage's exported model.", READ_RUNS, LIST),
    _task("publish_model", "Publish the last stage's model.", READ_RUNS, LIST),
    _task(
        "create_model",
        "Create or adopt the SageMaker model.",
        READ_RUNS,
        create_hosting("CreateModel"),
        DESCRIBE_HOSTING, pass_role("{inference_role_arn}"),
        environment=_HOSTING_SETTINGS,
    ),
    _task(
        "create_endpoint_config",
        "Create or adopt the endpoint configuration.",
        READ_RUNS,
        create_hosting("CreateEndpointConfig"),
        DESCRIBE_HOSTING, pass_role("{inference_role_arn}"),
        environment=_HOSTING_SETTINGS,
    ),
    _task(
        "create_or_update_endpoint",
        "Create the endpoint, or update it blue/green.",
        READ_RUNS,
        create_hosting("CreateEndpoint", "UpdateEndpoint"),
        DESCRIBE_HOSTING, DELETE_HOSTING, PUT_ALARM,
        environment=_HOSTING_SETTINGS,
    ),
    _task(
        "await_endpoint",
        "Keep the token until the endpoint is in service or has failed.",
        READ_RUNS, DESCRIBE_HOSTING, TOKENS,
    ),
    _task(
        "smoke_test",
        "Ask the endpoint one real question and keep the answer; then set up scaling.",
        READ_RUNS, WRITE_RUNS, LIST, READ_DATA, INVOKE, DESCRIBE_HOSTING, *SCALE,
        create_hosting("CreateInferenceComponent"),
        environment=_HOSTING_SETTINGS,
        timeout=600,
    ),
    _task(
        "finish_run",
        "Mark the run succeeded, and delete what its endpoint replaced.",
        DESCRIBE_HOSTING, DELETE_HOSTING, *UNSCALE,
    ),
    _task(
        "clean_up",
        "Stop the job, delete half-made endpoints, write down the failure.",
        READ_RUNS, DESCRIBE_JOB, STOP_JOB, DESCRIBE_HOSTING, DELETE_HOSTING, DELETE_ALARM,
        *UNSCALE, TOKENS, ENDPOINT_LOGS,
        timeout=120,
    ),
    _task("conclude_failure", "Fail the execution with the run's failure; continue it on redrive."),
    Function(
        name="on_training_event",
        description="A training job changed state: look at it and decide.",
        timeout=60,
        memory=512,
        environment=("TABLE_NAME", "BUCKET_NAME"),
        permissions=(TABLE, READ_RUNS, LIST, DESCRIBE_JOB, STOP_JOB, TOKENS),
        rules=(_TRAINING_EVENTS,),
    ),
    Function(
        name="on_endpoint_event",
        description="An endpoint changed state: look at it and decide.",
        timeout=60,
        memory=512,
        environment=("TABLE_NAME", "BUCKET_NAME"),
        permissions=(TABLE, READ_RUNS, DESCRIBE_HOSTING, DELETE_HOSTING, TOKENS),
        rules=(
            EventRule(
                "EndpointStateChange",
                "Endpoints that change state.",
                {
                    "source": ["aws.sagemaker"],
                    "detail-type": ["SageMaker Endpoint State Change"],
                },
            ),
        ),
    ),
    Function(
        name="on_spot_warning",
        description="An EC2 instance will be reclaimed: ask its stage for a checkpoint now.",
        timeout=30,
        memory=256,
        environment=("TABLE_NAME", "BUCKET_NAME"),
        permissions=(TABLE, READ_RUNS, WRITE_RUNS),
        rules=(
            EventRule(
                "SpotWarning",
                "EC2 Spot interruption warnings and rebalance recommendations.",
                {
                    "source": ["aws.ec2"],
                    "detail-type": [
                        "EC2 Spot Instance Interruption Warning",
                        "EC2 Instance Rebalance Recommendation",
                    ],
                },
            ),
        ),
    ),
    Function(
        name="on_object_created",
        description="Checkpoint flags, host reports, uploads and recipes.",
        timeout=60,
        memory=512,
        environment=("TABLE_NAME", "BUCKET_NAME", "STATE_MACHINE_ARN"),
        permissions=(
            TABLE, READ_RUNS, WRITE_RUNS, LIST, READ_RECIPES, START,
            Permission(
                ("s3:GetObject", "s3:GetObjectVersion"),
                ("{bucket_arn}/uploads/*",),
                "Users name what they upload.",
            ),
            Permission(
                ("s3:PutObject",),
                ("{bucket_arn}/uploads/*.error.json", "{bucket_arn}/recipes/*.error.json"),
                "The report about a refused upload lies beside it.",
            ),
        ),
        rules=(
            EventRule(
                "ObjectCreated",
                "Flags and host reports of runs, uploads, recipes.",
                {
                    "source": ["aws.s3"],
                    "detail-type": ["Object Created"],
                    "detail": {
                        "bucket": {"name": ["{bucket_name}"]},
                        "object": {
                            "key": [
                                {"prefix": "uploads/"},
                                {"prefix": "recipes/"},
                                {"wildcard": "runs/*/sync_completed_*.flag"},
                                {"wildcard": "runs/*/hosts/*.json"},
                            ]
                        },
                    },
                },
            ),
        ),
    ),
    Function(
        name="on_execution_status",
        description="An execution ended outside our own paths (aborted, timed out): clean up.",
        timeout=120,
        memory=512,
        environment=("TABLE_NAME", "BUCKET_NAME"),
        permissions=(
            TABLE, READ_RUNS, DESCRIBE_JOB, STOP_JOB, DESCRIBE_HOSTING, DELETE_HOSTING,
            DELETE_ALARM, *UNSCALE, TOKENS, EXECUTIONS, ENDPOINT_LOGS,
        ),
        rules=(
            EventRule(
                "ExecutionStatusChange",
                "Executions of the hub's state machine that end badly.",
                {
                    "source": ["aws.states"],
                    "detail-type": ["Step Functions Execution Status Change"],
                    "detail": {
                        "stateMachineArn": ["{state_machine_arn}"],
                        "status": ["ABORTED", "FAILED", "TIMED_OUT"],
                    },
                },
            ),
        ),
    ),
    Function(
        name="reconcile",
        description="Look at everything that is not terminal; finish what an event missed.",
        timeout=300,
        memory=512,
        environment=("TABLE_NAME", "BUCKET_NAME", "STATE_MACHINE_ARN", "STACK_NAME"),
        permissions=(
            TABLE, READ_RUNS, LIST, DESCRIBE_JOB, LIST_JOBS, STOP_JOB, DESCRIBE_HOSTING,
            DELETE_HOSTING, DELETE_ALARM, *UNSCALE, TOKENS, EXECUTIONS, START, ENDPOINT_LOGS,
            Permission(
                ("cloudwatch:GetMetricStatistics",),
                ("*",),
                "CloudWatch has no resource-level permission for reading metrics.",
            ),
        ),
        schedule_minutes=5,
    ),
    Function(
        name="reward_dry_run",
        description="Try reward sources on sample answers. Holds no permission but to log.",
        # API Gateway gives up after 30 s; the sandbox's own deadlines end before this.
        timeout=28,
        # 1769 MB buy one whole vCPU, without which SymPy takes 10 s to import.
        memory=1769,
        environment=(),
        permissions=(),
        code="rewards",
    ),
)  # fmt: skip

STATE_MACHINE_TASKS: tuple[Function, ...] = tuple(f for f in FUNCTIONS if f.state_machine_task)


def function(name: str) -> Function:
    """The function called ``name``."""
    return next(item for item in FUNCTIONS if item.name == name)
