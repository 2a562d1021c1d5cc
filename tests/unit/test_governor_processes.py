"""What processes use, on a tree that stands in for /proc; and who started them, for real."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdwater.kernel_files import PAGE, list_children, read_pss, read_resident, read_tree_memory


class Proc:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "meminfo").write_text("")

    def has(self, pid: int, parent: int, pages: int, name: str = "python") -> None:
        (self.root / str(pid)).mkdir()
        between = " ".join("0" for _ in range(19))
        (self.root / f"{pid}/stat").write_text(
            f"{pid} ({name}) S {parent} {between} {pages} 18446744073709551615 1\n"
        )
        (self.root / f"{pid}/statm").write_text(f"999 {pages} 5 1 0 1 0\n")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def test_a_process_that_has_gone_uses_nothing(proc):
    proc.has(7, 1, pages=10)

    assert read_resident([7, 8], proc.root) == {7: 10 * PAGE, 8: 0}
    assert read_tree_memory([7, 8], proc.root) == {7: 10 * PAGE, 8: 0}
    assert read_pss([8], proc.root) == {8: 0}


def test_shared_pages_count_by_their_share_where_the_kernel_tells_it(proc):
    proc.has(7, 1, pages=10)
    proc.has(8, 1, pages=10)
    (proc.root / "7/smaps_rollup").write_text("00-ff ---p 00 00:00 0 [rollup]\nRss: 40 kB\nPss:    24 kB\n")

    assert read_pss([7, 8], proc.root) == {7: 24 * 1024, 8: 10 * PAGE}


def test_a_tree_is_a_process_and_all_its_descendants(proc):
    proc.has(1, 0, pages=1)
    proc.has(7, 1, pages=10)
    proc.has(8, 7, pages=100, name="a (strange) name) R 1")
    proc.has(9, 8, pages=1000)
    proc.has(10, 1, pages=10000)

    assert read_tree_memory([7, 8, 10], proc.root) == {7: 1110 * PAGE, 8: 1100 * PAGE, 10: 10000 * PAGE}


def test_process_ids_reused_during_the_pass_do_not_make_it_endless(proc):
    proc.has(7, 8, pages=10)
    proc.has(8, 7, pages=100)

    assert read_tree_memory([7], proc.root) == {7: 110 * PAGE}


def test_children_are_those_of_all_threads_and_no_others():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found: list[subprocess.Popen[bytes]] = []
        thread = threading.Thread(
            target=lambda: found.append(subprocess.Popen(["sleep", "60"]))  # its starter is gone by then
        )
        thread.start()
        thread.join()
        try:
            children = list_children(os.getpid())
        finally:
            found[0].kill()
            found[0].wait()
            child.communicate(b"\n")

    assert {child.pid, found[0].pid} <= children
    assert os.getpid() not in children and child.pid not in list_children(os.getpid())
