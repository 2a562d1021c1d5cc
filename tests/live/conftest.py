"""The fixtures of the tests of pages: a view, a browser and a page, of which each module has its own."""

from __future__ import annotations

from tests.browser_pages import browser, page, view

__all__ = ["browser", "page", "view"]
