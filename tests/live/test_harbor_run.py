"""Harbor tasks in process sandboxes, from the directory to the verdict."""

import asyncio
import io
import json
import os
import shutil
import socket
from pathlib import Path

import pytest
from tests.harbor_tasks import WORD, task, write
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.core.errors import BadInput
from holdwater.export.formats import export_run
from holdwater.sandbox.probe import probe

pytestmark = pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)


@pytest.fixture
def place():
    """A directory outside /tmp: sandboxes have one of their own there, so it would prove nothing."""
    place = Path("/var/lib" if os.geteuid() == 0 else Path.home(), f"holdwater-harbor-{os.getpid()}")
    place.mkdir()
    yield place
    shutil.rmtree(place)


def attempts(run: Path) -> dict[str, dict]:
    """Instance -> its last attempt, as it is exported."""
    out = io.BytesIO()
    export_run(run, "attempts", "jsonl", out)
    return {row["instance"]: row for row in map(json.loads, out.getvalue().splitlines())}


def play(tree: Path, agent="nop", **options) -> dict[str, dict]:
    """Run an agent on all tasks; how their attempts ended."""
    run = tree.parent / f"run-{len(list(tree.parent.iterdir()))}"
    hw.run(str(tree), agent=agent, out=run, retries=0, **{"workers": 0, **options})
    return attempts(run)


def ended(rows: dict[str, dict]) -> dict[str, tuple[str, float | None]]:
    return {name: (row["kind"], row["score"]) for name, row in rows.items()}


def kept(place: Path, row: dict) -> Path:
    """What was taken out of the attempt's sandbox."""
    return next(place.glob("run-*")) / "artifacts" / f"{row['attempt']:06d}.files"


def test_the_oracle_scores_one_and_nop_zero_on_every_task(place, monkeypatch):
    monkeypatch.setenv(WORD, "a word")
    planned = write(place / "tree")

    given = {"network": "open", "pass_env": [WORD]}
    rows = play(place / "tree", "oracle", **given)
    assert ended(rows) == dict.fromkeys(planned, ("passed", 1.0))
    assert rows["processes/json"]["metrics"] == {"reward": 1.0, "style": 0.5}

    assert ended(play(place / "tree", "nop", **given)) == dict.fromkeys(planned, ("failed", 0.0))


def test_artifacts_are_kept_as_declared_and_one_that_is_missing_is_noted(place):
    write(place / "tree")
    rows = play(place / "tree", "oracle", only=["processes/artifacts"])
    found = kept(place, rows["processes/artifacts"]) / "artifacts"

    assert sorted(p.name for p in (found / "kept").iterdir()) == ["a.txt"]
    assert (found / "answer.txt").read_text() == "yes\n"
    manifest = json.loads((found / "manifest.json").read_text())
    assert {entry["source"]: entry["status"] for entry in manifest} == {
        "/logs/artifacts": "empty",
        "answer.txt": "ok",
        "nowhere": "failed",
        "out": "ok",
    }


def test_an_entry_that_cannot_be_taken_is_named_and_costs_no_other(place):
    """Given an artifact directory with a link that leads out, one that stays inside, and a pipe."""
    write(place / "tree")

    row = play(place / "tree", "oracle", only=["processes/links"])["processes/links"]

    found = kept(place, row) / "artifacts" / "out"
    assert (row["kind"], row["score"]) == ("passed", 1.0)
    assert {path.name: path.read_text() for path in found.iterdir() if path.is_file()} == dict.fromkeys(
        ("file", "hard", "inside"), "yes\n"
    )
    assert (found / "inside").readlink() == Path("file")
    assert not (found / "bin" / "sh").is_symlink() and not (found / "pipe").exists()
    assert "out: `bin/sh`: a link that leads out, to `/bin/sh`" in row["detail"]
    assert "out: `pipe`: neither file, directory nor link" in row["detail"]


