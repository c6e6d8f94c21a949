"""What the synthesised template must hold, whatever builds it."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from infra import app
from infra.options import StackOptions
from infra.permissions import WILDCARD_ACTIONS
from lambdas import functions as table
from lambdas import schema
from tests.infra.conftest import Assembly

REPOSITORY = Path(__file__).resolve().parents[2]
HOLDS = {
    "boto3", "contracts", "lambdas", "pydantic", "ray", "sympy", "torch", "training_container",
    "transformers",
}  # fmt: skip
"""By what a zip of a function is known, and what none may carry."""


def references(value: Any) -> set[str]:
    """Logical ids that a template value names."""
    match value:
        case {"Ref": name}:
            return {name}
        case {"Fn::GetAtt": [name, _]}:
            return {name}
        case dict():
            return set().union(*map(references, value.values()))
        case list():
            return set().union(*map(references, value))
    return set()


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def test_the_stack_has_no_unexplained_finding(assembly: Assembly, guarded: Assembly) -> None:
    """cdk-nag's AwsSolutions pack ran on every option; a finding would have failed the synth."""
    for one in (assembly, guarded):
        report = json.loads((one.folder / "validation-report.json").read_text())
        assert report.get("pluginReports", []) == []


def test_an_unexplained_wildcard_fails_the_synth() -> None:
    """A permission on everything is refused before any template is written."""
    from aws_cdk import App, Stack
    from aws_cdk import aws_iam as iam

    from infra.permissions import allow

    role = iam.Role(Stack(App()), "Role", assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"))
    with pytest.raises(ValueError, match="may not be allowed on every resource"):
        allow(role, ["s3:GetObject"], ["*"], reason="It is easier.")
    with pytest.raises(ValueError, match="needs a reason"):
        allow(role, ["s3:GetObject"], ["arn:aws:s3:::bucket/*"])


def test_every_row_of_the_table_is_a_function_with_a_role_of_its_own(assembly: Assembly) -> None:
    functions = assembly.of_type("AWS::Lambda::Function")
    handlers = {properties["Handler"] for properties in functions.values()}
    assert handlers == {row.handler for row in table.FUNCTIONS}
    roles = [references(properties["Role"]).pop() for properties in functions.values()]
    assert len(set(roles)) == len(functions)
    assert all(properties["Architectures"] == ["arm64"] for properties in functions.values())
    assert {properties["Runtime"] for properties in functions.values()} == {"python3.13"}


def test_every_function_and_the_state_machine_are_traced(assembly: Assembly) -> None:
    for name, properties in assembly.of_type("AWS::Lambda::Function").items():
        assert properties["TracingConfig"] == {"Mode": "Active"}, name
        assert "POWERTOOLS_TRACE_DISABLED" not in properties["Environment"]["Variables"]
    [machine] = assembly.of_type("AWS::StepFunctions::StateMachine").values()
    assert machine["TracingConfiguration"] == {"Enabled": True}
    reporting = {
        references(role).pop()
        for policy in assembly.of_type("AWS::IAM::Policy").values()
        for statement in policy["PolicyDocument"]["Statement"]
        if "xray:PutTraceSegments" in as_list(statement["Action"])
        for role in policy["Roles"]
    }
    functions = assembly.of_type("AWS::Lambda::Function").values()
    assert {references(properties["Role"]).pop() for properties in functions} <= reporting


def test_only_alarms_of_endpoints_are_made_and_deleted(assembly: Assembly) -> None:
    """A blue/green update is rolled back by an alarm: whoever deploys makes it, and SageMaker
    looks at it in the role of the endpoint. Scaling has alarms of its own."""
    may: dict[tuple[str, str], set[str]] = {}
    for name, statement in assembly.statements():
        for action in as_list(statement["Action"]):
            if action in ("cloudwatch:PutMetricAlarm", "cloudwatch:DeleteAlarms",
                          "cloudwatch:DescribeAlarms"):  # fmt: skip
                for resource in as_list(statement["Resource"]):
                    [alarms] = re.findall(r":alarm:([\w-]+)-\*", json.dumps(resource))
                    who = may.setdefault((action.partition(":")[2], alarms), set())
                    who.add(re.split("Role|DefaultPolicy", name)[0])
    delete = {"FunctionsApi", "FunctionsCleanUp", "FunctionsOnExecutionStatus",
              "FunctionsReconcile"}  # fmt: skip
    finish, smoke = {"FunctionsFinishRun"}, {"FunctionsSmokeTest"}
    [create] = may["PutMetricAlarm", "GrpoHub-endpoint"]
    assert create.startswith("FunctionsCreateOrUpdateEndpoin")
    assert may == {
        ("PutMetricAlarm", "GrpoHub-endpoint"): {create},
        ("DescribeAlarms", "GrpoHub-endpoint"): {create, "Inference"},
        ("DeleteAlarms", "GrpoHub-endpoint"): delete,
        ("PutMetricAlarm", "grpohub-wake"): smoke,
        ("DeleteAlarms", "grpohub-wake"): delete | finish,
        ("PutMetricAlarm", "TargetTracking"): smoke,
        ("DescribeAlarms", "TargetTracking"): smoke,
        ("DeleteAlarms", "TargetTracking"): delete | finish | smoke,
    }


def test_every_function_keeps_its_logs_for_a_while_and_encrypted(assembly: Assembly) -> None:
    groups = assembly.of_type("AWS::Logs::LogGroup")
    for properties in assembly.of_type("AWS::Lambda::Function").values():
        group = groups[references(properties["LoggingConfig"]["LogGroup"]).pop()]
        assert group["LogGroupName"] == f"/aws/lambda/{properties['FunctionName']}"
    assert all(g["RetentionInDays"] == 90 and "KmsKeyId" in g for g in groups.values())


def test_every_rule_target_has_a_queue_with_an_alarm(assembly: Assembly) -> None:
    rules = assembly.of_type("AWS::Events::Rule")
    wanted = sum(len(row.rules) + bool(row.schedule_minutes) for row in table.FUNCTIONS)
    assert len(rules) == wanted
    watched = {
        references(dimension["Value"]).pop()
        for alarm in assembly.of_type("AWS::CloudWatch::Alarm").values()
        for dimension in alarm.get("Dimensions", [])
        if dimension["Name"] == "QueueName"
    }
    queues = assembly.of_type("AWS::SQS::Queue")
    for rule in rules.values():
        for target in rule["Targets"]:
            queue = references(target["DeadLetterConfig"]["Arn"]).pop()
            assert queue in queues
            assert queue in watched
            assert target["RetryPolicy"]["MaximumRetryAttempts"] == 185


def test_a_function_that_fails_on_an_event_keeps_it(assembly: Assembly) -> None:
    """EventBridge invokes asynchronously: what the function drops needs a queue of its own."""
    resources = assembly.of_type("AWS::Lambda::Function")
    by_handler = {properties["Handler"]: properties for properties in resources.values()}
    for row in table.FUNCTIONS:
        assert ("DeadLetterConfig" in by_handler[row.handler]) == bool(
            row.rules or row.schedule_minutes
        )


def test_rules_are_those_of_the_table(assembly: Assembly) -> None:
    patterns = [
        rule["EventPattern"]
        for rule in assembly.of_type("AWS::Events::Rule").values()
        if "EventPattern" in rule
    ]
    for row in table.FUNCTIONS:
        for rule in row.rules:
            same = [p for p in patterns if p["detail-type"] == rule.pattern["detail-type"]]
            assert len(same) == 1, rule.name
            assert "{" not in json.dumps(same[0]).replace('{"', "")
    schedules = [
        rule["ScheduleExpression"]
        for rule in assembly.of_type("AWS::Events::Rule").values()
        if "ScheduleExpression" in rule
    ]
    assert schedules == ["rate(5 minutes)"]


def test_only_listed_actions_are_allowed_on_every_resource(
    assembly: Assembly, guarded: Assembly
) -> None:
    for one in (assembly, guarded):
        for name, statement in one.statements():
            assert statement["Effect"] == "Allow"
            assert "NotAction" not in statement
            actions = as_list(statement["Action"])
            assert "*" not in actions, name
            assert not any(action.endswith(":*") for action in actions), name
            if "*" in as_list(statement["Resource"]):
                assert set(actions) <= WILDCARD_ACTIONS.keys(), name


def test_the_training_role_writes_only_below_runs(assembly: Assembly) -> None:
    writing = {"s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"}
    bucket = bucket_id(assembly)
    found = 0
    for name, statement in assembly.statements():
        if not name.startswith("TrainingRole") or not writing & set(as_list(statement["Action"])):
            continue
        found += 1
        assert as_list(statement["Resource"]) == [
            {"Fn::Join": ["", [{"Fn::GetAtt": [bucket, "Arn"]}, "/runs/*"]]}
        ]
    assert found == 1


def test_the_training_role_asks_endpoints_and_tracking_servers_of_the_account(
    assembly: Assembly,
) -> None:
    may = {
        action: [json.dumps(resource) for resource in as_list(statement["Resource"])]
        for name, statement in assembly.statements()
        if name.startswith("TrainingRole")
        for action in as_list(statement["Action"])
        if action.startswith("sagemaker")
    }
    invoke = may.pop("sagemaker:InvokeEndpoint")
    assert [any(f":{kind}/*" in arn for arn in invoke)
            for kind in ("endpoint", "inference-component")] == [True, True]  # fmt: skip
    assert {"sagemaker-mlflow:CreateRun", "sagemaker-mlflow:LogBatch"} <= may.keys()
    for action, resources in may.items():
        assert action.startswith("sagemaker-mlflow:")
        assert len(resources) == 1
        assert ":mlflow-tracking-server/*" in resources[0]


def test_only_the_smoke_test_sets_up_scaling_and_may_create_its_role(assembly: Assembly) -> None:
    """The account's first scalable target of SageMaker brings a service-linked role into being."""
    may: dict[str, dict[str, Any]] = {}
    for name, statement in assembly.statements():
        for action in as_list(statement["Action"]):
            if action.startswith(("application-autoscaling:", "iam:Create")):
                may.setdefault(action, {})[name.partition("Role")[0]] = statement
    [create] = may["iam:CreateServiceLinkedRole"].values()
    service = "sagemaker.application-autoscaling.amazonaws.com"
    assert create["Condition"] == {"StringEquals": {"iam:AWSServiceName": service}}
    assert f":role/aws-service-role/{service}/" in json.dumps(create["Resource"])
    assert "*" not in json.dumps(create["Resource"])
    for action in ("iam:CreateServiceLinkedRole", "application-autoscaling:RegisterScalableTarget",
                   "application-autoscaling:PutScalingPolicy"):  # fmt: skip
        assert may[action].keys() == {"FunctionsSmokeTest"}
    assert may["application-autoscaling:DeregisterScalableTarget"].keys() == {
        "FunctionsApi", "FunctionsCleanUp", "FunctionsFinishRun", "FunctionsOnExecutionStatus",
        "FunctionsReconcile",
    }  # fmt: skip


def test_the_inference_role_writes_nothing(assembly: Assembly) -> None:
    actions = {
        action
        for name, statement in assembly.statements()
        if name.startswith("InferenceRole")
        for action in as_list(statement["Action"])
    }
    assert {a for a in actions if a.startswith("s3:")} == {
        "s3:GetBucketLocation",
        "s3:GetObject",
        "s3:ListBucket",
    }


def test_reward_code_runs_without_permissions(assembly: Assembly) -> None:
    actions = {
        action
        for name, statement in assembly.statements()
        if name.startswith("FunctionsRewardDryRun")
        for action in as_list(statement["Action"])
    }
    assert {action.split(":")[0] for action in actions} == {"logs", "xray"}


def test_no_environment_holds_a_secret(assembly: Assembly) -> None:
    """Only names, addresses and switches: the table says which, and none resolves a secret."""
    for properties in assembly.of_type("AWS::Lambda::Function").values():
        variables = properties["Environment"]["Variables"]
        assert variables.keys() <= table.ENVIRONMENT.keys()
        assert not re.search(
            r"secret|password|token|api.?key|resolve:", json.dumps(variables), re.IGNORECASE
        )


def test_each_function_gets_the_variables_of_its_row(assembly: Assembly) -> None:
    by_handler = {
        properties["Handler"]: properties["Environment"]["Variables"]
        for properties in assembly.of_type("AWS::Lambda::Function").values()
    }
    for row in table.FUNCTIONS:
        expected = {*table.COMMON_ENVIRONMENT, *row.environment}
        assert by_handler[row.handler].keys() == expected, row.name


def bucket_id(assembly: Assembly) -> str:
    return str(references(assembly.template["Outputs"]["BucketName"]["Value"]).pop())


def test_buckets_are_private_encrypted_and_tls_only(assembly: Assembly) -> None:
    buckets = assembly.of_type("AWS::S3::Bucket")
    policies = assembly.of_type("AWS::S3::BucketPolicy")
    for name, bucket in buckets.items():
        assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
        assert "BucketEncryption" in bucket
        [policy] = [p for p in policies.values() if references(p["Bucket"]) == {name}]
        denied = [s for s in policy["PolicyDocument"]["Statement"] if s["Effect"] == "Deny"]
        assert {"Bool": {"aws:SecureTransport": "false"}} in [s["Condition"] for s in denied]
    runs = buckets[bucket_id(assembly)]
    assert runs["VersioningConfiguration"] == {"Status": "Enabled"}
    assert runs["NotificationConfiguration"] == {
        "EventBridgeConfiguration": {"EventBridgeEnabled": True}
    }
    [rule] = runs["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    assert rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"] == "aws:kms"
    assert rule["BucketKeyEnabled"] is True


def test_no_lifecycle_rule_deletes_the_newest_version_of_an_object(assembly: Assembly) -> None:
    """A checkpoint is pruned by the trainer, which knows which are complete; never by its age."""
    rules = assembly.of_type("AWS::S3::Bucket")[bucket_id(assembly)]["LifecycleConfiguration"]
    assert rules["Rules"]
    assert not any({"ExpirationInDays", "ExpirationDate"} & rule.keys() for rule in rules["Rules"])


def test_data_outlives_the_stack_unless_asked_otherwise(
    assembly: Assembly, guarded: Assembly
) -> None:
    kinds = {"AWS::S3::Bucket", "AWS::DynamoDB::Table", "AWS::KMS::Key"}
    for one, policy in ((assembly, "Retain"), (guarded, "Delete")):
        kept = [r for r in one.template["Resources"].values() if r["Type"] in kinds]
        assert len(kept) == 4
        assert {r["DeletionPolicy"] for r in kept} == {policy}
        assert {r["UpdateReplacePolicy"] for r in kept} == {policy}


def test_the_table_is_the_schema(assembly: Assembly) -> None:
    [properties] = assembly.of_type("AWS::DynamoDB::Table").values()
    keys = {key["KeyType"]: key["AttributeName"] for key in properties["KeySchema"]}
    assert keys == {"HASH": schema.PARTITION_KEY, "RANGE": schema.SORT_KEY}
    assert properties["TimeToLiveSpecification"]["AttributeName"] == schema.TTL_ATTRIBUTE
    assert properties["PointInTimeRecoverySpecification"]["PointInTimeRecoveryEnabled"] is True
    assert properties["SSESpecification"]["SSEType"] == "KMS"
    indexes = {index["IndexName"]: index for index in properties["GlobalSecondaryIndexes"]}
    assert indexes.keys() == {index.name for index in schema.INDEXES.values()}
    for index in schema.INDEXES.values():
        assert indexes[index.name]["Projection"] == {"ProjectionType": "ALL"}


def test_the_api_is_signed_throttled_and_logged(assembly: Assembly) -> None:
    routes = assembly.of_type("AWS::ApiGatewayV2::Route").values()
    assert [route["RouteKey"] for route in routes] == list(table.function("api").routes)
    assert {route["AuthorizationType"] for route in routes} == {"AWS_IAM"}
    [stage] = assembly.of_type("AWS::ApiGatewayV2::Stage").values()
    assert stage["DefaultRouteSettings"]["ThrottlingRateLimit"] == 50
    assert "requestId" in json.loads(stage["AccessLogSettings"]["Format"])


def test_the_state_machine_runs_the_definition_file(assembly: Assembly) -> None:
    [machine] = assembly.of_type("AWS::StepFunctions::StateMachine").values()
    assert machine["StateMachineName"] == "grpo-run"
    key = machine["DefinitionS3Location"]["Key"]
    [source] = [
        asset["source"]["path"]
        for asset in assembly.assets["files"].values()
        if any(d["objectKey"] == key for d in asset["destinations"].values())
    ]
    definition = (assembly.folder / source).read_text()
    assert definition == (REPOSITORY / "state_machines" / "grpo_run.asl.json").read_text()
    named = set(re.findall(r"\$\{(\w+)\}", definition))
    assert named == machine["DefinitionSubstitutions"].keys()
    assert named == {row.substitution for row in table.STATE_MACHINE_TASKS}
    assert machine["LoggingConfiguration"]["Level"] == "ALL"
    assert machine["TracingConfiguration"] == {"Enabled": True}


def test_images_are_described_and_not_built(assembly: Assembly) -> None:
    images = {i["source"]["dockerFile"]: i for i in assembly.assets["dockerImages"].values()}
    assert images.keys() == {"training_container/Dockerfile", "inference_container/Dockerfile"}
    for image in images.values():
        folder = assembly.folder / image["source"]["directory"]
        assert (folder / image["source"]["dockerFile"]).is_file()
        assert (folder / "contracts" / "layout.py").is_file()
        base = image["source"]["dockerBuildArgs"]["BASE_IMAGE"]
        assert re.fullmatch(r"\d{12}\.dkr\.ecr\.[\w-]+\.amazonaws\.com/[\w-]+:[\w.-]+", base)
        assert image["source"]["platform"] == "linux/amd64"


def test_every_alarm_says_what_to_do_and_reaches_the_topic(
    assembly: Assembly, guarded: Assembly
) -> None:
    [topic] = assembly.of_type("AWS::SNS::Topic")
    alarms = assembly.of_type("AWS::CloudWatch::Alarm").values()
    for alarm in alarms:
        assert len(alarm["AlarmDescription"]) > 80
        assert references(alarm["AlarmActions"]) == {topic}
    [subscription] = guarded.of_type("AWS::SNS::Subscription").values()
    assert subscription["Endpoint"] == "ops@example.com"
    lag = [a for a in alarms if "has not run for 15 minutes" in a["AlarmDescription"]]
    assert [a["TreatMissingData"] for a in lag] == ["breaching"]


def test_dashboard_and_alarms_show_metrics_that_functions_emit(assembly: Assembly) -> None:
    sources = "".join(path.read_text() for path in (REPOSITORY / "lambdas").rglob("*.py"))
    emitted = set(re.findall(r'(?:count|measure)\(\s*"(\w+)"', sources))
    [dashboard] = assembly.of_type("AWS::CloudWatch::Dashboard").values()
    body = json.dumps(dashboard) + json.dumps(assembly.of_type("AWS::CloudWatch::Alarm"))
    shown = set(re.findall(r"GrpoHub\W+(\w+)\W+service", body.replace("\\", "")))
    shown |= {
        alarm["MetricName"]
        for alarm in assembly.of_type("AWS::CloudWatch::Alarm").values()
        if alarm.get("Namespace") == table.ENVIRONMENT["POWERTOOLS_METRICS_NAMESPACE"]
    }
    assert len(shown) > 10
    assert shown <= emitted


def test_outputs_are_those_that_clients_read(assembly: Assembly) -> None:
    assert assembly.template["Outputs"].keys() == {
        "ApiUrl",
        "BucketName",
        "InferenceImageUri",
        "StateMachineArn",
        "TableName",
        "TrainingImageUri",
    }


def test_options_reach_what_they_name(guarded: Assembly) -> None:
    [machine] = guarded.of_type("AWS::StepFunctions::StateMachine").values()
    assert machine["StateMachineName"] == "grpo-run-Second"
    by_handler = {
        properties["Handler"]: properties["Environment"]["Variables"]
        for properties in guarded.of_type("AWS::Lambda::Function").values()
    }
    submit = by_handler[table.function("submit_attempt").handler]
    assert submit["VPC_SUBNET_IDS"] == "subnet-1"
    assert submit["VPC_SECURITY_GROUP_IDS"] == "sg-1"
    assert submit["ENCRYPT_INTER_CONTAINER_TRAFFIC"] == "true"
    reading = [s for _, s in guarded.statements() if ":s3:::team-data/*" in json.dumps(s)]
    assert reading
    for statement in reading:
        assert {action.split(":")[1][:3] for action in as_list(statement["Action"])} <= {
            "Get",
            "Lis",
        }


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match="stack_nam"):
        StackOptions.from_context({"stack_nam": "Mine"})
    assert StackOptions.from_context({"@aws-cdk/core:flag": True, "aws:cdk:path": 1})


