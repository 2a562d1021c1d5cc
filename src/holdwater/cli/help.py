"""`holdwater help`: shows the pages of the manual, which are part of the package.

The overview of the command lists the pages, so this module imports as little as possible.
"""

from __future__ import annotations

from pathlib import Path

PACKAGED = Path(__file__).parents[1] / "manual"
CHECKOUT = Path(__file__).parents[3] / "docs"  # the manual if the package runs from its repository
WIDEST = 100  # columns of prose that are easy to read


def help(topic: str | None = None, /) -> int:
    """Show a page of the manual, or the help of a verb.

    For example: `holdwater help running`. `holdwater help` lists verbs and topics.

    Parameters
    ----------
    topic
        A page of the manual, such as `running`, or a verb.
    """
    from . import VERBS, call_verb

    pages = find_pages()
    if topic in pages:
        print_page(pages[topic])
        return 0
    if topic in VERBS:
        return call_verb(topic, ["--help"])
    from difflib import get_close_matches

    from ..core.errors import BadInput

    near = get_close_matches(topic or "", [*pages, *VERBS], n=1)
    hint = f"did you mean `holdwater help {near[0]}`?" if near else f"topics: {', '.join(pages)}"
    raise BadInput(f"unknown topic: `{topic}`", hint)


def find_pages() -> dict[str, Path]:
    """Return the manual's pages by topic."""
    manual = PACKAGED if PACKAGED.is_dir() else CHECKOUT
    return {path.stem: path for path in sorted(manual.glob("*.md"), key=lambda path: path.stem)}


def print_page(path: Path) -> None:
    """Print a page: rendered on a terminal, as Markdown otherwise."""
    from .console import STDOUT, is_terminal, open_pager, terminal_size

    text = path.read_text("utf-8")
    if is_terminal(STDOUT):
        import io

        from rich.console import Console as Rich
        from rich.markdown import Markdown

        page = io.StringIO()
        width = min(terminal_size(STDOUT)[0], WIDEST)
        Rich(file=page, force_terminal=True, width=width).print(Markdown(text, hyperlinks=False))
        text = page.getvalue()
    with open_pager() as out:
        out.write(text.encode())