@pytest.mark.parametrize(("mode", "ended_as"), [("separate", ("grade", None)), ("shared", ("failed", 0.0))])
def test_a_verifier_that_did_not_get_its_artifacts_never_scores(place, mode, ended_as):
    """Given a directory from which more would be left out than is taken."""
    toml = f"artifacts = ['out', 'not/there']\n[verifier]\nenvironment_mode = '{mode}'\n"
    task(place / "tree" / "one", toml, tests__test_sh="reward 0")

    async def litter(instance, sandbox, model):
        await sandbox.run(
            "mkdir out && python3 -c 'import os; [os.mkfifo(f\"out/{n}\") for n in range(10010)]'"
        )

    row = play(place / "tree", litter)["one"]

    assert (row["kind"], row["score"]) == ended_as
    assert "out: cannot" in row["detail"] or "could not be handed to the verifier: `out`" in row["failure"]


WRONG = {
    "missing": "true",
    "empty-text": ": > /logs/verifier/reward.txt",
    "word": "echo yes > /logs/verifier/reward.txt",
    "not-a-number": "echo nan > /logs/verifier/reward.txt",
    "empty-json": "reward 1; : > /logs/verifier/reward.json",
    "list": "reward 1; echo '[1]' > /logs/verifier/reward.json",
    "json-not-a-number": """reward 1; echo '{"reward": NaN}' > /logs/verifier/reward.json""",
    "directory": "reward 1; mkdir /logs/verifier/reward.json",
    "absent-program": "exec /no/such/program",
}


def test_a_wrong_reward_is_an_infrastructure_failure_and_never_a_zero(place):
    for name, script in WRONG.items():
        task(place / "tree" / name, tests__test_sh=script)

    assert ended(play(place / "tree")) == dict.fromkeys(WRONG, ("grade", None))


def test_a_verifier_that_takes_too_long_is_an_infrastructure_failure(place):
    task(place / "tree" / "one", "[verifier]\ntimeout_sec = 0.3\n", tests__test_sh="reward 1; sleep 30")

    row = play(place / "tree")["one"]

    assert (row["where"], row["failure_kind"]) == ("grade", "timeout")


CHEAT = """
echo yes | tee /tests/helper /logs/verifier/reward.txt
mkdir -p /tests/deep /logs/verifier/deep && touch /tests/deep/x && chmod 000 /tests/deep
printf '{"reward": 1}' > /logs/verifier/reward.json
printf '#!/bin/sh\\ntrue\\n' > /tests/test.sh
"""


def test_what_an_agent_leaves_for_the_verifier_is_gone(place):
    task(place / "tree" / "one", tests__test_sh="ls -A /tests /logs/verifier; reward 0")

    async def cheat(instance, sandbox, model):
        await sandbox.run(CHEAT)

    row = play(place / "tree", cheat)["one"]

    assert (row["kind"], row["score"]) == ("failed", 0.0)
    assert row["detail"].split() == ["/logs/verifier:", "/tests:", "test.sh"]


@pytest.mark.parametrize("below", ["", "/tmp"])
def test_tests_and_solutions_cannot_be_seen_by_an_agent(place, tmp_path, monkeypatch, below):
    """Given tasks beside a tool of the agent's, in a project that is shown, run from within it."""
    project = tmp_path / "project" if below else place / "project"
    for name in ("tasks/one", "tasks/two"):
        task(project / name, tests__hidden_txt="s3cret", solution__hidden_txt="s3cret")
    (project / "tool.txt").write_text("a tool")
    seen = []

    async def look(instance, sandbox, model):
        for command in (f"grep -rs s3cret {project} /tests /solution . ; true", f"cat {project}/tool.txt"):
            seen.append((await sandbox.run(command)).stdout)

    for directory in (project, project / "tasks" / "one"):
        monkeypatch.chdir(directory)
        run = project.parent / f"run-{directory.name}"
        hw.run(str(project), agent=look, out=run, workers=0, mount=[f"{project}:{project}"])

    assert set(seen[:4]) == {"", "a tool"}
    assert "s3cret" not in "".join(seen)