def test_lambda_code_and_layer_are_small_and_carry_no_torch(
    assembly: Assembly, tmp_path: Path
) -> None:
    sizes = {}
    for asset in assembly.assets["files"].values():
        if asset["source"]["packaging"] != "zip":
            continue
        folder = assembly.folder / asset["source"]["path"]
        archive = tmp_path / f"{folder.name}.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
            for file in folder.rglob("*"):
                packed.write(file, file.relative_to(folder))
        inside = folder / "python" if (folder / "python").is_dir() else folder
        names = {path.name for path in inside.iterdir()}
        sizes[frozenset(names & HOLDS)] = archive.stat().st_size
    libraries, rewards = (frozenset({*names, "pydantic"}) for names in (("boto3",), ("sympy",)))
    code, reward_code = (frozenset({"contracts", own}) for own in ("lambdas", "training_container"))
    assert sizes.keys() == {libraries, rewards, code, reward_code}
    # What a function gets: its code and one layer.
    assert sizes[code] + sizes[libraries] < 10_000_000
    assert sizes[reward_code] + sizes[rewards] < 10_000_000


def test_the_layers_hold_arm64_wheels_of_the_pinned_versions(assembly: Assembly) -> None:
    layers = [
        assembly.folder / asset["source"]["path"] / "python"
        for asset in assembly.assets["files"].values()
        if (assembly.folder / asset["source"]["path"] / "python").is_dir()
    ]
    assert len(layers) == 2
    assert all(list(one.glob("pydantic_core/*cpython-313-aarch64*.so")) for one in layers)
    [layer] = [one for one in layers if (one / "boto3").is_dir()]
    pins = dict(
        line.split("==")
        for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for name in ("boto3", "pydantic", "aws_lambda_powertools", "aws-xray-sdk"):
        folder = f"{name.replace('-', '_')}-{pins[name]}.dist-info"
        assert (layer / folder).is_dir(), folder
    assert not any((layer / name).exists() for name in ("torch", "numpy", "transformers"))


def test_an_assembly_is_kept_until_its_sources_or_options_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "repository/infra/stack.py"
    source.parent.mkdir(parents=True)
    source.write_text("1")
    made: list[Any] = []

    def make(outdir: Path, context: Any) -> None:
        (outdir / "cdk.out").parent.mkdir()
        (outdir / "cdk.out").touch()
        made.append(context)

    monkeypatch.setattr(app, "REPOSITORY", tmp_path / "repository")
    monkeypatch.setattr(app, "_synthesise", make)
    out = tmp_path / "out"
    app.synthesise(out)
    assert app.synthesise(out) == out
    assert made == [{}]
    source.write_text("2")
    app.synthesise(out)
    app.synthesise(out, {"log_level": "DEBUG"})
    assert made == [{}, {}, {"log_level": "DEBUG"}]
