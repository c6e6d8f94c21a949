"""The SageMaker runtime: InvokeEndpoint, and the streaming form in AWS's binary event stream."""

import http.client
import json
import struct
import zlib
from collections.abc import Iterator

from werkzeug.wrappers import Request, Response

from local_aws.sagemaker.endpoints import Fleet

INVOKE_SECONDS = 60.0
STREAM_SECONDS = 480.0
MAX_PAYLOAD = 6 * 1024 * 1024
_FORWARDED = ("Content-Type", "Accept", "X-Amzn-SageMaker-Custom-Attributes")


def invoke(request: Request, fleet: Fleet | None, name: str) -> Response:
    """Answer POST /endpoints/<name>/invocations[-response-stream]."""
    streaming = request.path.endswith("-response-stream")
    if fleet is None:
        text = f"Endpoint {name} of account 123456789012 not found."
        return error("ValidationError", text, 400)
    body = request.get_data()
    if len(body) > MAX_PAYLOAD:
        return error("ValidationError", f"The request is above {MAX_PAYLOAD} bytes.", 413)
    connection = http.client.HTTPConnection(
        "127.0.0.1", fleet.port, timeout=STREAM_SECONDS if streaming else INVOKE_SECONDS
    )
    headers = {k: request.headers[k] for k in _FORWARDED if k in request.headers}
    try:
        connection.request("POST", "/invocations", body, headers)
        answer = connection.getresponse()
    except (OSError, http.client.HTTPException) as problem:
        late = isinstance(problem, TimeoutError)
        text = "Your invocation timed out while waiting for a response from container primary"
        return model_error(text if late else f"Could not reach the container: {problem}", 0)
    if answer.status >= 400:
        return _container_error(answer)
    kind = answer.headers.get("Content-Type", "application/octet-stream")
    kept = {"x-Amzn-Invoked-Production-Variant": fleet.variant}
    if streaming:
        kept["X-Amzn-SageMaker-Content-Type"] = kind
        return Response(
            _event_stream(answer, connection),
            200,
            kept,
            content_type="application/vnd.amazon.eventstream",
            direct_passthrough=True,
        )
    for header, value in answer.headers.items():
        if header.lower().startswith("x-"):
            kept[header] = value
    return Response(answer.read(), 200, kept, content_type=kind)


def error(code: str, message: str, status: int) -> Response:
    """An error of the runtime API, whose protocol names it in a header."""
    body = json.dumps({"Message": message})
    return Response(body, status, {"x-amzn-ErrorType": code}, content_type="application/json")


def model_error(message: str, original_status: int, original: str = "") -> Response:
    """ModelError: the container answered with an error, or not at all."""
    body = {
        "Message": message,
        "OriginalMessage": original,
        "OriginalStatusCode": original_status,
        "ErrorCode": "CLIENT_ERROR_FROM_MODEL" if 400 <= original_status < 500 else "MODEL_ERROR",
    }
    headers = {"x-amzn-ErrorType": "ModelError"}
    return Response(json.dumps(body), 424, headers, content_type="application/json")


def _container_error(answer: http.client.HTTPResponse) -> Response:
    text = answer.read().decode("utf-8", "replace")
    side = "client" if answer.status < 500 else "server"
    message = f'Received {side} error ({answer.status}) from primary with message "{text}"'
    return model_error(message, answer.status, text)


def encode_event(headers: dict[str, str], payload: bytes) -> bytes:
    """One message of the vnd.amazon.eventstream format: lengths, checksum, headers, payload,
    checksum.

    Header values are strings (type 7); both checksums are CRC-32.
    """
    encoded = b"".join(
        bytes([len(name)])
        + name.encode()
        + b"\x07"
        + struct.pack("!H", len(value))
        + value.encode()
        for name, value in headers.items()
    )
    total = 4 + 4 + 4 + len(encoded) + len(payload) + 4
    prelude = struct.pack("!II", total, len(encoded))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + encoded + payload
    return message + struct.pack("!I", zlib.crc32(message))


def _event_stream(
    answer: http.client.HTTPResponse, connection: http.client.HTTPConnection
) -> Iterator[bytes]:
    headers = {
        ":event-type": "PayloadPart",
        ":content-type": "application/octet-stream",
        ":message-type": "event",
    }
    try:
        while part := answer.read1(65536):
            yield encode_event(headers, part)
    except (OSError, http.client.HTTPException) as problem:
        text = json.dumps({"Message": str(problem), "ErrorCode": "StreamBroken"})
        broken = {":exception-type": "ModelStreamError", ":message-type": "exception"}
        yield encode_event({**broken, ":content-type": "application/json"}, text.encode())
    finally:
        connection.close()
