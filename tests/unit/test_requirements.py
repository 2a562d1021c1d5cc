"""What `scripts/setup` installs is locked: every package by hashes, and as pyproject.toml asks for it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CLIENTS = {
    "aider": "aider_packages",
    "mini": "mini_packages",
    "readers": "reader_packages",
    "verifiers": "verifiers_packages",
    "schemas": "schema_packages",
}
RENEW = "`scripts/lock` writes the files anew"


def read_pins(name: str) -> dict[str, list[tuple[Requirement, int]]]:
    """Each package of a file: its pins, one for each kind of machine, and how many hashes they have."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", " ").splitlines()
    found: dict[str, list[tuple[Requirement, int]]] = {}
    for line in lines:
        if line and not line.startswith("#"):
            pin, *hashes = re.split(r"\s+--hash=sha256:(?=[0-9a-f]{64}\b)", line.strip())
            requirement = Requirement(pin)
            found.setdefault(canonicalize_name(requirement.name), []).append((requirement, len(hashes)))
    return found


def read_wanted(name: str) -> list[Requirement]:
    """What pyproject.toml, or the list of clients, asks for in a set."""
    if name in CLIENTS:
        clients = (ROOT / "scripts" / "clients").read_text()
        (words,) = re.findall(rf"^{CLIENTS[name]}=\((.*?)\)", clients, re.MULTILINE)
        return [Requirement(word) for word in words.split()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    sets = {
        "build": project["build-system"]["requires"] + groups["build"],
        "run": project["project"]["dependencies"],
        "dev": project["project"]["dependencies"] + groups["build"] + groups["dev"] + groups["clients"],
    }
    return [Requirement(word) for word in sets[name]]


@pytest.mark.parametrize("name", ["build", "run", "dev", *CLIENTS])
def test_the_lock_has_every_requirement(name: str) -> None:
    pins = read_pins(name)
    for wanted in read_wanted(name):
        found = pins.get(canonicalize_name(wanted.name))
        assert found, f"`{wanted.name}` is not in requirements/{name}.txt: {RENEW}"
        for pin, _ in found:
            (version,) = pin.specifier
            assert wanted.specifier.contains(version.version), f"{wanted} is not {pin}: {RENEW}"


@pytest.mark.parametrize("name", ["build", "run", "dev", *CLIENTS])
def test_every_package_is_pinned_by_hash_and_no_index_is_named(name: str) -> None:
    for pins in read_pins(name).values():
        for pin, hashes in pins:
            assert [specifier.operator for specifier in pin.specifier] == ["=="]
            assert hashes and pin.url is None, pin
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert "://" not in text and "--index" not in text and "--find-links" not in text


def test_constraints_are_the_versions_of_the_lock() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = {str(Requirement(line)) for line in lines if not line.startswith("#")}

    largest = {str(pin) for pins in read_pins("dev").values() for pin, _ in pins}
    assert constraints == largest, RENEW
    for name in ("build", "run"):
        versions = {(key, str(pin.specifier)) for key, pins in read_pins(name).items() for pin, _ in pins}
        among = {(key, str(pin.specifier)) for key, pins in read_pins("dev").items() for pin, _ in pins}
        assert versions <= among, RENEW
