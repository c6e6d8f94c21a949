"""What a function reads from its environment: a model per concern, each read where it is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["HostingSettings", "HubSettings", "JobSettings", "read_setting"]


def read_setting(name: str, environment: Mapping[str, str] | None = None) -> str:
    """The variable ``name``.

    Raises:
        KeyError: when it is not set, which means the stack and lambdas/functions.py disagree.
    """
    return (os.environ if environment is None else environment)[name]


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Table and bucket, which every function but the reward sandbox has."""

    table: str
    bucket: str

    @classmethod
    def from_environment(cls) -> HubSettings:
        return cls(read_setting("TABLE_NAME"), read_setting("BUCKET_NAME"))


@dataclass(frozen=True, slots=True)
class VpcSettings:
    """Where jobs and endpoints run; empty: outside a VPC."""

    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls) -> VpcSettings:
        return cls(_split("VPC_SUBNET_IDS"), _split("VPC_SECURITY_GROUP_IDS"))

    @property
    def request(self) -> dict[str, dict[str, list[str]]]:
        """The `VpcConfig` part of a request, or nothing."""
        if not self.subnets:
            return {}
        return {
            "VpcConfig": {
                "Subnets": list(self.subnets),
                "SecurityGroupIds": list(self.security_groups),
            }
        }


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What every training job of the stack has in common."""

    image: str
    role: str
    stack: str
    kms_key: str = ""
    vpc: VpcSettings = VpcSettings()
    encrypt_traffic: bool = False

    @classmethod
    def from_environment(cls) -> JobSettings:
        return cls(
            image=read_setting("TRAINING_IMAGE_URI"),
            role=read_setting("TRAINING_ROLE_ARN"),
            stack=read_setting("STACK_NAME"),
            kms_key=read_setting("KMS_KEY_ARN"),
            vpc=VpcSettings.from_environment(),
            encrypt_traffic=read_setting("ENCRYPT_INTER_CONTAINER_TRAFFIC") == "true",
        )


@dataclass(frozen=True, slots=True)
class HostingSettings:
    """What every model and endpoint of the stack has in common."""

    image: str
    role: str
    stack: str
    vpc: VpcSettings = VpcSettings()

    @classmethod
    def from_environment(cls) -> HostingSettings:
        return cls(
            image=read_setting("INFERENCE_IMAGE_URI"),
            role=read_setting("INFERENCE_ROLE_ARN"),
            stack=read_setting("STACK_NAME"),
            vpc=VpcSettings.from_environment(),
        )


def _split(name: str) -> tuple[str, ...]:
    return tuple(part for part in read_setting(name).split(",") if part)
