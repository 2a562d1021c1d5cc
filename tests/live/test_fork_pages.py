"""The branches of forked attempts in the browser view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import holdwater as hw

pytestmark = pytest.mark.xdist_group("fork pages")

HOSTILE = "<b>odd</b> & \u202ereversed"


async def talk(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    messages = [{"role": "user", "content": "start"}]
    for _ in range(3):
        reply = await model.chat(messages)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
    return str(messages[-2]["content"])


def make_policy(word: str) -> Any:
    def reply(request: dict[str, Any]) -> str:
        return f"{word} {len(request['messages'])} {HOSTILE}"

    return reply


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("forks") / "runs"
    suite = hw.Suite(
        name="talks",
        instances=lambda: iter([hw.Instance(id="one"), hw.Instance(id="two")]),
        grade=lambda instance, sandbox, answer: str(answer).startswith("good"),
    )
    objects: Any = {"suite": suite, "agent": talk}
    hw.run(suite, talk, out=place / "origin", policy=make_policy("bad"), workers=0)
    hw.fork(
        place / "origin", "one", 1, out=place / "better", policy=make_policy("good"), samples=2, **objects
    )
    hw.fork(place / "origin", "one", 2, out=place / "same", policy=make_policy("bad"), **objects)
    return place


def test_an_instance_leads_to_the_tree_of_its_branches(page: Page) -> None:
    page.get_by_role("link", name="origin").first.click()
    page.get_by_role("link", name="all instances").click()
    page.get_by_role("link", name="one").first.click()
    page.get_by_role("link", name="branches").click()

    expect(page.locator("section.branches")).to_have_count(1)
    expect(page.locator("section.branches h2")).to_contain_text("2 of 3 branches pass")
    expect(page.locator(".branches").get_by_text("turns 2 to 3")).to_have_count(2)
    expect(page.locator(".branches b")).to_have_count(0)
    expect(page.locator(".branches q").first).to_contain_text("<b>odd</b>")
    page.get_by_role("link", name="the recorded attempt").click()
    expect(page.locator(".turn")).to_have_count(3)


def test_a_fork_leads_to_its_branches_and_their_transcripts(page: Page) -> None:
    page.get_by_role("link", name="better").first.click()
    expect(page.get_by_text("attempt 1 of `one` in run")).to_be_visible()
    page.get_by_role("link", name="branches").click()
    page.get_by_role("link", name="sample 1").click()

    expect(page.locator(".turn").first).to_contain_text("from the record")
    expect(page.locator(".turn").last).to_contain_text("good 5")


def test_a_comparison_with_a_fork_leads_to_its_branches(page: Page) -> None:
    page.get_by_role("link", name="better").first.click()
    page.get_by_role("link", name="compare").click()
    page.select_option("select[name=a]", label=page.locator("select[name=a] option").all_inner_texts()[2])
    page.get_by_role("button", name="compare").click()
    page.get_by_role("link", name="branches").click()

    expect(page.locator("section.branches")).to_have_count(1)


def test_an_instance_without_forks_says_so(page: Page) -> None:
    page.get_by_role("link", name="origin").first.click()
    page.get_by_role("link", name="all instances").click()
    page.get_by_role("link", name="two").first.click()
    page.get_by_role("link", name="branches").click()

    expect(page.get_by_text("no fork of this instance is among the shown runs")).to_be_visible()
