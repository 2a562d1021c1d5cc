"""Another machine: a network namespace that a cable joins to this one, and a certificate for its address."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

from tests.docker_daemon import needed

NUMBERS = count(1)


class OtherMachine(NamedTuple):
    """A network namespace; `near` is this machine's address on the cable, `address` its own."""

    name: str
    cable: str
    near: str
    address: str
    certificate: Path
    key: Path

    @property
    def before(self) -> tuple[str, ...]:
        """What starts a command on that machine."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """Pull the cable: nothing is refused, nothing arrives."""
        _do("ip", "link", "set", self.cable, "down")

    def heal(self) -> None:
        _do("ip", "link", "set", self.cable, "up")


@contextmanager
def other_machine(place: Path) -> Iterator[OtherMachine]:
    needed("ip", "openssl")
    number = next(NUMBERS)
    name, cable = f"hw{os.getpid()}x{number}", f"hwc{os.getpid() % 1_000_000}x{number}"
    net = f"10.{100 + os.getpid() % 100}.{number}"
    machine = OtherMachine(name, cable, f"{net}.1", f"{net}.2", place / "cert.pem", place / "key.pem")
    place.mkdir(parents=True, exist_ok=True)
    _do("ip", "netns", "add", name)
    try:
        _do("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _do("ip", "address", "add", f"{machine.near}/24", "dev", cable)
        _do("ip", "link", "set", cable, "up")
        _do(*machine.before, "ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _do(*machine.before, "ip", "link", "set", link, "up")
        _make_certificate(machine)
        yield machine
    finally:
        subprocess.run(["ip", "link", "delete", cable], check=False, capture_output=True)
        _do("ip", "netns", "delete", name)


def _make_certificate(machine: OtherMachine) -> None:
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=sandboxd", "-addext", f"subjectAltName=IP:{machine.address}"]
    _do(*words, "-keyout", str(machine.key), "-out", str(machine.certificate))


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)
