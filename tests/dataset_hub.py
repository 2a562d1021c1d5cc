"""A hub of datasets on loopback, with the part of the Hugging Face API that the `datasets` package uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow
from pyarrow import parquet

Rows = Sequence[Mapping[str, Any]]
CARD = """---
configs:
- config_name: default
  data_files:
  - {split: test, path: data/test-*}
  - {split: dev, path: data/dev-*}
---
"""


class HubDataset:
    """One dataset: its commits, each with rows by split, and the names of commits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refs: dict[str, str] = {}
        self.files: dict[str, dict[str, bytes]] = {}  # commit -> path -> content

    def commit(self, ref: str, splits: Mapping[str, Rows]) -> str:
        """Add a commit that `ref` and `main` name; return it."""
        files = {"README.md": CARD.encode()}
        for split, rows in splits.items():
            sink = pyarrow.BufferOutputStream()
            parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), sink)
            files[f"data/{split}-00000-of-00001.parquet"] = sink.getvalue().to_pybytes()
        commit = hashlib.sha1(b"".join(files.values())).hexdigest()
        self.files[commit] = files
        self.refs |= {ref: commit, "main": commit}
        return commit

    def resolve(self, ref: str) -> str | None:
        return self.refs.get(ref, ref if ref in self.files else None)

    def describe(self, commit: str) -> dict[str, Any]:
        siblings = [{"rfilename": path} for path in self.files[commit]]
        return {"id": self.name, "sha": commit, "private": False, "tags": [], "siblings": siblings}

    def list_tree(self, commit: str, directory: str) -> list[dict[str, Any]]:
        """List the files and directories directly in `directory`."""
        top = f"{directory}/" if directory else ""
        inside = {path: content for path, content in self.files[commit].items() if path.startswith(top)}
        directories = {top + path[len(top) :].partition("/")[0] for path in inside if "/" in path[len(top) :]}
        return [
            *({"type": "directory", "oid": "0", "size": 0, "path": path} for path in sorted(directories)),
            *(
                {"type": "file", "oid": _digest(content), "size": len(content), "path": path}
                for path, content in inside.items()
                if "/" not in path[len(top) :]
            ),
        ]


@contextmanager
def serve_dataset(dataset: HubDataset) -> Iterator[str]:
    """Yield the URL of a hub that has one dataset."""

    class Handler(HubHandler):
        hub = dataset

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubDataset

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        for start, answer in (
            (f"/api/datasets/{self.hub.name}/revision/", self.send_description),
            (f"/api/datasets/{self.hub.name}/tree/", self.send_tree),
            (f"/datasets/{self.hub.name}/resolve/", self.send_file),
        ):
            if path.startswith(start):
                ref, _, rest = path.removeprefix(start).partition("/")
                commit = self.hub.resolve(ref)
                return answer(commit, rest) if commit else self.send_missing("RevisionNotFound")
        self.send_missing("RepoNotFound")

    do_HEAD = do_GET

    def send_description(self, commit: str, rest: str) -> None:
        self.send_content(json.dumps(self.hub.describe(commit)).encode())

    def send_tree(self, commit: str, directory: str) -> None:
        self.send_content(json.dumps(self.hub.list_tree(commit, directory)).encode())

    def send_file(self, commit: str, path: str) -> None:
        content = self.hub.files[commit].get(path)
        if content is None:
            return self.send_missing("EntryNotFound")
        self.send_content(content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": commit})

    def send_content(self, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def send_missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        return


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
