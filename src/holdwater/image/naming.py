"""Map instances to images: the names of bases, repositories and alias tags. Pure.

External names are data: characters that a reference cannot hold are replaced and never become part of a path.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import sha256

from msgspec.structs import replace

from ..core.errors import BadInput
from ..core.image import ImageRecipe, ImageTarget
from ..core.records import Instance

FIELD = re.compile(r"\{([^{}]*)\}")
KNOWN_FIELDS = ("id", "swebench_id")
GIT_FIELDS = ("git.sha", "git.short")  # filled when the recipe is read: see `recipe_variables.py`
LONGEST_TAG = 128
DATA_PREFIX = "data."
IMAGE_KEYS = ("image", "docker_image", "image_name")


def check_template(template: str) -> None:
    """Raise ValueError for a template that no instance can fill."""
    for field in FIELD.findall(template):
        if field not in KNOWN_FIELDS and not field.startswith(DATA_PREFIX):
            known = ", ".join(f"`{{{name}}}`" for name in (*KNOWN_FIELDS, "data.KEY", *GIT_FIELDS))
            raise ValueError(f"unknown field: `{{{field}}}`; known fields: {known}")
    if "{" in FIELD.sub("", template) or "}" in FIELD.sub("", template):
        raise ValueError(f"unbalanced brace: `{template}`")


def is_shared(template: str) -> bool:
    """Return whether the template has the same value for every instance."""
    return FIELD.search(template) is None


def base_of(instance: Instance, template: str | None, place: str) -> str:
    """Return the base image of a suite's instance: from the template, or from the instance itself."""
    if template is not None:
        return fill_template(template, instance, place)
    if instance.start.image:
        return instance.start.image
    if image := _named_image(instance):
        return image
    raise BadInput(
        f"{place} (`{instance.id[:200]}`) names no image",
        "give `bases.template`, or put the reference into the instance's `data` as `image`",
    )


def assign_image(
    instance: Instance, own: Callable[[Instance], str] | None, template: str | None, place: str
) -> Instance:
    """Return the instance with an image in its `start`.

    The first source that has an image wins: the instance, the suite, the template, the instance's data.
    """
    if instance.start.image:
        return instance
    image = own(instance) if own is not None else ""
    if not image and template is not None:
        image = fill_template(template, instance, place)
    if not image and instance.start.build is None:
        image = _named_image(instance)
    return replace(instance, start=replace(instance.start, image=image)) if image else instance


def fill_template(template: str, instance: Instance, place: str) -> str:
    """Return a template such as `ghcr.io/o/{id}:latest`, filled with the instance's values."""

    def value(match: re.Match[str]) -> str:
        field = match[1]
        if field == "id":
            return instance.id
        if field == "swebench_id":  # the naming scheme of the images that the SWE-bench maintainers publish
            return instance.id.lower().replace("__", "_1776_")
        found = instance.data.get(field.removeprefix(DATA_PREFIX))
        if not isinstance(found, str | int):
            raise BadInput(
                f"{place} (`{instance.id[:200]}`) has no `{field}`, which the template `{template}` needs"
            )
        return str(found)

    return FIELD.sub(value, template)


def image_of(recipe: ImageRecipe, instance: Instance, base: str, place: str) -> ImageTarget:
    """Return the image to make for an instance."""
    return ImageTarget(
        name=instance.id,
        base=base,
        repository=_fill_repository(recipe.repository, instance, place),
        aliases=tuple(dict.fromkeys(as_tag(fill_template(x, instance, place)) for x in recipe.aliases)),
        bases=_fill_repository(recipe.base_repository, instance, place) if recipe.base_repository else "",
    )


def as_tag(text: str) -> str:
    """Return `text` as a valid tag; a changed text gets a hash suffix, so that no two texts share a tag."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).lstrip(".-") or "image"
    if plain == text and len(plain) <= LONGEST_TAG:
        return plain
    return f"{plain[: LONGEST_TAG - 9]}-{sha256(text.encode()).hexdigest()[:8]}"


def _named_image(instance: Instance) -> str:
    """Return the image that the instance's data names; empty: none."""
    named = (instance.data.get(key) for key in IMAGE_KEYS)
    return next((image for image in named if isinstance(image, str) and image), "")


def _fill_repository(template: str, instance: Instance, place: str) -> str:
    host, _, rest = template.partition("/")
    parts = []
    for part in rest.split("/"):
        text = fill_template(part, instance, place)
        plain = re.sub(r"[^a-z0-9]+", lambda m: m[0] if m[0] in "._-" else "-", text.lower()).strip("._-")
        changed = FIELD.search(part) and plain != text
        parts.append(f"{plain}-{sha256(text.encode()).hexdigest()[:8]}" if changed else plain or part)
    return "/".join((host, *parts))