def test_each_step_has_its_own_instruction_and_no_earlier_tests(place):
    write(place / "tree")
    told = []

    async def tell(instance, sandbox, model):
        listed = await sandbox.run("ls -A /tests /logs/verifier; cat brought.txt")
        told.append((instance.instruction, listed.stdout.split()))
        await sandbox.write("one.txt", "yes\n")

    row = play(place / "tree", tell, only=["processes/mean"])["processes/mean"]

    empty = ["/logs/verifier:", "/tests:", "one"]
    assert told == [("Write `yes` to one.txt.", empty), ("Write `yes` to two.txt.", empty)]
    assert (row["kind"], row["score"], row["metrics"]) == ("failed", 0.5, {"reward": 0.5})
    steps = json.loads((kept(place, row) / "steps.json").read_text())
    assert steps == [{"step": "one", "rewards": {"reward": 1.0}}, {"step": "two", "rewards": {"reward": 0.0}}]


def test_a_step_below_its_least_reward_is_the_last(place):
    write(place / "tree")
    steps = []

    row = play(place / "tree", lambda *given: steps.append(given[0]), only=["processes/final"])[
        "processes/final"
    ]

    assert len(steps) == 1
    assert (row["score"], row["detail"]) == (0.0, 'first: {"reward":0.0}')


def test_a_step_that_takes_too_long_is_graded_and_the_next_follows(place):
    limit = f"timeout_sec = {stretch(0.125)}"
    toml = f"[[steps]]\nname = 'slow'\n[steps.agent]\n{limit}\n[[steps]]\nname = 'next'\n"
    files = {f"steps__{name}__instruction_md": name for name in ("slow", "next")}
    test = "reward $(cat done)"
    task(place / "tree" / "one", toml, tests__test_sh=test, **files)

    async def hang(instance, sandbox, model):
        if instance.instruction == "next":
            await sandbox.write("done", "0.75")
            return
        await sandbox.write("done", "0.25")
        await asyncio.Event().wait()

    row = play(place / "tree", hang)["one"]

    assert (row["where"], row["score"]) == ("limit", 0.5)
    assert row["detail"] == 'slow: {"reward":0.25}\nnext: {"reward":0.75}'


def test_steps_that_a_late_agent_never_came_to_count_as_zero(place):
    """Given a limit for all steps together, which the first one uses up."""
    toml = "[[steps]]\nname = 'slow'\n[[steps]]\nname = 'never'\n"
    files = {f"steps__{name}__instruction_md": name for name in ("slow", "never")}
    task(place / "tree" / "one", toml, tests__test_sh="[ -e done ] && reward 0.75", **files)

    async def hang(instance, sandbox, model):
        await sandbox.write("done", "")
        await asyncio.Event().wait()

    row = play(place / "tree", hang, timeout=stretch(0.75))["one"]

    assert (row["where"], row["score"]) == ("limit", 0.375)
    assert row["detail"] == 'slow: {"reward":0.75}\nnever: not reached by the agent'


@pytest.mark.parametrize(("strategy", "score"), [("mean", 0.5), ("final", 1.0)])
def test_an_agent_that_fails_in_a_step_goes_on_with_the_next(place, strategy, score):
    """Given an agent that raises in its first step, which is verified all the same."""
    toml = f"multi_step_reward_strategy = '{strategy}'\n[[steps]]\nname = 'a'\n[[steps]]\nname = 'b'\n"
    files = {f"steps__{name}__instruction_md": name for name in ("a", "b")}
    task(place / "tree" / "one", toml, tests__test_sh="[ -e done ] && reward 1 || reward 0", **files)

    async def fail(instance, sandbox, model):
        if instance.instruction == "a":
            raise RuntimeError("at once")
        await sandbox.write("done", "")

    row = play(place / "tree", fail)["one"]

    assert (row["where"], row["score"], row["passed"]) == ("agent", score, score == 1.0)
    assert "at once" in row["failure"]


