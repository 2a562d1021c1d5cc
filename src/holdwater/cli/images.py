"""`holdwater images`: plans, builds, shows and audits the images of a recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from .console import CommandConsole, make_progress_printer
from .flags import Flag, Quiet

images = App(
    name="images",
    help="""Make an image for each base image of a recipe, with the agent on top.

    Images are assembled in the registry without pulling anything. If the recipe runs commands, docker builds
    them within a disk budget. See `holdwater help images`.""",
    help_format="markdown",
    version_flags=(),
)


def _option(text: str) -> Parameter:
    return Parameter(help=text, show_default=False, negative="")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class ImageFlags:
    """The selection of images and the engine; they override the recipe."""

    engine: Annotated[str | None, _option("`registry`, `docker` or `auto`")] = None
    force: Annotated[
        list[str] | None,
        Parameter(
            help="Make present images again too: `all` (the default), `bases` or `agent` alone",
            show_default=False,
            negative="",
            consume_multiple=(0, 1),
        ),
    ] = None
    disk: Annotated[
        str | None,
        _option("Disk that the docker daemon may use in addition to its current usage, such as `60GiB`"),
    ] = None
    only: Annotated[list[str] | None, _option("Only images whose name matches; may be repeated")] = None
    limit: Annotated[int | None, _option("Only the first N images")] = None
    shard: Annotated[str | None, _option("Only part i of n: `1/4`")] = None


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class BuildFlags(ImageFlags):
    """The selection of images, and the limits of a build."""

    concurrency: Annotated[int | None, _option("Images at once")] = None
    cache: Annotated[
        str | None,
        _option("What may stay: layers here (10GiB), bases on the daemon (1GiB); also HOLDWATER_CACHE_SIZE"),
    ] = None
    keep: Annotated[
        bool | None, _option("Keep all bases on the docker daemon for the next build, within `--cache`")
    ] = None
    retries: Annotated[int | None, _option("Retries after a transient failure (2)")] = None
    timeout: Annotated[float | None, _option("Time limit per image, in seconds (3600)")] = None


@images.command
def plan(recipe: Path, /, *, choice: ImageFlags = ImageFlags(), json: Flag = False) -> int:  # noqa: B008 - frozen
    """Show which images exist, which would be made, how and at what cost.

    For example: `holdwater images plan images.toml --json`

    Exit status: 0 all exist or can be made, 1 some cannot, 2 bad input, 4 too little disk.

    Parameters
    ----------
    recipe
        An `images.toml`.
    json
        Print one JSON document.
    """
    from ..api import images as api
    from ..api.process import complete
    from ..view.images import render_plan

    console = CommandConsole()
    prepared = api.prepare_images(recipe, None, **dataclasses.asdict(choice))
    found = complete(api.plan_build(prepared, make_progress_printer(console)))
    console.write_result(found, lambda: render_plan(found), json=json)
    console.flush()
    return found.exit_status


@images.command
def build(
    recipe: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    making: BuildFlags = BuildFlags(),  # noqa: B008 - frozen
    json: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Make the missing images. `holdwater resume` continues a build that was stopped or killed.

    For example: `holdwater images build images.toml --out runs/images`

    Exit status: 0 all exist, 1 some failed, 2 bad input, 3 interrupted and resumable, 4 stopped: no disk.

    Parameters
    ----------
    recipe
        An `images.toml`.
    out
        The build's directory (default: `runs/<time>-images-<recipe>`).
    json
        Print the build's report as one JSON document on stdout.
    """
    CommandConsole.claim()
    from ..api import images as api
    from .foreground_run import run_in_foreground

    prepared = api.prepare_images(recipe, out, **dataclasses.asdict(making))
    return run_in_foreground(prepared, json=json, quiet=quiet)


@images.command
def show(run: str | None = None, image: str | None = None, /, *, json: Flag = False) -> int:
    """Show the results of a build, or of one image.

    For example: `holdwater images show latest`

    Parameters
    ----------
    run
        The build's directory; `latest` (the default) is the newest in `runs/`.
    image
        The name of an image of the build; shows its attempts with their failures and logs.
    json
        Print one JSON document.
    """
    from ..api.reading import LedgerReader, find_instance, find_run, require_recipe
    from .show import show_instance, show_run

    console = CommandConsole()
    with LedgerReader(find_run(run)) as reader:
        require_recipe(reader)
        if image is None:
            show_run(reader, console, json)
        else:
            show_instance(reader, find_instance(reader, image), console, json)
    return 0


@images.command
def audit(run: str | None = None, /, *, deep: Flag = False, trust: Flag = False, json: Flag = False) -> int:
    """Prove that every planned image is in the registry, with the digests that the build recorded.

    The audit reads manifests and configurations, and requests the size of each layer. The exit status is 0
    if no problem is found and 1 otherwise. For example: `holdwater images audit latest --deep`

    Parameters
    ----------
    run
        The build's directory; `latest` (the default) is the newest in `runs/`.
    deep
        Read all layers too, and check their digests.
    trust
        Import the code that a build of another user names.
    json
        Print one JSON document.
    """
    from ..api import images as api
    from ..api.process import complete
    from ..api.reading import find_run
    from ..view.images import render_audit

    console = CommandConsole()
    found = complete(api.audit_build(find_run(run), make_progress_printer(console), deep=deep, trust=trust))
    console.write_result(found, lambda: render_audit(found), json=json)
    console.flush()
    return 0 if found.ok else 1


@images.command
def clean(*, yes: Flag = False, json: Flag = False) -> int:
    """Remove leftovers of builds from the docker daemon: warm layers, build cache, remains of killed builds.

    Only holdwater's own data is removed, and only with `--yes`. For example: `holdwater images clean --yes`

    Parameters
    ----------
    yes
        Remove the data; without it, only list the data.
    json
        Print one JSON document.
    """
    from ..api import images as api
    from ..api.process import complete
    from ..view.images import render_left

    console = CommandConsole()
    found = complete(api.clean_images(do=yes))
    console.write_result(found, lambda: render_left(found, done=yes), json=json)
    return 0
