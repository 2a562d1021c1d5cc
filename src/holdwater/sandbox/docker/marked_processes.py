"""Signals the processes of one command in a container, and no others, by a shell script that walks `/proc`.

The script finds processes by the mark in their environment and by their parents. It runs as the command's
user, whose processes cannot change to another user. Root's processes can: for root the script runs with every
capability if the daemon grants them, as reading the environment of other users' processes needs one. If the
script cannot run, `command.py` restarts the container.
"""

from __future__ import annotations

from ...docker.client import DockerClient, DockerError
from .container import REQUEST_TIMEOUT

# The script uses shell builtins only. `read` drops the NULs between the variables of an environment. For
# KILL, all processes are stopped first, repeatedly until no new one is found: a process that forks without
# end would otherwise fill each slot that becomes free.
SCRIPT = """
signal=$1 mark=$2 found=' '
belongs() {
    { read -r line < "$1/stat"; } 2>/dev/null || return 1
    set -- "$1" ${line##*) }
    case $found in *" $3 "*) return 0 ;; esac
    while read -r line || [ "$line" ]; do
        case $line in *"$mark"*) return 0 ;; esac
    done 2>/dev/null < "$1/environ"
    return 1
}
look() {
    new=
    for place in /proc/[0-9]*; do
        pid=${place#/proc/}
        case $found in *" $pid "*) continue ;; esac
        if [ "$pid" != 1 ] && [ "$pid" != $$ ] && belongs "$place"; then
            kill -s "$1" "$pid" 2>/dev/null
            found="$found$pid "
            new=1
        fi
    done
    [ "$new" ]
}
if [ "$signal" = KILL ]; then
    while look STOP; do :; done
    [ "$found" = ' ' ] || kill -s KILL $found 2>/dev/null
else
    look "$signal"
fi
[ -r /proc/1/stat ]
"""


class MarkedProcesses:
    """Signals the processes that carry a mark in one container."""

    def __init__(self, client: DockerClient, container: str, user: str, mark: str) -> None:
        self._client = client
        self._container = container
        self._user = user
        self._mark = mark

    async def signal(self, name: str) -> bool:
        """Send `TERM` or `KILL` to all processes with the mark; return whether the script could run."""
        as_root = self._user.partition(":")[0] in ("", "root", "0")
        return (as_root and await self._run(name, privileged=True)) or await self._run(name, privileged=False)

    async def _run(self, name: str, privileged: bool) -> bool:
        asked = {
            "Cmd": ["sh", "-c", SCRIPT, "sh", name, self._mark],
            "User": self._user or "0",
            "Privileged": privileged,
            "AttachStdout": True,
            "AttachStderr": True,
        }
        try:
            made = await self._client.post(f"{self._container}/exec", body=asked, seconds=REQUEST_TIMEOUT)
            path = f"/exec/{made['Id']}"
            async with self._client.open_body(
                "POST", f"{path}/start", body={}, silence=REQUEST_TIMEOUT
            ) as pieces:
                async for _ in pieces:
                    pass
            told = await self._client.get(f"{path}/json", seconds=REQUEST_TIMEOUT)
        except DockerError:
            return False
        return bool(told["Pid"]) and told["ExitCode"] == 0
