"""The SDK's file editor on a sandbox: it edits a copy in the mirror, and the sandbox gets the result.

The SDK's own editor does the work, so that every text that the model sees is its own. Only one file is in the
mirror at a time, or the names of a directory that is listed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from openhands.sdk.llm import TextContent
from openhands.sdk.tool import ToolExecutor
from openhands.tools.file_editor import FileEditorAction, FileEditorObservation
from openhands.tools.file_editor.editor import FileEditor
from openhands.tools.file_editor.exceptions import ToolError
from openhands.tools.file_editor.utils.history import FileHistoryManager

from .workspace import ToolSandbox

LARGEST_FILE = (
    FileEditor.MAX_FILE_SIZE_MB * 1024 * 1024
)  # bytes; the editor refuses larger ones by their size
UNDO_STEPS = 10  # for each file
LONGEST_LISTING = 60_000  # characters of names in a directory; the editor shows fewer
# Prints what the path is, and the names in a directory.
FETCH = """
if [ -d "$1" ]; then
    echo directory
    cd "$1" || exit 1
    {
        ls -ApL
        for d in */; do [ -d "$d" ] && echo "./$d" && ls -ApL "./$d"; done
    } 2>/dev/null | head -c "$2"
elif [ -e "$1" ]; then
    size=$(wc -c <"$1") || exit 1
    echo "file $size"
elif [ -d "${1%/*}" ] || [ -z "${1%/*}" ]; then
    echo missing
else
    echo nowhere
fi
"""
STORE = 'cat "$1" >"$2"'  # keeps the mode and the owner of the file


class FetchedPath(NamedTuple):
    """What a path of the sandbox is: `file`, `directory`, `missing`, or `nowhere` without its parent."""

    kind: str
    size: int = 0
    names: str = ""


class EditorExecutor(ToolExecutor[FileEditorAction, FileEditorObservation]):
    """Executes the actions of the SDK's file editor."""

    def __init__(self, sandbox: ToolSandbox, editor: FileEditor) -> None:
        self._sandbox = sandbox
        self._editor = editor
        self._content = f"{sandbox.private}/edited"
        history = sandbox.mirror.with_name("history")
        shutil.rmtree(
            editor._history_manager.cache.directory, ignore_errors=True
        )  # it lies outside of the run
        editor._history_manager = FileHistoryManager(max_history_per_file=UNDO_STEPS, history_dir=history)

    def __call__(self, action: FileEditorAction, conversation: object = None) -> FileEditorObservation:
        absolute = action.path.startswith("/")
        inside = action.path if absolute else f"{self._sandbox.workdir}/{action.path}"
        try:
            with self._mirror(inside, action) as copy:
                observation = self._edit(action, str(copy) if absolute else action.path)
                if action.command != "view" and not observation.is_error:
                    self._store(inside, copy.read_bytes())
        except (ToolError, OSError) as error:
            text = error.message if isinstance(error, ToolError) else str(error)
            observation = FileEditorObservation.from_text(text=text, command=action.command, is_error=True)
        return self._restore_paths(observation)

    def _edit(self, action: FileEditorAction, path: str) -> FileEditorObservation:
        return self._editor(
            command=action.command,
            path=path,
            file_text=action.file_text,
            view_range=action.view_range,
            old_str=action.old_str,
            new_str=action.new_str,
            insert_line=action.insert_line,
        )

    @contextmanager
    def _mirror(self, inside: str, action: FileEditorAction) -> Iterator[Path]:
        """Show the file or the directory in the mirror during one action."""
        copy = self._sandbox.locate(inside)
        try:
            found = self._fetch(inside)
            if found.kind == "directory":
                copy.mkdir(parents=True, exist_ok=True)
                self._make_names(copy, found.names)
            elif found.kind == "file":
                copy.parent.mkdir(parents=True, exist_ok=True)
                self._copy_file(inside, copy, found.size)
            elif found.kind == "nowhere" and action.command == "create":
                raise ToolError(f"Ran into a missing directory while trying to write to {inside}")
            else:
                copy.parent.mkdir(parents=True, exist_ok=True)
            yield copy
        finally:
            shutil.rmtree(self._sandbox.mirror, ignore_errors=True)
            self._sandbox.place.mkdir(parents=True)

    def _fetch(self, inside: str) -> FetchedPath:
        result = self._sandbox.run(["sh", "-c", FETCH, "sh", inside, str(LONGEST_LISTING)])
        if not result.ok:
            raise ToolError(f"Ran into {_find_reason(result.stderr)} while trying to read {inside}")
        first, _, names = result.stdout.partition("\n")
        kind, _, size = first.partition(" ")
        return FetchedPath(kind, int(size or 0), names)

    def _copy_file(self, inside: str, copy: Path, size: int) -> None:
        if size <= LARGEST_FILE:
            copy.write_bytes(self._sandbox.read(inside))
            return
        with copy.open("wb") as file:
            file.truncate(size)  # it takes no space, and is refused by its size

    def _make_names(self, copy: Path, listing: str) -> None:
        """Create empty files and directories from the output of `ls -Ap`."""
        place = copy
        for line in listing.splitlines():
            if line.startswith("./") and line.endswith("/"):
                place = copy / line[2:-1]
            elif line.endswith("/"):
                (place / line[:-1]).mkdir(parents=True, exist_ok=True)
            elif line and "/" not in line:
                place.mkdir(parents=True, exist_ok=True)
                (place / line).touch()

    def _store(self, inside: str, content: bytes) -> None:
        self._sandbox.write(self._content, content)
        result = self._sandbox.run(["sh", "-c", STORE, "sh", self._content, inside])
        if not result.ok:
            raise ToolError(f"Ran into {_find_reason(result.stderr)} while trying to write to {inside}")

    def _restore_paths(self, observation: FileEditorObservation) -> FileEditorObservation:
        restore = self._sandbox.restore_paths
        content = [
            TextContent(text=restore(part.text)) if isinstance(part, TextContent) else part
            for part in observation.content
        ]
        changes: dict[str, Any] = {"content": content}
        if observation.path is not None:
            changes["path"] = restore(observation.path)
        return observation.model_copy(update=changes)


def _find_reason(stderr: str) -> str:
    """Return the last part of a shell's error, such as `Permission denied`."""
    return stderr.strip().rpartition(": ")[2] or "an error"
