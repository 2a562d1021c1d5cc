"""The SDK's terminal in a sandbox: one bash for a conversation, which keeps its directory and variables.

The bash runs in one command of the sandbox for as long as the conversation lasts. Each exchange with it is
another command, which hands over keys and waits for the prompt. The SDK's own session reads the screen.
"""

from __future__ import annotations

import shlex
import threading
from typing import Any

from openhands.sdk.llm import TextContent
from openhands.sdk.tool import ToolExecutor
from openhands.tools.terminal import TerminalAction, TerminalObservation
from openhands.tools.terminal.constants import CMD_OUTPUT_PS1_BEGIN, CMD_OUTPUT_PS1_END
from openhands.tools.terminal.metadata import CmdOutputMetadata
from openhands.tools.terminal.terminal.interface import TerminalInterface
from openhands.tools.terminal.terminal.terminal_session import TerminalSession

from ...core.errors import AttemptError
from .workspace import ToolSandbox

START_SECONDS = 30  # for the first prompt
WAIT_SECONDS = 1  # for the prompt, in one exchange; the session decides how often
EXCHANGE_SECONDS = 30.0  # beyond its wait, for an exchange on a busy machine
LONGEST_SCREEN = 1024 * 1024  # characters; the session shows 30,000
ENDED = 3  # exit status of an exchange with a bash that has ended

# Runs bash, on a terminal of its own if the sandbox has `script`. The pipe stays open for all writers. The
# files are in `$1` in the directory for temporary files; the settings of bash are in `$2`.
HOST = """
place=${TMPDIR:-/tmp}/$1
mkdir -p "$place" && mkfifo "$place/in" "$place/idle" && : >"$place/out" && echo 0 >"$place/offset" || exit 1
exec 3<>"$place/in"
if command -v script >/dev/null 2>&1; then
    SHELL=/bin/sh script -q -f -c "exec bash --noediting --rcfile '$2' -i" /dev/null <&3 >"$place/out" 2>&1
else
    bash --noediting --rcfile "$2" -i <&3 >"$place/out" 2>&1
fi
: >"$place/ended"
"""
SETTINGS = """
__place="${{TMPDIR:-/tmp}}/{name}"
[ -r ~/.bashrc ] && . ~/.bashrc
set +H
stty -echo cols 256 rows 200 2>/dev/null
PS2=
PROMPT_COMMAND={prompt}
"""
# Hands over the keys in the file `$3`, if there are any, waits for the prompt or for the end, and prints the
# new part of the screen. `read` sleeps.
EXCHANGE = """
place=${TMPDIR:-/tmp}/$1 end=$((SECONDS + $2))
until [ -e "$place/offset" ]; do sleep 0.05; [ "$SECONDS" -le "$end" ] || exit 1; done
cd "$place" && exec 4<>idle || exit 1
if [ -n "$3" ]; then rm -f done; cat "$3" >in; fi
until [ -e done ] || [ -e ended ] || [ "$SECONDS" -gt "$end" ]; do read -t 0.02 -u 4; done
if [ -e done ]; then
    for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        case $(tail -c 40 out) in *"$4"*) break ;; esac
        read -t 0.02 -u 4
    done
fi
offset=$(cat offset)
size=$(wc -c <out)
tail -c "+$((offset + 1))" out | head -c "$((size - offset))"
echo "$size" >offset
[ ! -e ended ] || exit 3
"""
KEYS = {"ENTER": "\n", "TAB": "\t", "BS": "\x7f", "ESC": "\x1b"}
ARROWS = {"UP": "A", "DOWN": "B", "RIGHT": "C", "LEFT": "D", "HOME": "H", "END": "F"}
PAGES = {"PGUP": "5~", "PGDN": "6~"}
RESET_TEXT = "The terminal was reset: a new shell has started, without the earlier variables and directory."
ENDED_TEXT = (
    "The shell of the terminal has ended, and with it this command. A new shell starts with the next "
    "command, in the first working directory and without the earlier variables."
)


class ShellEnded(Exception):
    """The bash of a terminal has ended: by `exit`, or because it was killed."""


