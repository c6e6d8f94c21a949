"""Deploys a cloud assembly: what moto's CloudFormation can create, and around it what it cannot.

Types that moto does not know are taken out of the template. Some of them are served by the embedded
cloud itself (HTTP API, schedules, S3's EventBridge switch); the rest changes nothing here, and
`Deployment.skipped` says which.
"""

import functools
import io
import json
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_aws.assembly import Assembly, AssemblyError
from local_aws.events import EventBus
from local_aws.http_api import API_ID, HttpApi, Route
from local_aws.images import Images
from local_aws.lambdas import FunctionConfig, Lambdas
from local_aws.own_code import own_code
from local_aws.site import ACCOUNT, REGION, Site

ASSET_BUCKET = f"cdk-hnb659fds-assets-{ACCOUNT}-{REGION}"
BOOTSTRAP_PARAMETER = "/cdk-bootstrap/hnb659fds/version"

# Where a resource's own name comes from a random suffix on AWS, a restart here must find the same
# name again.
NAME_PROPERTIES = {
    "AWS::S3::Bucket": ("BucketName", 63),
    "AWS::DynamoDB::Table": ("TableName", 255),
    "AWS::Lambda::Function": ("FunctionName", 64),
    "AWS::SQS::Queue": ("QueueName", 80),
    "AWS::SNS::Topic": ("TopicName", 256),
    "AWS::StepFunctions::StateMachine": ("StateMachineName", 80),
}
SERVED_HERE = {
    "AWS::ApiGatewayV2::Api",
    "AWS::ApiGatewayV2::Route",
    "AWS::ApiGatewayV2::Integration",
    "AWS::ApiGatewayV2::Stage",
    "AWS::Lambda::EventInvokeConfig",
    "AWS::Lambda::LayerVersion",
    "AWS::Scheduler::Schedule",
    "Custom::S3BucketNotifications",
}
# moto knows the type, but has the grant's target only when it serves the API itself.
NOT_ENFORCED = {"AWS::Lambda::Permission"}

Resources = dict[str, dict[str, Any]]


@dataclass
class Deployment:
    """What came of a deployment: physical names by logical id, the stack's outputs, what is not
    served.
    """

    names: dict[str, str]
    outputs: dict[str, str]
    skipped: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)