def test_a_failed_step_below_its_least_reward_is_the_last(place):
    toml = "[[steps]]\nname = 'a'\nmin_reward = 0.5\n[[steps]]\nname = 'b'\n"
    files = {f"steps__{name}__instruction_md": name for name in ("a", "b")}
    task(place / "tree" / "one", toml, tests__test_sh="reward 0.25", **files)
    tried = []

    def fail(instance, sandbox, model):
        tried.append(instance.instruction)
        raise RuntimeError("at once")

    row = play(place / "tree", fail)["one"]

    assert (tried, row["score"]) == (["a"], 0.25)


def test_a_bad_task_is_refused_alone_with_its_file_and_key(place):
    """Given a wrong value, a missing part and a valid task."""
    task(place / "tree" / "good")
    task(place / "tree" / "wrong", "[agent]\ntimeout_sec = 'soon'\n")
    (task(place / "tree" / "part") / "instruction.md").unlink()

    rows = play(place / "tree", "oracle")

    kinds = {name: (row["kind"], row["failure_kind"]) for name, row in rows.items()}
    assert kinds == {
        "good": ("passed", None),
        "wrong": ("sandbox", "refused"),
        "part": ("sandbox", "refused"),
    }
    assert "wrong/task.toml: field `agent.timeout_sec`: expected float" in rows["wrong"]["failure"]
    assert "part/task.toml: no such file beside it: `instruction.md`" in rows["part"]["failure"]


def test_numbers_in_quotes_are_numbers(place):
    toml = "[agent]\ntimeout_sec = '30'\n[environment]\nmemory_mb = 512.0\n[verifier]\ntimeout_sec = '20.5'\n"
    task(place / "tree" / "one", toml)

    assert ended(play(place / "tree", "oracle")) == {"one": ("passed", 1.0)}


def test_an_empty_reward_object_is_zero_and_rewards_are_exported_unchanged(place):
    """Given a verifier without rewards, and one without a reward of that name."""
    reward = "echo '{}' > /logs/verifier/reward.json"
    task(place / "tree" / "empty", tests__test_sh=reward)
    task(place / "tree" / "others", tests__test_sh=reward.replace("{}", '{"style": 0.5, "speed": 1.0}'))

    rows = play(place / "tree")
    hw.export(next(place.glob("run-*")), place / "jobs", format="harbor")

    assert ended(rows) == {"empty": ("failed", 0.0), "others": ("failed", 0.75)}
    results = {
        path.parent.name[:5]: json.loads(path.read_text()) for path in place.glob("jobs/*/*/result.json")
    }
    rewards = {name: result["verifier_result"]["rewards"] for name, result in results.items()}
    assert rewards == {"empty": {}, "other": {"style": 0.5, "speed": 1.0}}


def test_a_regrade_of_steps_uses_only_the_verifier_of_the_last_step(place):
    write(place / "tree")
    play(place / "tree", "oracle", only=["processes/final"])
    run = next(place.glob("run-*"))

    hw.regrade(run)

    row = attempts(run)["processes/final"]
    assert (row["regrades"], row["kind"], row["score"]) == (1, "passed", 1.0)
    assert row["detail"].startswith("only the last step was graded")


def test_a_task_that_cannot_be_tried_here_costs_the_others_nothing(place):
    task(place / "tree" / "gpu", "[environment]\ngpus = 1\n")
    task(place / "tree" / "image", "[environment]\ndocker_image = 'x:1'\n")
    task(place / "tree" / "plain")

    rows = play(place / "tree", "oracle")

    assert {name: row["kind"] for name, row in rows.items()} == {
        "gpu": "sandbox",
        "image": "sandbox",
        "plain": "passed",
    }
    assert "gpu/task.toml: field `environment.gpus`" in rows["gpu"]["failure"]
    assert "needs a container" in rows["image"]["failure"]


