"""Find and remove images on a docker daemon by name.

`janitor.py` decides which images are removed.
"""

from __future__ import annotations

from ...docker.client import DockerClient, DockerError

NAMESPACE = "holdwater.local"  # no registry has this name, so these tags are never pushed or pulled


async def has_image(client: DockerClient, reference: str) -> bool:
    """Return whether the daemon has an image with this name, owned or foreign."""
    return await client.get_or_none(f"/images/{reference}/json") is not None


async def list_tags(client: DockerClient, run: str = "") -> list[str]:
    """Return the tags in holdwater's namespace: of one run, or of all runs for an empty name."""
    images = await client.get("/images/json")
    prefix = f"{NAMESPACE}/{run}:" if run else f"{NAMESPACE}/"
    return [tag for image in images for tag in image["RepoTags"] or () if tag.startswith(prefix)]


async def delete_image(client: DockerClient, reference: str) -> bool:
    """Remove an image name; return whether the name is gone. An image that a container uses stays."""
    try:
        await client.delete(f"/images/{reference}", {"noprune": "true", "force": "false"})
    except DockerError as error:
        if error.status not in (404, 409):
            raise
        return error.status == 404
    return True