@dataclass
class Deployer:
    """The parts of the cloud that a deployment fills."""

    site: Site
    lambdas: Lambdas
    bus: EventBus
    api: HttpApi
    images: Images

    def deploy(self, assembly: Assembly) -> Deployment:
        """Create the stack.

        Raises:
            AssemblyError: the template needs something that is not served here.
        """
        self._upload_assets(assembly)
        for tag, image in assembly.images.items():
            self.images.add_asset(tag, image.folder, image.dockerfile)
        self.images.keep(self.site.state_dir / "images.json")
        original: Resources = assembly.template["Resources"]
        template, wanted, skipped = self._prepare(assembly)
        cloudformation = self.site.client("cloudformation")
        cloudformation.create_stack(
            StackName=assembly.stack,
            TemplateBody=json.dumps(template),
            Capabilities=["CAPABILITY_NAMED_IAM"],
        )
        stack = cloudformation.describe_stacks(StackName=assembly.stack)["Stacks"][0]
        values = {o["OutputKey"]: o["OutputValue"] for o in stack.get("Outputs", ())}
        pages = cloudformation.get_paginator("list_stack_resources")
        names = {
            resource["LogicalResourceId"]: resource["PhysicalResourceId"]
            for page in pages.paginate(StackName=assembly.stack)
            for resource in page["StackResourceSummaries"]
        }
        resolved = {name: values.pop(key) for key, name in wanted.items() if key in values}
        deployment = Deployment(names, values, skipped)
        self._start_functions(original, names, resolved, assembly)
        self._connect_routes(original, names)
        self._configure_buckets(original, names)
        deployment.refused += self._start_schedules(original, resolved)
        return deployment

    def _upload_assets(self, assembly: Assembly) -> None:
        s3 = self.site.client("s3")
        s3.create_bucket(Bucket=ASSET_BUCKET)
        self.site.client("ssm").put_parameter(
            Name=BOOTSTRAP_PARAMETER, Value="30", Type="String", Overwrite=True
        )
        empty = io.BytesIO()
        with zipfile.ZipFile(empty, "w") as archive:
            archive.writestr("placeholder", "")
        for key, path in assembly.files.items():
            # Code runs from its folder; moto only wants to see an archive.
            body = empty.getvalue() if path.is_dir() else path.read_bytes()
            s3.put_object(Bucket=ASSET_BUCKET, Key=key, Body=body)

    def _prepare(self, assembly: Assembly) -> tuple[dict[str, Any], dict[str, str], Counter[str]]:
        """A template that moto can create; outputs that resolve what we need to know; what was left
        out.
        """
        from moto.cloudformation.parsing import get_model_map

        template = json.loads(json.dumps(assembly.template))
        resources: Resources = template["Resources"]
        known = get_model_map().keys() - NOT_ENFORCED - SERVED_HERE
        removed = {name: r for name, r in resources.items() if r["Type"] not in known}
        skipped = Counter(r["Type"] for r in removed.values() if r["Type"] not in SERVED_HERE)
        wanted = self._wanted_values(template)
        for name in removed:
            del resources[name]
        for name, resource in resources.items():
            resource.pop("DependsOn", None)
            _give_name(assembly.stack, name, resource)
            self._adapt(resource, assembly)
        template.pop("Rules", None)  # checks the bootstrap version
        return self._without(template, removed), wanted, skipped

    def _wanted_values(self, template: dict[str, Any]) -> dict[str, str]:
        """Adds an output for each value that has to be resolved; returns what each output stands
        for.
        """
        outputs = template.setdefault("Outputs", {})
        wanted: dict[str, str] = {}
        for name, resource in template["Resources"].items():
            properties = resource.get("Properties", {})
            for path in (
                "DeadLetterConfig.TargetArn",
                "DestinationConfig.OnFailure.Destination",
                "FunctionName",
                "Target.Arn",
            ):
                value = _dig(properties, path)
                if value is not None and not isinstance(value, str):
                    key = f"Wanted{len(wanted)}"
                    wanted[key] = f"{name}.{path}"
                    outputs[key] = {"Value": value}
        return wanted

    def _without(self, node: Any, removed: Resources) -> Any:
        """The template with references to removed resources replaced by what they stand for
        here.
        """
        if isinstance(node, list):
            return [self._without(item, removed) for item in node]
        if not isinstance(node, dict):
            return node
        if node.get("Ref") in removed:
            return self._stand_in(node["Ref"], None, removed)
        attribute = node.get("Fn::GetAtt")
        if isinstance(attribute, list) and attribute[0] in removed:
            return self._stand_in(attribute[0], attribute[1], removed)
        return {key: self._without(value, removed) for key, value in node.items()}

    def _stand_in(self, name: str, attribute: str | None, removed: Resources) -> str:
        kind = removed[name]["Type"]
        if kind == "AWS::ApiGatewayV2::Api":
            return self.api.url if attribute == "ApiEndpoint" else API_ID
        if kind == "AWS::ApiGatewayV2::Stage":
            return "$default"
        return name if attribute is None else f"arn:aws:local:{REGION}:{ACCOUNT}:{name}"

    def _adapt(self, resource: dict[str, Any], assembly: Assembly) -> None:
        properties = resource.setdefault("Properties", {})
        if resource["Type"] == "AWS::Lambda::Function":
            properties.pop("Layers", None)
        if resource["Type"] == "AWS::IAM::Role":
            properties.pop("ManagedPolicyArns", None)  # nothing is enforced, and they load slowly
        if resource["Type"] == "AWS::S3::Bucket":
            properties.pop("NotificationConfiguration", None)
        if resource["Type"] == "AWS::StepFunctions::StateMachine":
            _inline_definition(properties, assembly.files)
        targets = properties.get("Targets", ()) if resource["Type"] == "AWS::Events::Rule" else ()
        if any("InputTransformer" in target or "InputPath" in target for target in targets):
            raise AssemblyError("EventBridge input transformers are not served here")

    def _start_functions(
        self,
        resources: Resources,
        names: Mapping[str, str],
        resolved: Mapping[str, str],
        assembly: Assembly,
    ) -> None:
        api = self.site.client("lambda")
        retries, failures = self._invoke_configs(resources, names, resolved)
        views = self.site.state_dir / "code"
        shutil.rmtree(views, ignore_errors=True)  # of an earlier deployment
        views.mkdir(parents=True, exist_ok=True)
        own = functools.cache(functools.partial(own_code, views=views))
        for logical, resource in resources.items():
            if resource["Type"] != "AWS::Lambda::Function":
                continue
            name, properties = names[logical], resource["Properties"]
            if "S3Key" not in properties["Code"]:
                raise AssemblyError(f"{logical} has inline code, which is not served here")
            seen = api.get_function_configuration(FunctionName=name)
            layers = [
                resources[layer["Ref"]]["Properties"]["Content"]["S3Key"]
                for layer in properties.get("Layers", ())
                if isinstance(layer, dict) and layer.get("Ref") in resources
            ]
            self.lambdas.add(
                FunctionConfig(
                    name=name,
                    handler=properties["Handler"],
                    code=own(assembly.files[properties["Code"]["S3Key"]]),
                    layers=tuple(own(assembly.files[key] / "python") for key in layers),
                    environment=seen.get("Environment", {}).get("Variables", {}),
                    timeout_seconds=float(properties.get("Timeout", 3)),
                    memory_mb=int(properties.get("MemorySize", 128)),
                    async_retries=retries.get(name, 2),
                    dead_letter_arn=resolved.get(f"{logical}.DeadLetterConfig.TargetArn"),
                    on_failure_arn=failures.get(name),
                )
            )

    @staticmethod
    def _invoke_configs(
        resources: Resources, names: Mapping[str, str], resolved: Mapping[str, str]
    ) -> tuple[dict[str, int], dict[str, str]]:
        retries, failures = {}, {}
        for logical, resource in resources.items():
            if resource["Type"] != "AWS::Lambda::EventInvokeConfig":
                continue
            function = resource["Properties"]["FunctionName"]
            name = names[function["Ref"]] if isinstance(function, dict) else function
            retries[name] = int(resource["Properties"].get("MaximumRetryAttempts", 2))
            destination = resolved.get(f"{logical}.DestinationConfig.OnFailure.Destination")
            if destination:
                failures[name] = destination
        return retries, failures

    def _connect_routes(self, resources: Resources, names: Mapping[str, str]) -> None:
        for resource in resources.values():
            if resource["Type"] != "AWS::ApiGatewayV2::Route":
                continue
            properties = resource["Properties"]
            integration = _first_reference(properties["Target"], resources)
            uri = resources[integration]["Properties"]["IntegrationUri"]
            function = names[_first_reference(uri, resources)]
            iam = properties.get("AuthorizationType") == "AWS_IAM"
            self.api.add(Route(properties["RouteKey"], function, iam))

    def _configure_buckets(self, resources: Resources, names: Mapping[str, str]) -> None:
        """What moto's CloudFormation leaves out of a bucket: versioning and EventBridge."""
        s3 = self.site.client("s3")
        for logical, resource in resources.items():
            properties = resource.get("Properties", {})
            if resource["Type"] == "AWS::S3::Bucket":
                bucket = names[logical]
            elif resource["Type"] == "Custom::S3BucketNotifications":
                bucket = names[_first_reference(properties["BucketName"], resources)]
            else:
                continue
            if "VersioningConfiguration" in properties:
                s3.put_bucket_versioning(
                    Bucket=bucket, VersioningConfiguration=properties["VersioningConfiguration"]
                )
            if "EventBridgeConfiguration" in properties.get("NotificationConfiguration", {}):
                s3.put_bucket_notification_configuration(
                    Bucket=bucket, NotificationConfiguration={"EventBridgeConfiguration": {}}
                )

    def _start_schedules(self, resources: Resources, resolved: Mapping[str, str]) -> list[str]:
        refused = self.bus.start_schedules()
        for logical, resource in resources.items():
            if resource["Type"] != "AWS::Scheduler::Schedule":
                continue
            properties = resource["Properties"]
            target = {**properties["Target"], "Arn": resolved[f"{logical}.Target.Arn"]}
            problem = self.bus.schedule(logical, properties["ScheduleExpression"], target)
            refused += [problem] if problem else []
        return refused


