"""The HTTP API of API Gateway (payload format 2.0) in front of the functions, built from the
template's routes.
"""

import base64
import datetime
import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from werkzeug.wrappers import Request, Response

from local_aws.lambdas import FunctionNotFoundError, Lambdas
from local_aws.site import ACCOUNT, Site

PREFIX = "/_http"
API_ID = "local"
_CREDENTIAL = re.compile(r"Credential=([^/]+)/\d{8}/[^/]+/execute-api/aws4_request")
_TEXT = re.compile(
    r"text/|application/(.*\+)?(json|xml|yaml|x-yaml|javascript)|x-www-form-urlencoded"
)


@dataclass(frozen=True)
class Route:
    """One route: `GET /runs/{run_id}`, `ANY /{proxy+}` or `$default`, and the function behind
    it.
    """

    key: str
    function: str
    iam: bool

    @property
    def method(self) -> str:
        """The HTTP method, or ANY."""
        return "ANY" if self.key == "$default" else self.key.split(" ", 1)[0]

    @property
    def path(self) -> str:
        """The path with its `{parameters}`."""
        return "/{proxy+}" if self.key == "$default" else self.key.split(" ", 1)[1]

    def match(self, method: str, path: str) -> dict[str, str] | None:
        """The path parameters when this route serves the request."""
        if self.method not in ("ANY", method):
            return None
        pattern = re.sub(
            r"\\\{(\w+)(\\\+)?\\\}",
            lambda name: f"(?P<{name[1]}>{'.+' if name[2] else '[^/]+'})",
            re.escape(self.path),
        )
        found = re.fullmatch(pattern, path)
        if self.key == "$default":
            return {}
        return found.groupdict() if found else None

    def rank(self) -> tuple[bool, bool, int, bool]:
        """API Gateway's choice: full match, then path variables, then greedy, then $default."""
        return (
            self.key == "$default",
            "+}" in self.path,
            self.path.count("{"),
            self.method == "ANY",
        )


class HttpApi:
    """Turns HTTP requests into Lambda events and answers back."""

    def __init__(self, site: Site, lambdas: Lambdas) -> None:
        self._site, self._lambdas = site, lambdas
        self._routes: list[Route] = []

    def add(self, route: Route) -> None:
        """Serve one more route."""
        self._routes = sorted([*self._routes, route], key=Route.rank)

    @property
    def url(self) -> str:
        """What a client uses as the API's address."""
        return self._site.url + PREFIX

    def handle(self, request: Request) -> Response:
        """Answer one request, as API Gateway does."""
        path = request.path.removeprefix(PREFIX) or "/"
        for route in self._routes:
            parameters = route.match(request.method, path)
            if parameters is None:
                continue
            caller = _CREDENTIAL.search(request.headers.get("Authorization", ""))
            if route.iam and caller is None:
                return _message(403, "Forbidden")
            event = build_event(request, path, route, parameters, caller and caller[1])
            return self._invoke(route.function, event)
        return _message(404, "Not Found")

    def _invoke(self, function: str, event: Mapping[str, Any]) -> Response:
        try:
            result = self._lambdas.invoke(function, json.dumps(event).encode())
        except FunctionNotFoundError:
            return _message(500, "Internal Server Error")
        if result.error:
            self._site.report(f"{event['routeKey']}: {result.payload.decode()[:500]}")
            return _message(500, "Internal Server Error")
        return to_response(json.loads(result.payload))


def build_event(
    request: Request,
    path: str,
    route: Route,
    parameters: Mapping[str, str],
    access_key: str | None,
) -> dict[str, Any]:
    """A payload of format 2.0. Repeated headers and query parameters are joined by commas, as AWS
    joins them.
    """
    body = request.get_data()
    text = bool(_TEXT.match(request.mimetype or "text/plain")) and _is_utf8(body)
    now = datetime.datetime.now(datetime.UTC)
    context: dict[str, Any] = {
        "accountId": ACCOUNT,
        "apiId": API_ID,
        "domainName": request.host,
        "domainPrefix": API_ID,
        "http": {
            "method": request.method,
            "path": path,
            "protocol": "HTTP/1.1",
            "sourceIp": request.remote_addr,
            "userAgent": request.headers.get("User-Agent", ""),
        },
        "requestId": str(uuid.uuid4()),
        "routeKey": route.key,
        "stage": "$default",
        "time": now.strftime("%d/%b/%Y:%H:%M:%S +0000"),
        "timeEpoch": int(time.time() * 1000),
    }
    if access_key:
        context["authorizer"] = {
            "iam": {
                "accessKey": access_key,
                "accountId": ACCOUNT,
                "callerId": access_key,
                "cognitoIdentity": None,
                "principalOrgId": None,
                "userArn": f"arn:aws:iam::{ACCOUNT}:user/{access_key}",
                "userId": access_key,
            }
        }
    event: dict[str, Any] = {
        "version": "2.0",
        "routeKey": route.key,
        "rawPath": path,
        "rawQueryString": request.query_string.decode(),
        "headers": {name.lower(): value for name, value in request.headers if name != "Cookie"},
        "requestContext": context,
        "isBase64Encoded": bool(body) and not text,
    }
    if cookies := request.headers.get("Cookie"):
        event["cookies"] = cookies.split("; ")
    if request.args:
        event["queryStringParameters"] = {
            name: ",".join(values) for name, values in request.args.lists()
        }
    if parameters:
        event["pathParameters"] = dict(parameters)
    if body:
        event["body"] = body.decode() if text else base64.b64encode(body).decode()
    return event


def to_response(answer: Any) -> Response:
    """A function's answer as HTTP; without `statusCode` the whole answer is the JSON body, as AWS
    infers it.
    """
    if not isinstance(answer, dict) or "statusCode" not in answer:
        return Response(json.dumps(answer), 200, content_type="application/json")
    body = answer.get("body") or ""
    if not isinstance(body, str):
        body = json.dumps(body)
    content = base64.b64decode(body) if answer.get("isBase64Encoded") else body.encode()
    response = Response(content, int(answer["statusCode"]))
    response.headers["Content-Type"] = "text/plain;charset=utf-8"
    for name, value in (answer.get("headers") or {}).items():
        response.headers[name] = str(value)
    for name, values in (answer.get("multiValueHeaders") or {}).items():
        response.headers[name] = ",".join(map(str, values))
    for cookie in answer.get("cookies") or ():
        response.headers.add("Set-Cookie", cookie)
    return response


def _message(status: int, text: str) -> Response:
    return Response(json.dumps({"message": text}), status, content_type="application/json")


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
