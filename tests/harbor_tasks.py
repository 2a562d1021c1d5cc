"""A tree of Harbor tasks of every kind, written where a test wants it: oracle scores 1 on each, nop 0.

`processes/` has those that need no image of their own: with an image they run in containers too.
`containers/` has those that run there only.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

WORD = "HARBOR_SCENE_WORD"  # what the tasks ask the environment for

REWARD = 'reward() { echo "$1" > /logs/verifier/reward.txt; }\n'


def write(root: Path, image: str | None = None) -> list[str]:
    """Write the tree; the ids of its tasks. Without an image there is nothing below `containers/`."""
    for make in PROCESSES:
        make(root / "processes", image)
    if image is not None:
        for make in CONTAINERS:
            make(root / "containers", image)
    return sorted(_id(path.parent, root) for path in root.rglob("task.toml"))


def task(directory: Path, toml: str = "", *, image: str | None = None, **files: str) -> Path:
    """One task: keys of `files` are paths, with `__` for `/` and `_sh`, `_md`, `_txt` at their end."""
    directory.mkdir(parents=True)
    toml = textwrap.dedent(toml)
    if image is not None:
        head, table, rest = toml.partition("[environment]\n")
        toml = f'{head}[environment]\ndocker_image = "{image}"\n{rest}'
        toml += "\n[metadata]\nholdwater_processes = true\n"
        assert table or not rest
    given = {
        "instruction_md": "Write `yes` to answer.txt.",
        "tests__test_sh": TEST,
        "solution__solve_sh": SOLVE,
    }
    given = {} if "[[steps]]" in toml else given
    for name, content in {**given, **files}.items():
        path = directory / name.replace("__", "/").replace("_sh", ".sh").replace("_md", ".md").replace(
            "_txt", ".txt"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_script(content) if path.suffix == ".sh" else textwrap.dedent(content))
        if path.suffix == ".sh":
            path.chmod(0o755)
    (directory / "task.toml").write_text(f'schema_version = "1.4"\n{toml}' if "version" not in toml else toml)
    return directory


TEST = '[ "$(cat answer.txt 2>/dev/null)" = yes ] && reward 1 || reward 0'
SOLVE = "echo yes > answer.txt"


def _script(content: str) -> str:
    return f"#!/bin/sh\n{REWARD}{textwrap.dedent(content)}\n"


def _id(directory: Path, root: Path) -> str:
    named = [
        line for line in (directory / "task.toml").read_text().splitlines() if line.startswith('name = "org/')
    ]
    return named[0].split('"')[1] if named else str(directory.relative_to(root))


def text(place: Path, image: str | None) -> None:
    """A reward as a number, and a verifier whose status says nothing."""
    task(place / "text", image=image, tests__test_sh=f"{TEST}\nexit 3")


def numbers(place: Path, image: str | None) -> None:
    """`reward.json` wins over `reward.txt`."""
    test = """
    reward 0
    r=0; [ "$(cat answer.txt 2>/dev/null)" = yes ] && r=1
    printf '{"reward": %s, "style": 0.5}' "$r" > /logs/verifier/reward.json
    """
    task(place / "json", image=image, tests__test_sh=test)


def named(place: Path, image: str | None) -> None:
    """A name of its own, and scripts that are not executable."""
    path = task(place / "named", '[task]\nname = "org/named"\nkeywords = ["a"]\n', image=image)
    (path / "tests" / "test.sh").chmod(0o644)
    (path / "solution" / "solve.sh").chmod(0o644)


def placed(place: Path, image: str | None) -> None:
    """A working directory by its path, with files in it; without an image they come from `environment/`."""
    toml = '[environment]\nworkdir = "/app"\n'
    files = {"environment__given_txt": "yes", "solution__solve_sh": "cp /app/given.txt /app/answer.txt"}
    files["tests__test_sh"] = "cd /\n" + TEST.replace("answer.txt", "/app/answer.txt")
    path = task(place / "placed", toml, **files)
    if image is not None:
        (path / "environment" / "Dockerfile").write_text(
            f"FROM {image}\nWORKDIR /app\nCOPY given.txt /app/\n"
        )


def mean(place: Path, image: str | None) -> None:
    """Steps whose rewards are averaged; each has files of its own, the second a set-up and a health check."""
    toml = """
    [agent]
    timeout_sec = 60.0
    [[steps]]
    name = "one"
    [[steps]]
    name = "two"
    [steps.agent]
    timeout_sec = 30.0
    [steps.healthcheck]
    command = "test -e made-by-setup"
    interval_sec = 0.1
    """
    task(
        place / "mean",
        toml,
        image=image,
        steps__one__instruction_md="Write `yes` to one.txt.",
        steps__one__workdir__brought_txt="one",
        steps__one__tests__test_sh=TEST.replace("answer", "one"),
        steps__one__solution__solve_sh="cat brought.txt && echo yes > one.txt",
        steps__two__instruction_md="Write `yes` to two.txt.",
        steps__two__workdir__setup_sh="touch made-by-setup",
        steps__two__tests__test_sh="[ -e one.txt ] && " + TEST.replace("answer", "two"),
        steps__two__solution__solve_sh="[ ! -e /tests/test.sh ] && echo yes > two.txt",
    )


def final(place: Path, image: str | None) -> None:
    """Steps of which the last counts, gated: shared tests, and a solution for all."""
    toml = """
    multi_step_reward_strategy = "final"
    [[steps]]
    name = "first"
    min_reward = 0.5
    [[steps]]
    name = "last"
    min_reward = { reward = 1.0 }
    """
    task(
        place / "final",
        toml,
        image=image,
        tests__test_sh="[ -s log.txt ] && reward $(wc -l < log.txt | tr -d ' ').0 || reward 0",
        solution__solve_sh="echo again >> log.txt",
        steps__first__instruction_md="Append a line to log.txt.",
        steps__last__instruction_md="Leave one line in log.txt.",
        steps__last__solution__solve_sh="echo once > log.txt",
    )


def health(place: Path, image: str | None) -> None:
    """Not ready at first."""
    toml = """
    [environment]
    [environment.healthcheck]
    command = "test -e ready || { touch ready; false; }"
    interval_sec = 0.05
    timeout_sec = 10.0
    retries = 3
    """
    task(place / "health", toml, image=image, tests__test_sh=f"[ -e ready ] || exit 1\n{TEST}")


def separate(place: Path, image: str | None) -> None:
    """A verifier in a sandbox of its own: it has the artifacts, and nothing else that the agent left."""
    toml = """
    artifacts = ["answer.txt", { source = "/logs/artifacts", exclude = ["*.tmp"] }]
    [environment]
    [verifier]
    environment_mode = "separate"
    """
    solve = "echo yes > answer.txt; echo left > left.txt; cd /logs/artifacts; touch published x.tmp"
    test = f"""
    [ -e left.txt ] && exit 1
    [ -e /logs/artifacts/x.tmp ] && exit 1
    [ -e /logs/artifacts/published ] || exec /bin/sh -c "echo 0 > /logs/verifier/reward.txt"
    [ -e /solution/solve.sh ] && exit 1
    {TEST}
    """
    task(place / "separate", toml, image=image, solution__solve_sh=solve, tests__test_sh=test)


def links(place: Path, image: str | None) -> None:
    """A directory with links of every kind and a pipe, for a verifier in a sandbox of its own."""
    toml = """
    artifacts = ["out"]
    [environment]
    [verifier]
    environment_mode = "separate"
    """
    solve = """
    mkdir -p out/bin; cd out
    echo yes > file; ln file hard; ln -s "$PWD/file" inside; ln -s ../file bin/up
    ln -s /bin/sh bin/sh; mkfifo pipe
    """
    test = """
    cd out || exec /bin/sh -c "echo 0 > /logs/verifier/reward.txt"
    [ "$(cat hard inside bin/up)" = "$(printf 'yes\\nyes\\nyes')" ] && bin/sh -c true && reward 1 || reward 0
    """
    task(place / "links", toml, image=image, solution__solve_sh=solve, tests__test_sh=test)


def collect(place: Path, image: str | None) -> None:
    """A command between agent and verifier; one that fails costs nothing."""
    toml = """
    [environment]
    [[verifier.collect]]
    command = "exit 7"
    [[verifier.collect]]
    command = "cp answer.txt /logs/artifacts/snapshot"
    timeout_sec = 20.0
    """
    task(
        place / "collect",
        toml,
        image=image,
        tests__test_sh=TEST.replace("answer.txt", "/logs/artifacts/snapshot"),
    )


def artifacts(place: Path, image: str | None) -> None:
    """Files and directories to keep, some excluded, one that is not there."""
    toml = """
    artifacts = [
        "answer.txt",
        "nowhere",
        { source = "out", destination = "kept", exclude = ["*.log", "cache"] },
    ]
    """
    solve = "echo yes > answer.txt; mkdir -p out/cache; cd out; touch a.txt a.log cache/b"
    task(place / "artifacts", toml, image=image, solution__solve_sh=solve)


def variables(place: Path, image: str | None) -> None:
    """What the environment holds, or a default, in each place where that can be."""
    toml = f"""
    [environment]
    env = {{ GIVEN = "${{{WORD}}}", PLAIN = "plain", KEPT = "a ${{{WORD}}} b" }}
    [verifier]
    env = {{ WANTED = "${{{WORD}}}", OTHER = "${{HARBOR_SCENE_UNSET:-fallback}}" }}
    [solution]
    env = {{ HOW = "${{HARBOR_SCENE_UNSET:-plain}}" }}
    """
    solve = 'echo "$GIVEN $HOW $KEPT" > answer.txt; [ "$WANTED" = "" ]'
    test = f"""
    [ "$(cat answer.txt 2>/dev/null)" = "$WANTED plain a \\${{{WORD}}} b" ] && [ "$OTHER" = fallback ] \\
        && reward 1 || reward 0
    """
    task(place / "variables", toml, image=image, solution__solve_sh=solve, tests__test_sh=test)


def limits(place: Path, image: str | None) -> None:
    """Limits, in the words of the first version."""
    toml = """
    version = "1.0"
    [agent]
    timeout_sec = 120.0
    [verifier]
    timeout_sec = 60
    [environment]
    cpus = 1
    memory = "256M"
    storage = "1G"
    allow_internet = false
    """
    task(place / "limits", toml, image=image)


def offline(place: Path, image: str | None) -> None:
    """A verifier that reaches nothing: of all interfaces it has the loopback."""
    toml = """
    [environment]
    network_mode = "no-network"
    """
    test = f'[ "$(grep -c : /proc/net/dev)" = 1 ] || exit 1\n{TEST}'
    task(place / "offline", toml, image=image, tests__test_sh=test)


def public(place: Path, image: str | None) -> None:
    """An agent without a network and a verifier that has one."""
    toml = """
    [environment]
    network_mode = "no-network"
    [verifier]
    network_mode = "public"
    """
    test = f'[ "$(grep -c : /proc/net/dev)" -gt 1 ] || exit 1\n{TEST}'
    task(place / "public", toml, image=image, tests__test_sh=test)


def users(place: Path, image: str) -> None:
    """An agent that is nobody in particular, and a verifier that is root."""
    toml = f"""
    [environment]
    docker_image = "{image}"
    workdir = "/tmp"
    [agent]
    user = 1000
    [verifier]
    user = "root"
    [[verifier.collect]]
    command = "id -u > /logs/artifacts/collector"
    user = 1000
    """
    solve = "id -u > /tmp/answer.txt; touch /tests 2>/dev/null && exit 1; exit 0"
    test = """
    [ "$(cat /tmp/answer.txt)" = 1000 ] && [ "$(id -u)" = 0 ] \\
        && [ "$(cat /logs/artifacts/collector)" = 1000 ] \\
        && reward 1 || reward 0
    """
    task(place / "users", toml, solution__solve_sh=solve, tests__test_sh=test)


def dockerfile(place: Path, image: str) -> None:
    """An image that is built first."""
    path = task(place / "dockerfile", '[environment]\nbuild_timeout_sec = 300.0\nworkdir = "/srv"\n')
    (path / "environment").mkdir()
    (path / "environment" / "Dockerfile").write_text(f"FROM {image}\nCOPY given /srv/given\n")
    (path / "environment" / "given").write_text("yes\n")
    (path / "solution" / "solve.sh").write_text(_script("cp given answer.txt"))


def prebuilt(place: Path, image: str) -> None:
    """An image by its name, with nothing that says where one works."""
    toml = f'[environment]\ndocker_image = "{image}"\n'
    files = {
        "solution__solve_sh": "echo yes > /answer.txt",
        "tests__test_sh": TEST.replace("answer", "/answer"),
    }
    task(place / "prebuilt", toml, **files)


def bundled(place: Path, image: str) -> None:
    """A verifier with an image of its own, which has the tests."""
    toml = f"""
    artifacts = ["/srv/answer.txt"]
    [environment]
    docker_image = "{image}"
    workdir = "/srv"
    [verifier]
    environment_mode = "separate"
    network_mode = "no-network"
    """
    path = task(place / "bundled", toml, tests__test_sh=f"cd /srv; [ -e /bundled ] || exit 1\n{TEST}")
    (path / "tests" / "Dockerfile").write_text(f"FROM {image}\nCOPY . /tests/\nCOPY test.sh /bundled\n")


PROCESSES = (
    text,
    numbers,
    named,
    placed,
    mean,
    final,
    health,
    separate,
    links,
    collect,
    artifacts,
    variables,
    limits,
    offline,
    public,
)
CONTAINERS = (users, dockerfile, prebuilt, bundled)