def _give_name(stack: str, logical: str, resource: dict[str, Any]) -> None:
    if resource["Type"] not in NAME_PROPERTIES:
        return
    key, longest = NAME_PROPERTIES[resource["Type"]]
    properties = resource.setdefault("Properties", {})
    name = f"{stack}-{logical}"
    if resource["Type"] == "AWS::S3::Bucket":
        name = name.lower()
    # The logical id ends in a hash, so its end is what tells two resources apart.
    suffix = ".fifo" if properties.get("FifoQueue") else ""
    properties.setdefault(key, name[-(longest - len(suffix)) :].lstrip("-") + suffix)


def _inline_definition(properties: dict[str, Any], files: Mapping[str, Path]) -> None:
    """moto reads neither a definition from S3 nor substitutions.

    Joined rather than substituted: moto's Fn::Sub turns `$$` into `$` and with it destroys
    `$$.Task.Token`.
    """
    location = properties.pop("DefinitionS3Location", None)
    if location:
        properties["DefinitionString"] = files[location["Key"]].read_text(encoding="utf-8")
    values = properties.pop("DefinitionSubstitutions", None)
    if values:
        parts = re.split(r"\$\{(\w+)\}", properties["DefinitionString"])
        joined = [values.get(part, part) if index % 2 else part for index, part in enumerate(parts)]
        properties["DefinitionString"] = {"Fn::Join": ["", joined]}


def _first_reference(node: Any, resources: Resources) -> str:
    """The logical id that an expression refers to first.

    Raises:
        AssemblyError: it refers to none.
    """
    found = list(_references(node))
    for name in found:
        if name in resources:
            return name
    raise AssemblyError(f"{json.dumps(node)} refers to no resource of the template")


def _references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [name for item in node for name in _references(item)]
    if not isinstance(node, dict):
        return []
    if "Ref" in node:
        return [node["Ref"]]
    if "Fn::GetAtt" in node:
        return [node["Fn::GetAtt"][0]]
    return [name for value in node.values() for name in _references(value)]


def _dig(node: Any, path: str) -> Any:
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node
