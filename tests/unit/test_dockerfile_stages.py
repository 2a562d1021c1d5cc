"""The stages and arguments of a Dockerfile, which a target and build arguments are checked against."""

from __future__ import annotations

import pytest

from holdwater.image.docker.stages import find_unknown_argument, find_wrong_target, list_stages

DOCKERFILE = """\
# FROM comment AS nothing
ARG BASE=debian:12 OTHER="a b"
FROM --platform=$BUILDPLATFORM python:3.13 AS Builder
ARG MODE \\
    LEVEL=2
RUN <<EOF && echo $((1 << 2)) <<<word
FROM text AS not-a-stage
EOF
from ${BASE}
RUN echo FROM x AS neither
FROM builder as final
"""


def test_stages_have_names_or_numbers() -> None:
    assert list_stages(DOCKERFILE) == ["Builder", "1", "final"]


@pytest.mark.parametrize("target", ["", "builder", "BUILDER", "final"])
def test_a_stage_is_a_target_in_any_case_of_letters(target: str) -> None:
    assert find_wrong_target(DOCKERFILE, target) == ""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (DOCKERFILE, "no such stage: `not-a-stage`; the stages are `Builder`, `final`"),
        ("FROM a\n", "no such stage: `not-a-stage`; no stage has a name"),
    ],
)
def test_a_wrong_target_is_told_with_the_stages(text: str, told: str) -> None:
    assert find_wrong_target(text, "not-a-stage") == told


def test_an_argument_is_declared_or_known_to_every_build() -> None:
    known = ["BASE", "OTHER", "MODE", "LEVEL", "http_proxy", "TARGETARCH", "SOURCE_DATE_EPOCH"]

    assert find_unknown_argument(DOCKERFILE, known) == ""
    assert find_unknown_argument(DOCKERFILE, [*known, "TARGET_MODE"]) == "TARGET_MODE"