def test_a_resume_tells_that_a_task_has_changed(place):
    """Given a run that was stopped in the middle of its second task."""
    task(place / "tree" / "a")
    task(place / "tree" / "b", solution__solve_sh="sleep 30")
    assert play(place / "tree", "oracle", run_time=8.0, grace=0.1)["a"]["kind"] == "passed"
    (place / "tree" / "b" / "tests" / "test.sh").write_text("#!/bin/sh\nexit 1\n")

    assert "changed: `b`;" in f"{hw.resume(next(place.glob('run-*'))).reason};"


def test_a_variable_that_is_not_set_is_named_before_anything_is_made(place, monkeypatch):
    monkeypatch.delenv(WORD, raising=False)
    write(place / "tree")

    field = "variables/task.toml: field `environment.env.GIVEN`"
    with pytest.raises(BadInput, match=f"{field}: the variable `{WORD}` is not set"):
        play(place / "tree", pass_env=[WORD])
    assert [p.name for p in place.iterdir()] == ["tree"]


def test_the_value_of_a_variable_reaches_the_verifier_and_no_record(place, monkeypatch):
    monkeypatch.setenv(WORD, "s3cret-value")
    toml = f"[verifier]\nenv = {{ KEY = '${{{WORD}}}' }}\n"
    task(place / "tree" / "one", toml, tests__test_sh='[ "$KEY" = s3cret-value ] && reward 1 || reward 0')

    assert play(place / "tree", workers=1, pass_env=[WORD])["one"]["score"] == 1.0

    run = next(place.glob("run-*"))
    written = [path for path in run.rglob("*") if path.is_file() and b"s3cret-value" in path.read_bytes()]
    assert written == []


