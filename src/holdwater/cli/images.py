"""`holdwater images`: plan, build, show and audit the images of a recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from .console import Console, teller
from .flags import Flag, find_run

images = App(
    name="images",
    help="""Make an image for each base of a recipe: the base, and the agent on top.

    The images are assembled in the registry, without pulling anything, or built by docker inside a disk
    budget where the recipe runs something. See `holdwater help images`.""",
    help_format="markdown",
    version_flags=(),
)


def _said(text: str) -> Parameter:
    return Parameter(help=text, show_default=False, negative="")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Choice:
    """Which images, and how; in place of what the recipe says."""

    engine: Annotated[str | None, _said("`registry`, `docker` or `auto`")] = None
    only: Annotated[list[str] | None, _said("Only images whose name matches; may be repeated")] = None
    limit: Annotated[int | None, _said("Only the first so many images")] = None
    shard: Annotated[str | None, _said("Only part i of n: `1/4`")] = None


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Making(Choice):
    """And what a build may use."""

    concurrency: Annotated[int | None, _said("Images at once")] = None
    disk: Annotated[
        str | None, _said("What a docker daemon may take beyond what is there, such as `60GiB`")
    ] = None
    retries: Annotated[int | None, _said("Further tries after a failure that may pass (2)")] = None
    timeout: Annotated[float | None, _said("Seconds that one image may take (3600)")] = None


@images.command
def plan(recipe: Path, /, *, choice: Choice = Choice(), json: Flag = False) -> int:  # noqa: B008 - frozen
    """Show what exists, what would be made, how and at what cost.

    For example: `holdwater images plan images.toml`

    Parameters
    ----------
    recipe
        An `images.toml`.
    json
        Print one JSON document.
    """
    from ..api import complete
    from ..api import images as api

    console = Console()
    prepared = api.prepare_images(recipe, None, **dataclasses.asdict(choice))
    found = complete(api.plan_build(prepared, teller(console)))
    if json:
        console.data(found)
    else:
        from ..view.images import render_plan

        console.page(render_plan(found))
    console.flush()
    return 1 if found.unknown else 0


@images.command
def build(
    recipe: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    making: Making = Making(),  # noqa: B008 - frozen
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Make what is missing. `holdwater resume` goes on with a build that was stopped or killed.

    For example: `holdwater images build images.toml --out runs/images`

    Exit status: 0 all are there, 1 some failed, 2 bad input, 3 interrupted and resumable, 4 stopped: no disk.

    Parameters
    ----------
    recipe
        An `images.toml`.
    out
        The build's directory; `runs/<time>-images-<recipe>` otherwise.
    json
        Print the build's report as one JSON document on stdout.
    quiet
        No display and no closing page.
    """
    Console.claim()
    from ..api import images as api
    from .conduct import conducted

    prepared = api.prepare_images(recipe, out, **dataclasses.asdict(making))
    return conducted(lambda around: api.start_build(prepared, around), json=json, quiet=quiet)


@images.command
def show(run: str | None = None, image: str | None = None, /, *, json: Flag = False) -> int:
    """Show what became of a build, or of one image.

    For example: `holdwater images show latest`

    Parameters
    ----------
    run
        The build's directory; `latest`, or nothing, is the newest in `runs/`.
    image
        The name of an image of the build: its attempts, with their failures and logs.
    json
        Print one JSON document.
    """
    from ..ledger.images import recipe_of
    from ..ledger.reader import Reader
    from .show import find_instance, show_instance, show_run

    console = Console()
    with Reader(find_run(run)) as reader:
        recipe_of(reader)
        if image is None:
            show_run(reader, console, json)
        else:
            show_instance(reader, find_instance(reader, image), console, json)
    return 0


@images.command
def audit(run: str | None = None, /, *, deep: Flag = False, trust: Flag = False, json: Flag = False) -> int:
    """Prove that every planned image is in the registry, with the digests that the build recorded.

    Manifests and configurations are read, layers are asked for their size. The exit status is 0 if all is
    well and 1 otherwise. For example: `holdwater images audit latest --deep`

    Parameters
    ----------
    run
        The build's directory; `latest`, or nothing, is the newest in `runs/`.
    deep
        Read all layers too, and check their digests.
    trust
        Import the code that another user's build names.
    json
        Print one JSON document.
    """
    from ..api import complete
    from ..api import images as api

    console = Console()
    found = complete(api.audit_build(find_run(run), teller(console), deep=deep, trust=trust))
    if json:
        console.data(found)
    else:
        from ..view.images import render_audit

        console.page(render_audit(found))
    console.flush()
    return 0 if found.ok else 1


@images.command
def clean(*, yes: Flag = False, json: Flag = False) -> int:
    """Remove what builds keep on the docker daemon: warm layers, build cache, what killed builds left.

    Only what is ours goes, and nothing before `--yes`. For example: `holdwater images clean --yes`

    Parameters
    ----------
    yes
        Do it.
    json
        Print one JSON document.
    """
    from ..api import complete
    from ..api import images as api

    console = Console()
    found = complete(api.clean_images(do=yes))
    if json:
        console.data(found)
    else:
        from ..view.images import render_left

        console.page(render_left(found, done=yes))
    return 0
