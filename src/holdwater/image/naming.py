"""From instances to images: the names of bases, repositories and friendly tags. Pure.

A name from outside is data: what a reference cannot hold is replaced, and never becomes part of a path.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import sha256

from msgspec.structs import replace

from ..core.errors import BadInput
from ..core.image import Image, Recipe
from ..core.records import Instance

FIELD = re.compile(r"\{([^{}]*)\}")
KNOWN = ("id", "swebench_id")
LONGEST_TAG = 128
DATA = "data."
IMAGE_KEYS = ("image", "docker_image", "image_name")


def check_template(template: str) -> None:
    """ValueError for a template that nothing could fill."""
    for field in FIELD.findall(template):
        if field not in KNOWN and not field.startswith(DATA):
            known = ", ".join(f"`{{{name}}}`" for name in (*KNOWN, "data.KEY"))
            raise ValueError(f"no such field: `{{{field}}}`; there are {known}")
    if "{" in FIELD.sub("", template) or "}" in FIELD.sub("", template):
        raise ValueError(f"a brace without its other: `{template}`")


def base_of(instance: Instance, template: str | None, place: str) -> str:
    """The base of a suite's instance: as the template says, or as the instance itself does."""
    if template is not None:
        return filled(template, instance, place)
    if instance.start.image:
        return instance.start.image
    for key in IMAGE_KEYS:
        if isinstance(found := instance.data.get(key), str) and found:
            return found
    raise BadInput(
        f"{place} (`{instance.id[:200]}`) names no image",
        "give `bases.template`, or put the reference into the instance's `data` as `image`",
    )


def named(
    instance: Instance, own: Callable[[Instance], str] | None, template: str | None, place: str
) -> Instance:
    """The instance with its image in its `start`: its own, the suite's, the template's, or its data's."""
    if instance.start.image:
        return instance
    image = own(instance) if own is not None else ""
    if not image and template is not None:
        image = filled(template, instance, place)
    if not image and instance.start.build is None:
        told = (instance.data.get(key) for key in IMAGE_KEYS)
        image = next((one for one in told if isinstance(one, str) and one), "")
    return replace(instance, start=replace(instance.start, image=image)) if image else instance


def filled(template: str, instance: Instance, place: str) -> str:
    """`ghcr.io/o/{id}:latest` with the instance's own values."""

    def value(match: re.Match[str]) -> str:
        field = match[1]
        if field == "id":
            return instance.id
        if field == "swebench_id":  # as its maintainers publish them
            return instance.id.lower().replace("__", "_1776_")
        found = instance.data.get(field.removeprefix(DATA))
        if not isinstance(found, str | int):
            raise BadInput(f"{place} (`{instance.id[:200]}`) has no `{field}`, which `{template}` asks for")
        return str(found)

    return FIELD.sub(value, template)


def image_of(recipe: Recipe, instance: Instance, base: str, place: str) -> Image:
    """What is asked for."""
    return Image(
        name=instance.id,
        base=base,
        repository=_repository(recipe.repository, instance, place),
        aliases=(as_tag(filled(recipe.alias, instance, place)),) if recipe.alias else (),
    )


def as_tag(text: str) -> str:
    """`text` as a tag; with a hash behind it where it had to be changed, so that no two become one."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).lstrip(".-") or "image"
    if plain == text and len(plain) <= LONGEST_TAG:
        return plain
    return f"{plain[: LONGEST_TAG - 9]}-{sha256(text.encode()).hexdigest()[:8]}"


def _repository(template: str, instance: Instance, place: str) -> str:
    host, _, rest = template.partition("/")
    parts = []
    for part in rest.split("/"):
        text = filled(part, instance, place)
        plain = re.sub(r"[^a-z0-9]+", lambda m: m[0] if m[0] in "._-" else "-", text.lower()).strip("._-")
        changed = FIELD.search(part) and plain != text
        parts.append(f"{plain}-{sha256(text.encode()).hexdigest()[:8]}" if changed else plain or part)
    return "/".join((host, *parts))
