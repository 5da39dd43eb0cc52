"""A hub on this machine: the routes that an upload takes, and what has arrived."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKENS = {"hf_writes": "me", "hf_reads": "reader"}
"""Token -> user. The second may write nowhere."""


class Hub:
    """Repositories in memory. ``broken`` answers the first route that it matches with that status."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}
        self.owners = {"me"}  # whose repositories the user "me" may write to
        self.objects: dict[str, bytes] = {}
        self.verified: set[str] = set()
        self.requests: list[str] = []
        self.broken: tuple[str, int] | None = None
        self.url = ""

    def add(self, name: str, *, private: bool = False, files: dict[str, bytes] | None = None) -> None:
        self.repos[name] = {
            "private": private,
            "files": dict(files or {}),
            "branches": {"main"},
            "commits": [],
        }

    def files(self, name: str) -> dict[str, bytes]:
        """What a download would get."""
        return self.repos[name]["files"]  # type: ignore[no-any-return]

    # One method per route: (user, body, *parts of the path) -> (status, answer).

    def whoami(self, user: str | None, body: bytes) -> Any:
        return (200, {"name": user, "type": "user", "orgs": []}) if user else (401, "Invalid token")

    def create(self, user: str | None, body: bytes) -> Any:
        asked = json.loads(body)
        owner = asked["organization"] or user
        if user != "me" or owner not in self.owners:
            return 403, f"You don't have the rights to create a model under the namespace {owner}"
        name = f"{owner}/{asked['name']}"
        if name in self.repos:
            return 409, "You already created this model repo"
        self.add(name, private=asked.get("visibility") == "private" or bool(asked.get("private")))
        return 200, {"url": f"{self.url}/{name}"}

    def info(self, user: str | None, body: bytes, name: str) -> Any:
        repo = self.repos.get(name)
        if repo is None or (repo["private"] and user != "me"):
            return 404, "Repository not found"
        siblings = [{"rfilename": file} for file in repo["files"]]
        return 200, {"id": name, "private": repo["private"], "siblings": siblings}

    def validate(self, user: str | None, body: bytes) -> Any:
        _, head, _ = json.loads(body)["content"].split("---\n", 2)
        if yaml.safe_load(head).get("license") in (None, "apache-2.0", "mit"):
            return 200, {"errors": [], "warnings": []}
        return 400, {"errors": [{"message": '"license" must be one of [apache-2.0, mit]'}]}

    def branch(self, user: str | None, body: bytes, name: str, revision: str) -> Any:
        self.repos[name]["branches"].add(revision)
        return 200, {}

    def preupload(self, user: str | None, body: bytes, name: str, revision: str) -> Any:
        if user != "me":
            return 403, "Forbidden: pass `create_pr=1`"
        files = json.loads(body)["files"]
        return 200, {
            "files": [{"path": f["path"], "uploadMode": _mode(f), "shouldIgnore": False} for f in files]
        }

    def batch(self, user: str | None, body: bytes, name: str) -> Any:
        return 200, {"objects": [self._action(thing) for thing in json.loads(body)["objects"]]}

    def _action(self, thing: dict[str, Any]) -> dict[str, Any]:
        links = {what: {"href": f"{self.url}/lfs/{what}/{thing['oid']}"} for what in ("upload", "verify")}
        return {**thing, "actions": links}

    def upload(self, user: str | None, body: bytes, oid: str) -> Any:
        assert hashlib.sha256(body).hexdigest() == oid
        self.objects[oid] = body
        return 200, {}

    def verify(self, user: str | None, body: bytes, oid: str) -> Any:
        asked = json.loads(body)
        assert len(self.objects[oid]) == asked["size"]
        self.verified.add(oid)
        return 200, {}

    def commit(self, user: str | None, body: bytes, name: str, revision: str) -> Any:
        lines = [json.loads(line) for line in body.splitlines()]
        assert lines[0]["key"] == "header" and revision in self.repos[name]["branches"]
        arrived: dict[str, bytes] = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                arrived[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile" and value["oid"] in self.verified
                arrived[value["path"]] = self.objects[value["oid"]]
        self.files(name).update(arrived)
        self.repos[name]["commits"].append((revision, lines[0]["value"]["summary"]))
        return 200, {
            "success": True,
            "commitOid": "c" * 40,
            "commitUrl": f"{self.url}/{name}/commit/{'c' * 40}",
        }


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", "/api/whoami-v2", Hub.whoami),
    ("POST", "/api/repos/create", Hub.create),
    ("GET", f"/api/models/{NAME}", Hub.info),
    ("POST", "/api/validate-yaml", Hub.validate),
    ("POST", f"/api/models/{NAME}/branch/(.+)", Hub.branch),
    ("POST", f"/api/models/{NAME}/preupload/(.+)", Hub.preupload),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", Hub.batch),
    ("PUT", r"/lfs/upload/(\w+)", Hub.upload),
    ("POST", r"/lfs/verify/(\w+)", Hub.verify),
    ("POST", f"/api/models/{NAME}/commit/(.+)", Hub.commit),
]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A `Hub` that listens on ``url`` until the end."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def handle_any(self) -> None:
            body, path = self.read_body(), self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            status, answer = self.answer(path, body)
            data = json.dumps({"error": answer} if isinstance(answer, str) else answer).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            elif isinstance(answer, str):
                self.send_header("X-Error-Message", answer)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def answer(self, path: str, body: bytes) -> tuple[int, Any]:
            if hub.broken is not None and hub.broken[0] in path:
                return hub.broken[1], "out of order"
            user = TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
            for method, pattern, route in ROUTES:
                found = re.fullmatch(pattern, path)
                if self.command == method and found:
                    return route(hub, user, body, *found.groups())  # type: ignore[no-any-return]
            return 400, f"no route {self.command} {path}"

        def read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_POST = do_PUT = handle_any

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _mode(file: dict[str, Any]) -> str:
    return "lfs" if file["path"].endswith(".safetensors") else "regular"


def use_hub(hub: Hub, monkeypatch: Any, *, token: str | None = "hf_writes") -> None:
    """From here on this process asks ``hub``, with ``token``; and its files go by LFS, not by xet."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "no-such-file")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
