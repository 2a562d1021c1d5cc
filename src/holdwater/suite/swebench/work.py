"""The agent's work in a repository: remembers how it was found, takes what changed, applies patches.

All of it is done by git in the sandbox, with an index of our own and none of the repository's hooks, filters
or settings that an agent may have changed. Paths are relative to the working directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.authoring import GradingSandbox
from ...core.errors import AgentFailed, GradeFailed, SandboxFailed
from ...core.records import CommandResult, Instance, MiB

LARGEST_PATCH = 16 * MiB
TOO_LARGE = 75
NOT_APPLIED = 76
TAKEN = ".git/holdwater.patch"
GIVEN = ".git/holdwater.diff"

# Everything that an agent could have set is set here instead. Replaced objects are not looked at.
GIT = """\
export GIT_NO_REPLACE_OBJECTS=1 GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0
g() {
  git --git-dir=.git --work-tree=. -c safe.directory='*' -c core.hooksPath=/dev/null \\
    -c core.fsmonitor=false -c core.untrackedCache=false -c core.splitIndex=false -c core.autocrlf=false \\
    -c core.sparseCheckout=false -c core.attributesFile=/dev/null -c core.quotePath=true -c gc.auto=0 \\
    -c user.name=holdwater -c user.email=holdwater@localhost "$@"
}
"""

# In a sandbox begun anew. With the directory given, nobody asks whose it is.
PLAIN_GIT = """g() { git --git-dir=.git --work-tree=. -c core.hooksPath=/dev/null "$@" ; }"""

# The whole working directory as a tree. Nested repositories without a commit make `add -A` give up.
TREE = """\
export GIT_INDEX_FILE=.git/holdwater.index
rm -rf .git/holdwater.index .git/holdwater.index.lock
g read-tree "$from"
g add -A --ignore-errors . 2>/dev/null || {
  g add -u . ; g ls-files -z --others --exclude-standard | grep -zv '/$' | g update-index -z --add --stdin
}
tree=$(g write-tree)
rm -f .git/holdwater.index
"""

REMEMBER = f"""\
set -eu
{GIT}
from=HEAD
{TREE}
base=$(g rev-parse --verify HEAD)
if [ "$tree" != "$(g rev-parse --verify 'HEAD^{{tree}}')" ]; then
  base=$(g commit-tree -p HEAD -m 'the repository as it was found' "$tree")
fi
g update-ref refs/holdwater/base "$base"
"""

TAKE = f"""\
set -eu
{GIT}
from=refs/holdwater/base
{TREE}
rm -rf {TAKEN}
g diff --binary --full-index --no-renames --no-color --no-ext-diff --no-textconv --ignore-submodules=none \\
  --src-prefix=a/ --dst-prefix=b/ --unified=3 refs/holdwater/base "$tree" > {TAKEN}
[ "$(wc -c < {TAKEN})" -le {LARGEST_PATCH} ] || exit {TOO_LARGE}
"""

# The ways that the reference tries, in its order; a failed one must leave nothing behind.
APPLY = f"""\
command -v git > /dev/null || exit 127
{PLAIN_GIT}
clean() {{ g checkout -q -- . ; g clean -qfd ; }}
g apply --verbose {GIVEN} && exit
clean ; g apply --verbose --3way {GIVEN} && exit
clean ; g apply --verbose --reject {GIVEN} && exit
clean ; patch --batch --forward --fuzz=5 -p1 -i {GIVEN} && exit
g apply --check --reverse {GIVEN} && exit
exit {NOT_APPLIED}
"""

# Files as they are in a commit: what is not in it goes.
RESTORE = f"""\
base=$1 ; shift
{PLAIN_GIT}
g cat-file -e "$base^{{commit}}" || exit
for file; do
  rm -rf "./$file" || exit
  if g cat-file -e "$base:$file" 2>/dev/null; then g checkout -q "$base" -- "$file" || exit ; fi
done
"""


async def remember(instance: Instance, sandbox: GradingSandbox) -> None:
    """Note how the repository was found: what was changed before the agent came is not its work."""
    result = await sandbox.run(["sh", "-c", REMEMBER])
    if not result.ok:
        raise SandboxFailed(
            f"no git repository to work in, in `{sandbox.workdir}`: {told(result)}",
            hint="`?workdir=` says where it is in the image",
            kind="setup",
        )


async def take(instance: Instance, sandbox: GradingSandbox, answer: Any) -> str:
    """The agent's work as a patch: what it answered, where that is one, or what it changed."""
    if isinstance(answer, Mapping) and "model_patch" in answer:
        return _given(answer["model_patch"])
    result = await sandbox.run(["sh", "-c", TAKE])
    if result.exit_code == TOO_LARGE:
        raise GradeFailed(
            f"the agent's patch is larger than {LARGEST_PATCH // MiB} MiB", kind="patch", again=False
        )
    if not result.ok:
        raise GradeFailed(f"the agent's work cannot be taken as a patch: {told(result)}", kind="patch")
    return (await sandbox.read(TAKEN)).decode("utf-8", "surrogateescape")


async def apply(patch: str, sandbox: GradingSandbox) -> CommandResult | None:
    """Apply it in one of the reference's ways; what was said if it cannot be."""
    await sandbox.write(GIVEN, patch.encode("utf-8", "surrogateescape"))
    result = await sandbox.run(["sh", "-c", APPLY])
    if result.exit_code not in (0, NOT_APPLIED) or result.timed_out:
        raise GradeFailed(f"the patch could not be tried: {told(result)}", kind="patch")
    return None if result.ok else result


async def restore(base: str, files: Sequence[str], sandbox: GradingSandbox) -> None:
    """Put these files back to how they are in the commit `base`."""
    if not files:
        return
    result = await sandbox.run(["sh", "-c", RESTORE, "sh", base, *files])
    if not result.ok:
        raise GradeFailed(f"the files of the tests cannot be put back: {told(result)}", kind="restore")


def told(result: CommandResult) -> str:
    """The end of what a command said, in a line."""
    return " ".join(result.output.split())[-500:] or f"status {result.exit_code}"


def _given(patch: Any) -> str:
    if patch is None:
        return ""
    if not isinstance(patch, str):
        raise AgentFailed(f"`model_patch` must be text, not {type(patch).__name__}", kind="answer")
    return patch
