"""A hub on this machine: it speaks as much of the protocols of Hugging Face and ModelScope as a download needs.

What may go wrong on the way is set on `HubServer`: a status, a code, a token that is asked for, an end in the middle.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BRANCHES = ("main", "master", COMMIT)


@dataclass
class HubServer:
    """A hub's repositories by name, each a mapping of file names to contents, and a record of the requests."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range header of every request."""
    token: str | None = None
    """The token that every request must bring."""
    gated: bool = False
    status: int = 0
    """The HTTP status of an error that every request gets; 0 means none."""
    cuts: dict[str, int] = field(default_factory=dict)
    """By file name, the number of bytes after which the connection ends, once."""
    damaged: set[str] = field(default_factory=set)
    """Files that arrive with another first byte."""
    wait: threading.Event | None = None
    """An event that a cut file's connection waits for before it ends."""
    store: str = ""
    """The address of another server that keeps the files of weights, as large hubs do."""
    authorizations: list[str] = field(default_factory=list)
    """The tokens that came with requests."""
    url: str = ""

    def add(self, name: str, folder: Path) -> None:
        """Offer the files of a folder as the repository `name`."""
        files = (path for path in folder.rglob("*") if path.is_file())
        self.repositories[name] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    def downloads(self, file: str) -> list[str]:
        """Return the Range header of each request for the content of a file."""
        return [ranged for method, path, ranged in self.requests if method == "GET" and path.endswith(file)]

    def __enter__(self) -> HubServer:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        parts = urlsplit(self.path)
        query, path = parse_qs(parts.query), unquote(parts.path).strip("/")
        file = query.get("FilePath", [path])[0]
        self.hub.requests.append((self.command, file, self.headers.get("Range", "")))
        self.hub.authorizations.append(self.headers.get("Authorization", ""))
        if self.hub.status:
            return self._error(self.hub.status, "")
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._error(401, "RepoNotFound")
        if path.startswith("api/v1/models/"):
            return self._modelscope(path.removeprefix("api/v1/models/"), query, has_body)
        return self._hugging_face(path, has_body)

    def _hugging_face(self, path: str, has_body: bool) -> None:
        words = path.removeprefix("api/models/").split("/")
        files = self.hub.repositories.get("/".join(words[:2]))
        if files is None:
            return self._error(404, "RepoNotFound")
        if len(words) > 3 and words[3] not in BRANCHES:
            return self._error(404, "RevisionNotFound")
        if words[2:3] == ["resolve"]:
            if self.hub.gated:
                return self._error(403, "GatedRepo")
            return self._file("/".join(words[4:]), files, has_body)
        if words[2:3] == ["tree"]:
            return self._json([{"type": "file", "path": name, "size": len(content), **_lfs(content)}
                               for name, content in files.items()])  # fmt: skip
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        return self._json({"id": "/".join(words[:2]), "sha": COMMIT, "siblings": siblings})

    def _modelscope(self, path: str, query: dict[str, list[str]], has_body: bool) -> None:
        words = path.split("/")
        files = self.hub.repositories.get("/".join(words[:2]))
        if files is None or query.get("Revision", ["master"])[0] not in BRANCHES:
            return self._json({"Code": 10010205001, "Message": "not found", "Success": False}, status=404)
        if words[2:] == ["repo", "files"]:
            entries = [
                {"Name": name, "Path": name, "Size": len(content), "Type": "blob",
                 "Sha256": hashlib.sha256(content).hexdigest()}
                for name, content in files.items()
            ]  # fmt: skip
            return self._json({"Code": 200, "Success": True, "Data": {"Files": entries}})
        return self._file(query["FilePath"][0], files, has_body)

    def _file(self, name: str, files: dict[str, bytes], has_body: bool) -> None:
        if name not in files:
            return self._error(404, "EntryNotFound")
        content = files[name]
        if self.hub.store and name.endswith(".safetensors"):
            linked = {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
            return self._head(302, 0, {"Location": self.hub.store + self.path, "X-Repo-Commit": COMMIT, **linked})
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if name in self.hub.damaged:
            content = bytes([content[0] ^ 1]) + content[1:]
        start = 0
        if ranged := self.headers.get("Range"):
            start, _, end = ranged.removeprefix("bytes=").partition("-")
            start, end = int(start), int(end or len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content = content[start : end + 1]
        self._head(206 if ranged else 200, len(content), headers)
        if has_body and name in self.hub.cuts:
            self.wfile.write(content[: self.hub.cuts.pop(name)])
            self.wfile.flush()
            if self.hub.wait is not None:
                self.hub.wait.wait(30)
            self.close_connection = True
        elif has_body:
            self.wfile.write(content)

    def _json(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self._head(status, len(body), {"Content-Type": "application/json"})
        if self.command == "GET":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": f"error {code}"} if code else {}
        self._head(status, 0, headers)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def _lfs(content: bytes) -> dict[str, object]:
    digest = hashlib.sha256(content).hexdigest()
    return {"oid": digest, "lfs": {"oid": digest, "size": len(content), "pointerSize": 130}}
