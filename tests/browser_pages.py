"""Chromium for the tests of pages: a page fails its test on any error, and on any request to elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.command_runner import Command, until
from tests.wait_bounds import stretch

CHROMIUM = shutil.which("chromium") or ""
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def open_browser() -> Iterator[Browser]:
    if not CHROMIUM:
        assert os.environ.get("CI") != "true", "chromium is missing"
        pytest.skip("chromium is missing")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def open_page(
    browser: Browser, origin: str, *, expect_errors: bool = False, **options: object
) -> Iterator[Page]:
    """Yield a page; afterwards, nothing was printed to its console and every request went to `origin`."""
    context = browser.new_context(**options)  # type: ignore[arg-type]
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(origin) else asked.append(request.url))
    try:
        yield page
    finally:
        context.close()
    assert [url for url in asked if not url.startswith(origin)] == []
    assert problems == []


class ServedView(NamedTuple):
    """A running `holdwater view`."""

    url: str
    token: str
    command: Command

    @property
    def door(self) -> str:
        """The address that a user clicks."""
        return f"{self.url}/?token={self.token}"


@contextmanager
def serve_view(place: Path, *directories: Path) -> Iterator[ServedView]:
    command = Command(place, "view", *map(str, directories), "--json", interpreter=True)
    try:
        until("the view serves", lambda: "\n" in command.stdout or not command.running)
        assert command.running, command.stderr
        yield ServedView(**json.loads(command.stdout), command=command)
    finally:
        command.kill()


@pytest.fixture(scope="module")
def view(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedView]:
    """A view of the directory that the module's fixture `runs` makes."""
    with serve_view(tmp_path_factory.mktemp("commands"), runs) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, view: ServedView) -> Iterator[Page]:
    """The first page of the view."""
    with open_page(browser, view.url) as opened:
        opened.set_default_timeout(1000 * stretch(10.0))
        opened.goto(view.door)
        yield opened
