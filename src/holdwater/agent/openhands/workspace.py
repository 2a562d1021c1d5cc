"""The SDK's workspace on a sandbox of holdwater: its commands and files are the sandbox's.

The SDK wants a directory of this machine as the working directory of a local conversation. It gets an empty
one, the mirror, through which `editor.py` passes one file at a time. `terminal.py` has the terminal.
"""

from __future__ import annotations

import base64
import posixpath
from pathlib import Path
from typing import Any

from openhands.sdk.git.models import GitChange, GitDiff
from openhands.sdk.workspace import LocalWorkspace
from openhands.sdk.workspace.models import CommandResult, FileOperationResult
from pydantic import PrivateAttr

from ...core.errors import AttemptError, SandboxFailed
from .git_changes import list_changes, read_diff

COMMAND_SECONDS = 30.0
PIECE = 45_000  # bytes; as base64 they are less than a result keeps of a command's output
STORE_FILE = 'mkdir -p "$(dirname "$2")" && cat "$1" >"$2"; status=$?; rm -f "$1"; exit $status'
READ_PIECE = 'tail -c "+$2" "$1" | head -c "$3" | base64'


class ToolSandbox:
    """The sandbox as the tools of one conversation use it, from threads; keeps the error that ends it.

    The SDK turns every exception of a tool into an observation, so an error of the sandbox is kept here.
    """

    def __init__(self, sandbox: Any, mirror: Path) -> None:
        self._sandbox = sandbox
        self.mirror = mirror  # the sandbox's root directory, as far as the editor has needed it
        self.workdir: str = sandbox.workdir
        self.private: str = sandbox.private  # the tools' own files, which commands can read
        self.failure: AttemptError | None = None
        self.place.mkdir(parents=True)

    @property
    def place(self) -> Path:
        """The working directory in the mirror."""
        return self.locate(self.workdir)

    def locate(self, path: str) -> Path:
        """Return the place of an absolute path of the sandbox in the mirror; no path leads out of it."""
        inside = Path(*(part for part in Path(path).parts[1:] if part != ".."))
        return self.mirror / inside

    def restore_paths(self, text: str) -> str:
        """Return the text with the sandbox's paths in place of the mirror's."""
        return text.replace(str(self.mirror), "")

    def run(self, words: list[str], **options: Any) -> Any:
        return self._call(self._sandbox.run, words, **options)

    def write(self, path: str, content: str | bytes) -> None:
        self._call(self._sandbox.write, path, content)

    def read(self, path: str) -> bytes:
        """Return the content of a file anywhere in the sandbox, if its commands can read it."""
        try:
            content: bytes = self._sandbox.read(path)
        except SandboxFailed:  # not below the working directory, or not for this user
            return self._read_pieces(path)
        return content

    def _read_pieces(self, path: str) -> bytes:
        content = bytearray()
        while True:
            result = self.run(["sh", "-c", READ_PIECE, "sh", path, str(len(content) + 1), str(PIECE)])
            if not result.ok:
                raise OSError(f"cannot read {path}: {result.stderr.strip()[-500:]}")
            piece = base64.b64decode(result.stdout)
            content += piece
            if len(piece) < PIECE:
                return bytes(content)

    def _call(self, method: Any, *arguments: Any, **options: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        try:
            return method(*arguments, **options)
        except AttemptError as error:
            self.failure = error
            raise

    def check(self, event: object) -> None:
        """End the conversation, by a callback for its events, if the sandbox has failed."""
        if self.failure is not None:
            raise self.failure


class SandboxWorkspace(LocalWorkspace):
    """Commands and files of the sandbox for code that uses `conversation.workspace`."""

    _sandbox: ToolSandbox = PrivateAttr()

    def __init__(self, sandbox: ToolSandbox) -> None:
        super().__init__(working_dir=str(sandbox.place))
        self._sandbox = sandbox

    @property
    def sandbox(self) -> ToolSandbox:
        return self._sandbox

    def execute_command(
        self, command: str, cwd: str | Path | None = None, timeout: float = COMMAND_SECONDS
    ) -> CommandResult:
        inside = self._sandbox.workdir if cwd is None else self._sandbox.restore_paths(str(cwd))
        result = self._sandbox.run(["bash", "-c", command], timeout=timeout, workdir=inside)
        return CommandResult(
            command=command,
            exit_code=-1 if result.timed_out else result.exit_code,
            stdout=result.stdout,
            stderr=result.stderr,
            timeout_occurred=result.timed_out,
        )

    def file_upload(self, source_path: str | Path, destination_path: str | Path) -> FileOperationResult:
        """Copy a file of this machine to any place of the sandbox that its commands can write."""
        kept = f"{self._sandbox.private}/uploaded"
        try:
            content = Path(source_path).read_bytes()
            self._sandbox.write(kept, content)
            stored = self._sandbox.run(["sh", "-c", STORE_FILE, "sh", kept, str(destination_path)])
            if not stored.ok:
                raise OSError(stored.stderr.strip()[-500:])
        except OSError as error:
            return _describe_failure(source_path, destination_path, error)
        return _describe_copy(source_path, destination_path, len(content))

    def file_download(self, source_path: str | Path, destination_path: str | Path) -> FileOperationResult:
        try:
            content = self._sandbox.read(str(source_path))
            Path(destination_path).parent.mkdir(parents=True, exist_ok=True)
            Path(destination_path).write_bytes(content)
        except OSError as error:
            return _describe_failure(source_path, destination_path, error)
        return _describe_copy(source_path, destination_path, len(content))

    def git_changes(self, path: str | Path) -> list[GitChange]:
        return list_changes(self._sandbox, self._resolve(path))

    def git_diff(self, path: str | Path) -> GitDiff:
        return read_diff(self._sandbox, self._resolve(path))

    def _resolve(self, path: str | Path) -> str:
        return posixpath.join(self._sandbox.workdir, self._sandbox.restore_paths(str(path)))


def _describe_copy(source: str | Path, destination: str | Path, size: int) -> FileOperationResult:
    return FileOperationResult(
        success=True, source_path=str(source), destination_path=str(destination), file_size=size
    )


def _describe_failure(source: str | Path, destination: str | Path, error: OSError) -> FileOperationResult:
    return FileOperationResult(
        success=False, source_path=str(source), destination_path=str(destination), error=str(error)
    )