class SandboxTerminal(TerminalInterface):
    """The SDK's interface of a terminal, for one bash in the sandbox."""

    def __init__(self, sandbox: ToolSandbox, number: int) -> None:
        super().__init__(sandbox.workdir)
        self._sandbox = sandbox
        self._name = f".openhands-terminal-{number}"
        self._own = f"{sandbox.private}/terminal"  # prefix of its files that commands only read
        self._screen = ""  # bound: LONGEST_SCREEN
        self._keys = ""  # not yet handed over
        self._running = False  # the prompt has not come back since the last keys

    def initialize(self) -> None:
        prompt = f'export PS1="{CmdOutputMetadata.to_ps1_prompt()}"; : >"$__place/done"'
        settings = SETTINGS.format(name=self._name, prompt=shlex.quote(prompt))
        self._sandbox.write(f"{self._own}-settings", settings)
        threading.Thread(target=self._host, name="openhands-terminal", daemon=True).start()
        self._initialized = True
        self._exchange(START_SECONDS)
        if self._running:
            raise RuntimeError(f"the terminal has no prompt after {START_SECONDS} s: {self._screen[-500:]}")

    def _host(self) -> None:
        """Run bash until it ends. Its last output is in the exchanges; an error is kept by the sandbox."""
        words = ["sh", "-c", HOST, "sh", self._name, f"{self._own}-settings"]
        env = {"TERM": "xterm-256color", "PAGER": "cat", "GIT_PAGER": "cat"}
        try:
            self._sandbox.run(words, env=env)
        except AttemptError:
            return

    def close(self) -> None:
        self._closed = True
        if self._initialized and self._sandbox.failure is None:
            self._send("\x03" if self._running else "")
            self._send("exit\n")

    def send_keys(self, text: str, enter: bool = True) -> None:
        special = _find_special(text)
        if special is not None:
            self._keys += special
        elif self._running or not enter:
            self._keys += text + ("\n" if enter else "")
        else:  # a file, because a terminal cuts lines of more than 4096 bytes
            self._sandbox.write(f"{self._own}-command", text)
            self._screen += text + "\n"  # as an echo would: the session removes it
            self._keys += f" eval \"$(<'{self._own}-command')\"\n"
        self._running = True

    def read_screen(self) -> str:
        if self._running:
            self._exchange(WAIT_SECONDS)
        return self._screen

    def clear_screen(self) -> None:
        """Drop everything before the last prompt."""
        at = self._screen.rfind(CMD_OUTPUT_PS1_BEGIN)
        self._screen = self._screen[at:] if at >= 0 else ""

    def interrupt(self) -> bool:
        if self._running:
            self._send("\x03")
        return self._running

    def is_running(self) -> bool:
        return self._running

    def _exchange(self, seconds: int) -> None:
        keys, self._keys = self._keys, ""
        result = self._send(keys, seconds)
        self._screen = (self._screen + result.stdout.replace("\r", ""))[-LONGEST_SCREEN:]
        if result.exit_code == ENDED:
            raise ShellEnded
        if not result.ok:
            raise RuntimeError(f"cannot reach the terminal: {result.output.strip()[-500:]}")
        self._running = not self._screen.rstrip().endswith(CMD_OUTPUT_PS1_END.strip())

    def _send(self, keys: str, seconds: int = 0) -> Any:
        file = f"{self._own}-keys" if keys else ""
        if keys:
            self._sandbox.write(file, keys)
        words = ["bash", "-c", EXCHANGE, "bash", self._name, str(seconds), file, CMD_OUTPUT_PS1_END.strip()]
        return self._sandbox.run(words, timeout=seconds + EXCHANGE_SECONDS)


class TerminalExecutor(ToolExecutor[TerminalAction, TerminalObservation]):
    """Executes the actions of the SDK's terminal tool; the shell starts with the first one."""

    def __init__(self, sandbox: ToolSandbox) -> None:
        self._sandbox = sandbox
        self._session: TerminalSession | None = None
        self._count = 0

    def __call__(self, action: TerminalAction, conversation: object = None) -> TerminalObservation:
        if action.reset and action.is_input:
            raise ValueError("`reset` cannot be used with `is_input`")
        if action.reset:
            self.close()
            if not action.command.strip():
                return TerminalObservation.from_text(text=RESET_TEXT, command="[RESET]", exit_code=0)
        try:
            observation = self._open_session().execute(action)
        except ShellEnded:
            self._session = None
            return TerminalObservation.from_text(text=ENDED_TEXT, command=action.command, is_error=True)
        if not action.reset:
            return observation
        content = [TextContent(text=f"{RESET_TEXT}\n\n{observation.text}")]
        return observation.model_copy(update={"content": content, "command": f"[RESET] {action.command}"})

    def interrupt(self) -> None:
        if self._session is not None:
            self._session.interrupt()

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _open_session(self) -> TerminalSession:
        if self._session is None:
            self._count += 1
            session = TerminalSession(SandboxTerminal(self._sandbox, self._count))
            session.initialize()
            self._session = session
        return self._session


def _find_special(text: str) -> str | None:
    """Return the characters of a key that has a name, such as `C-c`; None if the text is no such name."""
    name = text.strip().upper()
    for prefix in ("C-", "CTRL-", "CTRL+"):
        letter = name.removeprefix(prefix)
        if name.startswith(prefix) and len(letter) == 1 and "A" <= letter <= "Z":
            return chr(ord(letter) & 0x1F)
    if name in ARROWS or name in PAGES:
        return f"\x1b[{ARROWS.get(name) or PAGES[name]}"
    return KEYS.get(name)
