"""The embedded sandbox with real processes, in bubblewrap and without it."""

import asyncio
import os
import time

import msgspec
import psutil
import pytest
from tests.wait_bounds import stretch

from holdwater.core.authoring import Sandbox
from holdwater.core.config import Network
from holdwater.core.errors import AttemptOver, BadInput, ResourceExhausted, SandboxFailed
from holdwater.core.records import Limits, MiB
from holdwater.sandbox import process, process_marks
from holdwater.sandbox.capture import KEPT_IN_LOG
from holdwater.sandbox.probe import MachineFeatures, probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes

RUN = f"test {os.getpid()}"
PLAIN = MachineFeatures(why_not="left out on purpose")
LIMITS = Limits(memory=256 * MiB)


def machine(kind: str) -> MachineFeatures:
    found = probe()
    if kind == "bubblewrap":
        if not found.works and os.environ.get("CI") != "true":
            pytest.skip(f"bubblewrap does not work here: {found.why_not}")
        assert found.works, found.why_not
        return found
    return msgspec.structs.replace(PLAIN, cgroup=found.cgroup) if kind == "plain with groups" else PLAIN


@pytest.fixture(params=["bubblewrap", "plain", "plain with groups"])
def boxes(request, tmp_path):
    return ProcessSandboxes(tmp_path / "scratch", RUN, Network.GATEWAY, machine=machine(request.param))


@pytest.fixture
async def box(boxes):
    async with boxes.open(1, LIMITS, None) as sandbox:
        yield sandbox
    assert sandbox.leftovers == []
    assert left() == []
    assert not boxes.scratch.exists() or list(boxes.scratch.iterdir()) == []


def left() -> list[int]:
    return process_marks.find_marked({process_marks.RUN: RUN})


async def test_a_line_and_a_program_run_in_the_working_directory(box):
    assert isinstance(box, Sandbox)
    line = await box.run("pwd; echo no >&2; exit 3")
    program = await box.run(["printf", "%s", "a b; $HOME"])

    assert (line.stdout, line.stderr, line.exit_code, line.ok) == (f"{box.workdir}\n", "no\n", 3, False)
    assert (program.stdout, program.ok) == ("a b; $HOME", True)


async def test_files_are_written_read_and_shared_with_commands(box):
    await box.write("deep/er/a.txt", "h\u00e9")
    await box.write(f"{box.workdir}/big", b"x" * (3 * MiB))

    result = await box.run("cat deep/er/a.txt; echo two > deep/b; wc -c < big")

    assert result.stdout == f"h\u00e9{3 * MiB}\n"
    assert await box.read("deep/b") == b"two\n"
    assert len(await box.read("big")) == 3 * MiB


@pytest.mark.parametrize("boxes", ["plain"], indirect=True)
async def test_without_bubblewrap_its_directories_are_those_of_the_host(boxes, box):
    seen = await box.run('printf "%s\\n" "$PWD" "$HOME" "$TMPDIR"; echo x > made')
    host = boxes.scratch / "1"

    assert seen.stdout.split() == [box.workdir, str(host / "home"), str(host / "tmp")]
    assert box.workdir == str(host / "work")
    assert await box.read(f"{host}/work/made") == (host / "work/made").read_bytes() == b"x\n"


async def test_files_in_the_home_and_in_tmp_last_from_command_to_command(box):
    await box.run("echo a > ~/a; echo b > ${TMPDIR:?}/b")

    assert (await box.run("cat ~/a $TMPDIR/b")).stdout == "a\nb\n"


