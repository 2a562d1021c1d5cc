"""Ends the processes of one command in a container, and of no other: a shell script that walks `/proc`.

It finds them by the mark that they carry and by their parents. It runs as root, with every capability, as
only so may it read what others carry. Where it cannot run, the container is restarted (`command.py`).
"""

from __future__ import annotations

from ...docker.client import DockerClient, DockerError
from .container import ASKING

# Builtins alone. `read` drops the NULs between the variables of an environment. To kill, all are stopped
# first, over and over until no new one is found: what forks without end would fill each place that becomes free.
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


async def signal_marked(client: DockerClient, container: str, signal: str, mark: str) -> bool:
    """Send `TERM` or `KILL` to all that carry `mark`; whether the script could be run."""
    asked = {
        "Cmd": ["sh", "-c", SCRIPT, "sh", signal, mark],
        "User": "0",
        "Privileged": True,
        "AttachStdout": True,
        "AttachStderr": True,
    }
    try:
        made = await client.post(f"{container}/exec", body=asked, seconds=ASKING)
        path = f"/exec/{made['Id']}"
        async with client.reading("POST", f"{path}/start", body={}, silence=ASKING) as pieces:
            async for _ in pieces:
                pass
        told = await client.get(f"{path}/json", seconds=ASKING)
    except DockerError:
        return False
    return bool(told["Pid"]) and told["ExitCode"] == 0
