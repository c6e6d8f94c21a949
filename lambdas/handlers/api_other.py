"""Routes for rewards, recipes and the stack itself."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from aws_lambda_powertools.event_handler import Response
from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from contracts.api import (
    InfoView,
    RecipeList,
    RecipeRequest,
    RecipeView,
    RewardCatalogue,
    RewardView,
)
from contracts.built_in_rewards import BUILT_IN_PARAMETERS
from contracts.layout import recipe_file_key, recipe_files_prefix, recipe_key
from contracts.reward_catalogue import REWARD_SUMMARIES
from contracts.reward_trial import RewardTestRequest, RewardTestView
from lambdas.adapters.functions import invoke_function
from lambdas.errors import NotFoundError
from lambdas.hub import hub
from lambdas.logic.recipes import check_new_recipe
from lambdas.logic.reward_requests import trial_problems
from lambdas.logic.views import problem_view
from lambdas.settings import read_setting

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]


@router.get("/rewards", tags=["rewards"], summary="Built-in rewards")
def list_rewards() -> RewardCatalogue:
    rewards = [
        RewardView(name=name, summary=REWARD_SUMMARIES[name], parameters=model.model_json_schema())
        for name, model in BUILT_IN_PARAMETERS.items()
    ]
    return RewardCatalogue(rewards=rewards)


@router.post("/rewards:test", tags=["rewards"], summary="Try reward sources on sample answers")
def test_reward(body: RewardTestRequest) -> RewardTestView:
    problems = list(trial_problems(body))
    if problems or not body.samples:
        return RewardTestView(problems=[problem_view(problem) for problem in problems])
    name = read_setting("REWARD_DRY_RUN_FUNCTION")
    answer = invoke_function(name, body.model_dump(mode="json"))
    return RewardTestView.model_validate(answer)


@router.get("/recipes", tags=["recipes"], summary="List recipes")
def list_recipes() -> RecipeList:
    prefix = recipe_files_prefix("").rstrip("/") + "/"
    names = [key.removeprefix(prefix) for key in hub().bucket.list_sizes(prefix)]
    return RecipeList(
        recipes=[n.removesuffix(".yaml") for n in names if "/" not in n and n.endswith(".yaml")]
    )


@router.get("/recipes/<name>", tags=["recipes"], summary="A recipe")
def get_recipe(name: str) -> RecipeView:
    times = hub().bucket.list_times(recipe_key(name))
    if recipe_key(name) not in times:
        raise NotFoundError(f"no recipe {name}")
    prefix = recipe_files_prefix(name)
    files = [key.removeprefix(prefix) for key in hub().bucket.list_sizes(prefix)]
    text = hub().bucket.read(recipe_key(name)).decode()
    return RecipeView(name=name, yaml=text, files=files, updated_at=times[recipe_key(name)])


@router.put("/recipes/<name>", tags=["recipes"], summary="Register a recipe")
def put_recipe(name: str, body: RecipeRequest) -> RecipeView:
    check_new_recipe(hub(), name, body.yaml, body.files)
    for path, text in body.files.items():
        hub().bucket.write(recipe_file_key(name, path), text)
    hub().bucket.write(recipe_key(name), body.yaml)
    return get_recipe(name)


@router.delete("/recipes/<name>", tags=["recipes"], summary="Forget a recipe (204)")
def delete_recipe(name: str) -> Response[None]:
    for key in hub().bucket.list_sizes(recipe_files_prefix(name)):
        hub().bucket.delete(key)
    hub().bucket.delete(recipe_key(name))
    return Response(204)


@router.get("/info", tags=["hub"], summary="What a client must know of the stack")
def info() -> InfoView:
    return InfoView(
        version=_version(),
        region=os.environ["AWS_REGION"],
        bucket=hub().bucket.name,
        state_machine_arn=read_setting("STATE_MACHINE_ARN"),
        training_image=read_setting("TRAINING_IMAGE_URI"),
        inference_image=read_setting("INFERENCE_IMAGE_URI"),
    )


@router.get("/openapi.json", tags=["hub"], summary="This API as an OpenAPI document")
def openapi_document() -> Response[str]:
    from lambdas.handlers.api import openapi

    return Response(200, "application/json", openapi())


def _version() -> str:
    try:
        return version("grpohub")
    except PackageNotFoundError:  # The Lambda's code is a folder, not an installed distribution.
        return "0.1.0"