async def test_the_environment_is_scrubbed(box, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")

    result = await box.run("env", env={"GIVEN": "yes"})

    seen = dict(line.split("=", 1) for line in result.stdout.splitlines())
    assert seen.pop("GIVEN") == "yes"
    assert {name for name in seen if not name.startswith("HOLDWATER_")} <= {
        "PATH", "HOME", "LANG", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_",
    }  # fmt: skip


async def test_a_sandbox_that_is_not_used_makes_nothing(boxes):
    async with boxes.open(1, LIMITS, None) as sandbox:
        await sandbox.mark()
        assert await sandbox.salvage(boxes.scratch / "kept") is None
        with pytest.raises(FileNotFoundError):
            await sandbox.read("x")

    assert not boxes.scratch.exists()


async def test_a_flood_of_output_costs_no_memory_and_does_not_block(box, tmp_path):
    before = psutil.Process().memory_info().rss
    command = "head -c 200000000 /dev/zero | tr '\\0' x; echo end; echo e >&2"

    result = await box.run(command, log=tmp_path / "log", timeout=stretch(60))

    assert psutil.Process().memory_info().rss - before < 20 * MiB
    assert result.ok and result.truncated
    assert result.stdout.endswith("xend\n") and "bytes left out" in result.stdout
    assert len(result.stdout) < 70_000
    assert KEPT_IN_LOG <= (tmp_path / "log").stat().st_size < KEPT_IN_LOG + 100


async def test_a_timeout_ends_grandchildren_and_daemons(box):
    daemon = "setsid sleep 1000 </dev/null >/dev/null 2>&1 &"
    stubborn = "(trap '' TERM; sleep 1000 & wait) &"

    result = await box.run(f"{daemon} {stubborn} echo on; sleep 1000", timeout=stretch(0.5))

    assert (result.timed_out, result.ok, result.stdout) == (True, False, "on\n")
    assert result.seconds < stretch(5)
    assert left() == []


async def test_a_timeout_lets_the_command_tidy_up_first(box):
    result = await box.run("trap 'echo tidy; exit 9' TERM; while :; do sleep 0.1; done", timeout=stretch(0.5))

    assert (result.timed_out, result.stdout, result.exit_code) == (True, "tidy\n", 9)


async def test_a_command_that_ignores_the_signal_is_killed(box):
    result = await box.run("trap '' TERM; while :; do sleep 0.1; done", timeout=stretch(0.5))

    assert result.timed_out and result.exit_code == 137
    assert 2 <= result.seconds < stretch(6)


async def test_a_background_child_does_not_outlive_its_command_nor_hold_it_up(box):
    result = await box.run("sleep 1000 & echo done")

    assert result.stdout == "done\n" and result.ok
    assert result.seconds < stretch(4)  # and not 1000
    assert left() == []


async def test_cancelling_kills_the_tree(boxes, box):
    running = asyncio.ensure_future(box.run("sleep 1000 & touch started; sleep 1000"))
    while not (boxes.scratch / "1/work/started").exists():
        await asyncio.sleep(0.01)

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert left() == []


async def test_closing_ends_what_still_runs(boxes):
    async with asyncio.TaskGroup() as tasks, boxes.open(1, LIMITS, None) as sandbox:
        running = tasks.create_task(outcome(sandbox.run("touch started; sleep 1000")))
        while not (boxes.scratch / "1/work/started").exists():
            await asyncio.sleep(0.01)
    assert isinstance(running.result(), AttemptOver)
    assert left() == [] and sandbox.leftovers == []
    for late in (sandbox.run("true"), sandbox.read("x"), sandbox.write("x", "")):
        assert isinstance(await outcome(late), AttemptOver)


async def outcome(work):
    try:
        return await work
    except Exception as e:
        return e


@pytest.mark.parametrize("boxes", ["bubblewrap", "plain with groups"], indirect=True)
async def test_the_memory_limit_is_a_resource_failure_and_the_peak_is_known(boxes):
    if not boxes.machine.cgroup.usable:
        assert os.environ.get("CI") != "true"
        pytest.skip(f"no control groups here: {boxes.machine.cgroup.why}")
    async with boxes.open(1, Limits(memory=64 * MiB), None) as box:
        assert (await box.run(["head", "-c", str(8 * MiB), "/dev/zero"])).truncated

        with pytest.raises(ResourceExhausted, match="killed at 64 MiB: sandbox memory"):
            await box.run(["python3", "-c", "bytearray(200 << 20)"])

        assert (await box.run("echo goes on")).ok
    assert 60 * MiB < box.peak_memory <= 64 * MiB
    assert box.leftovers == []


@pytest.mark.parametrize("boxes", ["plain"], indirect=True)
async def test_without_groups_each_process_has_the_memory_limit(boxes):
    async with boxes.open(1, Limits(memory=64 * MiB), None) as box:
        assert not (await box.run(["python3", "-c", "bytearray(200 << 20)"])).ok


@pytest.mark.parametrize("program", ["no-such-program", "./no-such", "/no/such"])
async def test_a_missing_program_is_named(box, program):
    with pytest.raises(SandboxFailed, match=program) as raised:
        await box.run([program, "-v"])

    assert raised.value.kind == "missing"


@pytest.mark.parametrize("at", ["$PWD", "$HOME", "$TMPDIR", "$HOME/linked"])
async def test_a_program_that_was_written_into_the_sandbox_runs(box, at):
    make = "printf '#!/bin/sh\\necho mine' > tool; chmod +x tool; cp tool $TMPDIR; cp tool $HOME"
    await box.run(f"{make}; mkdir ~/linked; ln -s $PWD/tool ~/linked/tool")
    place = (await box.run(f"echo {at}")).stdout.strip()

    assert (await box.run(["./tool"])).stdout == "mine\n"
    assert (await box.run([f"{place}/tool"])).stdout == "mine\n"
    assert (await box.run(["tool"], env={"PATH": f"/usr/bin:{place}"})).stdout == "mine\n"


@pytest.mark.parametrize("line", ["echo \0", "echo \ud800"])
async def test_a_line_that_no_process_can_be_given_is_refused(box, line):
    with pytest.raises(SandboxFailed, match="cannot start"):
        await box.run(line)


async def test_a_line_longer_than_an_argument_can_be(box):
    result = await box.run("cat > out <<'END'\n" + "x" * 300_000 + "\nEND\nwc -c < out")

    assert result.stdout == "300001\n"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", ".", "", "out/x", "file", "up/home/x"])
async def test_paths_and_links_that_lead_out_are_refused(box, tmp_path, path):
    await box.run(f"ln -s {tmp_path} out; ln -s /etc/passwd file; ln -s .. up")

    for work in (box.read(path), box.write(path, "x")):
        with pytest.raises(SandboxFailed, match="not below"):
            await work

    assert not (tmp_path / "x").exists()


async def test_links_that_stay_inside_are_followed(box):
    await box.run("mkdir d; ln -s d link; ln -s d/x file; ln -s $PWD/link/x absolute")

    await box.write("link/x", "1")

    assert await box.read("file") == await box.read("absolute") == b"1"


async def test_a_pipe_is_refused_as_a_file_without_a_wait(box):
    await box.run("mkfifo pipe")

    for work in (box.read("pipe"), box.write("pipe", "x")):
        with pytest.raises((SandboxFailed, OSError)):
            await asyncio.wait_for(work, stretch(2))


async def test_work_is_salvaged_and_put_back_into_another_sandbox(boxes, tmp_path):
    async with boxes.open(1, LIMITS, None) as first:
        await first.write("a", "old")
        await first.write("b", "old")
        await first.mark()
        await first.run("echo new > a; rm b; mkdir c; ln -s /usr/bin/env c/env")
        kept = await first.salvage(tmp_path / "kept.tar.zst")
    async with boxes.open(2, LIMITS, None) as second:
        await second.write("a", "old")
        await second.write("b", "old")
        await second.restore(tmp_path / "kept.tar.zst")
        listed = await second.run("cat a; ls; readlink c/env")

    assert kept is not None and kept.files == 4
    assert listed.stdout == "new\na\nc\n/usr/bin/env\n"


async def test_a_locked_and_very_deep_directory_is_removed(boxes, monkeypatch):
    monkeypatch.setattr(process, "CLOSING", stretch(process.CLOSING))
    async with boxes.open(1, LIMITS, None) as box:
        deep = "import os\nfor i in range(3000):\n os.mkdir('d'); os.chdir('d')"
        assert (await box.run(["python3", "-c", deep])).ok
        await box.run("mkdir -p locked/x; touch locked/x/y; chmod 000 locked/x locked")

    assert box.leftovers == []
    assert list(boxes.scratch.iterdir()) == []


async def test_what_an_earlier_attempt_left_is_not_seen(boxes):
    (boxes.scratch / "1/work").mkdir(parents=True)
    (boxes.scratch / "1/work/stale").touch()

    async with boxes.open(1, LIMITS, None) as box:
        assert (await box.run("ls")).stdout == ""


async def test_many_commands_at_once(box):
    started = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(box.run(f"sleep 0.5; echo {i}")) for i in range(10)]

    assert [task.result().stdout for task in running] == [f"{i}\n" for i in range(10)]
    assert time.monotonic() - started < stretch(4)


def test_no_network_without_bubblewrap_is_refused(tmp_path):
    with pytest.raises(BadInput, match="needs bubblewrap") as raised:
        ProcessSandboxes(tmp_path, RUN, Network.NONE, machine=PLAIN)

    assert "install" in raised.value.hint


async def test_the_private_directory_is_no_part_of_the_work(box, tmp_path):
    await box.run("echo work > made")
    await box.mark()
    await box.write(f"{box.private}/deep/note", "for the agent")

    assert (await box.run(["cat", f"{box.private}/deep/note"])).stdout == "for the agent"
    assert await box.read(f"{box.private}/deep/note") == b"for the agent"
    assert await box.salvage(tmp_path / "kept") is None, "nothing was changed"


async def test_a_link_in_the_private_directory_leads_nowhere(box, tmp_path):
    (tmp_path / "outside").write_text("mine")
    await box.run(f"ln -s {tmp_path}/outside {box.private}/note")

    try:
        await box.write(f"{box.private}/note", "theirs")
    except SandboxFailed as refused:
        assert refused.kind == "path"
    assert (tmp_path / "outside").read_text() == "mine"
