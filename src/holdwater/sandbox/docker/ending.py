"""Ends the processes of one command in a container, and of no other: a shell script that walks `/proc`.

It finds them by the mark that they carry and by their parents. It runs as the command's user, whose processes
cannot become another's; for root, whose can, with every capability if the daemon can give them: it takes one
to read what others carry. Where it cannot run, the container is restarted (`command.py`).
"""

from __future__ import annotations

from ...docker.client import DockerClient, DockerError
from .container import ASKING

# Builtins alone. `read` drops the NULs between the variables of an environment. To kill, all are stopped
# first, again and again until no new one is found: what forks without end would fill each place that is free.
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


class Ending:
    """Ends what carries a mark, in one container."""

    def __init__(self, client: DockerClient, container: str, user: str, mark: str) -> None:
        self._client = client
        self._container = container
        self._user = user
        self._mark = mark

    async def signal(self, name: str) -> bool:
        """Send `TERM` or `KILL` to all of them; whether the script could be run."""
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
            made = await self._client.post(f"{self._container}/exec", body=asked, seconds=ASKING)
            path = f"/exec/{made['Id']}"
            async with self._client.reading("POST", f"{path}/start", body={}, silence=ASKING) as pieces:
                async for _ in pieces:
                    pass
            told = await self._client.get(f"{path}/json", seconds=ASKING)
        except DockerError:
            return False
        return bool(told["Pid"]) and told["ExitCode"] == 0