def test_a_providers_key_is_no_variable(place, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    task(place / "tree" / "one", "[verifier]\nenv = { KEY = '${OPENAI_API_KEY}' }\n")

    with pytest.raises(BadInput, match="`OPENAI_API_KEY` is not passed on"):
        play(place / "tree")
    with pytest.raises(BadInput, match="invalid name for `--pass-env`: `OPENAI_API_KEY`"):
        play(place / "tree", pass_env=["OPENAI_API_KEY"])


def test_a_variable_is_handed_over_by_its_name_alone(place, monkeypatch):
    """Given two variables that are set, of which the operator allows one."""
    monkeypatch.setenv(WORD, "allowed")
    monkeypatch.setenv("HOLDWATER_SCENE_OTHER", "s3cret-value")
    toml = f"[environment]\nenv = {{ A = '${{{WORD}}}', B = '${{HOLDWATER_SCENE_OTHER:-nothing}}' }}\n"
    test = '[ "$A $B" = "allowed nothing" ] && reward 1 || reward 0'
    task(place / "tree" / "one", toml, tests__test_sh=test)

    with pytest.raises(BadInput) as refused:
        play(place / "tree")

    field = "tree/one/task.toml: field `environment.env.A`"
    assert refused.value.message == f"{field}: the variable `{WORD}` is not passed on"
    assert refused.value.hint == f"`--pass-env {WORD}` allows it"
    assert play(place / "tree", pass_env=[WORD])["one"]["score"] == 1.0


def test_a_resumed_run_passes_on_its_environment(place, monkeypatch):
    monkeypatch.setenv(WORD, "a word")
    for name in ("a", "b"):
        toml = f"[verifier]\nenv = {{ KEY = '${{{WORD}}}' }}\n"
        task(place / "tree" / name, toml, tests__test_sh='[ "$KEY" = "a word" ] && reward 1 || reward 0')
    play(place / "tree", pass_env=[WORD], run_time=0.001)
    run = next(place.glob("run-*"))

    hw.resume(run, run_time=600)

    assert ended(attempts(run)) == dict.fromkeys("ab", ("passed", 1.0))


def test_public_is_refused_by_name_unless_the_network_is_open(place):
    task(place / "tree" / "plain")
    task(place / "tree" / "public", "[environment]\nnetwork_mode = 'public'\n")

    rows = play(place / "tree", "oracle")

    assert ended(rows) == {"plain": ("passed", 1.0), "public": ("sandbox", None)}
    reason = "public/task.toml: field `environment.network_mode`: an open network is given with"
    assert f"{reason} `--network open`" in rows["public"]["failure"]
    assert ended(play(place / "tree", "oracle", network="open")) == dict.fromkeys(rows, ("passed", 1.0))


@pytest.mark.parametrize("network", ["gateway", "none", "open"])
def test_a_task_without_a_network_gets_the_runs_and_it_is_shown(place, network):
    """Given a service on this machine's loopback, and agent and verifier that try it."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        port = service.getsockname()[1]
        look = f"(echo > /dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached || echo not"
        task(
            place / "tree" / "one",
            tests__test_sh=f"{{ cat answer.txt; bash -c '{look}'; }} > /logs/verifier/seen; reward 1",
            solution__solve_sh=f"bash -c '{look}' > answer.txt",
        )
        row = play(place / "tree", "oracle", network=network)["one"]

    seen = (kept(place, row) / "verifier" / "seen").read_text().split()
    assert seen == ["reached" if network == "open" else "not"] * 2
    run = next(place.glob("run-*"))
    assert f"network: `{network}`" in (run / "run.log").read_text()
    assert hw.show(run).network == network


def test_an_unknown_field_is_named_in_the_runs_log(place):
    task(place / "tree" / "one", "[environment]\ntaste = 1\n")
    play(place / "tree")

    log = (next(place.glob("run-*")) / "run.log").read_text()
    assert log.count("tree/one/task.toml: field `environment.taste`: unknown") == 1


def test_the_oracle_reports_a_solution_that_fails(place):
    task(place / "tree" / "one", solution__solve_sh="echo broken; exit 4")

    row = play(place / "tree", "oracle")["one"]

    assert (row["where"], row["score"]) == ("agent", 0.0)
    assert "status 4: broken" in row["failure"]


def test_a_step_that_raises_is_the_suites_failure_and_no_zero(place):
    def step(instance, sandbox, answer, number):
        if number:
            raise ValueError("not today")
        return instance

    suite = hw.Suite(name="s", instances=lambda: [hw.Instance(id="i")], grade=lambda *a: False, step=step)

    hw.run(suite, agent=lambda *given: None, out=place / "run", workers=0, retries=0)

    row = attempts(place / "run")["i"]
    assert (row["where"], "not today" in row["failure"]) == ("grade", True)


CALL = """
import json, sys, urllib.request
url, key = sys.argv[1:]
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
reply = urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers), timeout=300)
print(json.load(reply)["choices"][0]["message"]["content"])
"""


def test_the_model_is_reached_from_whichever_network_a_task_says(place):
    """Given an agent that calls its model from inside the sandbox, in steps of both kinds too."""
    both = "[[steps]]\nname = 'a'\nagent.network_mode = 'no-network'\n[[steps]]\nname = 'b'\n"
    files = {f"steps__{name}__instruction_md": name for name in ("a", "b")}
    task(place / "tree" / "both", both, tests__test_sh="reward 1", **files)
    task(place / "tree" / "offline", "[environment]\nnetwork_mode = 'no-network'\n")
    task(place / "tree" / "public")
    heard = []

    async def call(instance, sandbox, model):
        result = await sandbox.run(["/usr/bin/env", "python3", "-c", CALL, model.sandbox_url, model.key])
        heard.append(result.output.strip())

    def policy(request):
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}}]}

    play(place / "tree", call, model="m", policy=policy)

    assert heard == ["hello"] * 4
