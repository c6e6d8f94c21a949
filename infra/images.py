"""The container images as CDK assets. Synth hashes their sources, a deployment builds them."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

from aws_cdk import aws_ecr_assets as ecr_assets
from constructs import Construct

from infra.bundle import BUILD, staged_folder

__all__ = ["base_image", "container_image"]

COMMON_SOURCES = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "contracts")


def container_image(
    scope: Construct, id: str, *, package: str, base_image: str
) -> ecr_assets.DockerImageAsset:
    """The image of a container package.

    The build context looks like the repository's root with only that package and `contracts` in
    it, so `docker build -f <package>/Dockerfile .` in a checkout builds the same image.
    """
    context: Path = staged_folder(f"image-{package}", (*COMMON_SOURCES, package))
    return ecr_assets.DockerImageAsset(
        scope,
        id,
        directory=str(context),
        file=f"{package}/Dockerfile",
        build_args={"BASE_IMAGE": base_image},
        # SageMaker's GPU instances are x86_64, whatever machine builds the image.
        platform=ecr_assets.Platform.LINUX_AMD64,
    )


def base_image(framework: str, *, region: str, **choice: str) -> str:
    """Address of one of AWS's deep learning images in a region.

    The `sagemaker` package knows the accounts of every region, and takes 5 s to import: an answer
    is kept for as long as the package's version stays.
    """
    version = importlib.metadata.version("sagemaker")
    question = repr((version, framework, region, sorted(choice.items())))
    answer = BUILD / f"base-image-{hashlib.sha256(question.encode()).hexdigest()[:16]}"
    if not answer.is_file():
        from sagemaker.core import image_uris

        address: str = image_uris.retrieve(framework, region=region, **choice)
        answer.parent.mkdir(parents=True, exist_ok=True)
        answer.write_text(address)
    return answer.read_text()
