"""A base model by its hub id, against a small hub on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from contracts.attempt import AttemptConfig
from contracts.failures import ExitCode
from contracts.run_spec import parse_run_spec
from tests.training import tiny
from training_container.failure import StageError
from training_container.inputs import AttemptInputs, fetch_hub_model

COMMIT = "c0ffee" + "0" * 34
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model-00001-of-00001.safetensors": b"weights" * 1000,
    "consolidated.safetensors": b"the same weights again",
    "original/consolidated.00.pth": b"and again",
    "onnx/model.onnx": b"and again",
    "modeling_tiny.py": b"raise SystemExit",
    "README.md": b"# Tiny",
}


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for: a repository's files at a revision, and each file."""

    fetched: list[str]
    tokens: set[str | None]
    status: int
    reason: str

    def do_GET(self) -> None:
        type(self).tokens.add(self.headers.get("authorization"))
        if type(self).status != 200:
            self.answer(b"{}", status=type(self).status, X_Error_Code=type(self).reason)
        elif self.path.startswith("/api/models/acme/tiny/revision/v1"):
            siblings = [{"rfilename": name} for name in FILES]
            document = {"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}
            self.answer(json.dumps(document).encode())
        elif self.path.startswith("/api/models/acme/tiny/tree/"):
            entries = [
                {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for n, b in FILES.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif self.path.startswith(f"/acme/tiny/resolve/{COMMIT}/"):
            name = self.path.removeprefix(f"/acme/tiny/resolve/{COMMIT}/")
            if self.command == "GET":
                type(self).fetched.append(name)
            self.answer(FILES[name])
        else:
            self.answer(b"{}", status=404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("x-repo-commit", COMMIT)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: the tests' output is for the tests."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    handler = type("Tested", (Hub,), {"fetched": [], "tokens": set(), "status": 200, "reason": ""})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, constants = f"http://127.0.0.1:{server.server_port}", huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield handler
    server.shutdown()
    server.server_close()


def inputs(source: str = "acme/tiny", **model: object) -> AttemptInputs:
    document = tiny.run_document(tiny.sft_stage())
    revision = {} if source.startswith("s3://") else {"revision": "v1"}
    document["model"] = {"source": source, **revision, **model}
    spec = parse_run_spec(document)
    config = AttemptConfig(
        run_id="tiny-20260101-abc", stage_index=0, stage=spec.stages[0].name, attempt=1,
        bucket="bucket", spec_sha256="0" * 64,
    )  # fmt: skip
    return AttemptInputs(config, spec, "", spec.stages[0])


def files(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if path.parts[0] != ".cache"}


def test_the_first_host_gets_each_weight_once_and_no_code(hub: type[Hub], tmp_path: Path) -> None:
    folder = fetch_hub_model(inputs(), tmp_path / "model", weights=True)
    expected = {"config.json", "tokenizer.json", "model-00001-of-00001.safetensors"}
    assert files(folder) == expected == set(hub.fetched)
    weights = folder / "model-00001-of-00001.safetensors"
    assert weights.read_bytes() == FILES[weights.name]


def test_other_hosts_get_no_weights(hub: type[Hub], tmp_path: Path) -> None:
    folder = fetch_hub_model(inputs(), tmp_path / "model", weights=False)
    assert files(folder) == {"config.json", "tokenizer.json"} == set(hub.fetched)


def test_code_comes_only_where_it_is_trusted(hub: type[Hub], tmp_path: Path) -> None:
    folder = fetch_hub_model(inputs(trust_remote_code=True), tmp_path / "model", weights=False)
    assert "modeling_tiny.py" in files(folder)


def test_the_token_is_sent(hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training_container.inputs.read_secret", {"grpohub/hub": "hf_x"}.get)
    fetch_hub_model(inputs(hub_token_secret="grpohub/hub"), tmp_path / "model", weights=False)
    assert "Bearer hf_x" in hub.tokens


@pytest.mark.parametrize(
    ("source", "answer", "code"),
    [
        ("acme/none", (200, ""), ExitCode.BAD_INPUT),
        ("acme/tiny", (401, ""), ExitCode.BAD_INPUT),
        ("acme/tiny", (403, "GatedRepo"), ExitCode.BAD_INPUT),
        ("acme/tiny", (404, "RevisionNotFound"), ExitCode.BAD_INPUT),
        ("acme/tiny", (500, ""), ExitCode.STORAGE),
    ],
)
def test_what_goes_wrong_names_the_model(
    hub: type[Hub], tmp_path: Path, source: str, answer: tuple[int, str], code: ExitCode
) -> None:
    hub.status, hub.reason = answer
    with pytest.raises(StageError, match=source) as caught:
        fetch_hub_model(inputs(source), tmp_path / "model", weights=True)
    assert caught.value.code is code


def test_a_source_that_is_no_hub_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="is no hub id") as caught:
        fetch_hub_model(inputs("s3://bucket/model/"), tmp_path / "model", weights=True)
    assert caught.value.code is ExitCode.BAD_INPUT
