"""The parts of further protocols: their addresses, their unanswered requests, and the clients of a socket."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdwater.core.errors import BadInput
from holdwater.serve.peer_book import PeerBook
from holdwater.serve.protocols import find_protocol, resolve_place
from holdwater.serve.request_spool import RequestSpool
from holdwater.serve.router_socket import RouterSocket
from holdwater.serve.settings import ListenAddress


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)

    with pytest.raises(BadInput, match="needs a package that is not installed: zmq") as raised:
        find_protocol("verifiers")

    assert raised.value.hint == "`pip install 'holdwater[verifiers]'`"


def test_an_exposed_address_must_be_asked_for() -> None:
    with pytest.raises(BadInput, match="can be reached from other machines"):
        resolve_place("verifiers", "0.0.0.0:5000", unprotected=False, open_network=False)

    exposed = resolve_place("verifiers", "0.0.0.0:5000", unprotected=True, open_network=True)
    own = resolve_place("verifiers", "unix:/run/vf", unprotected=False, open_network=True)
    usual = resolve_place("verifiers", None, unprotected=False, open_network=False)
    assert (exposed.host, own.path, usual) == (
        "0.0.0.0",
        Path("/run/vf"),
        ListenAddress(None, "127.0.0.1", 5000),
    )


async def test_an_address_in_use_is_an_error_that_names_it() -> None:
    async with RouterSocket(ListenAddress(None, "127.0.0.1", 0)) as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(
            BadInput, match=f"cannot listen on `tcp://127.0.0.1:{port}`: Address already in use"
        ):
            async with RouterSocket(ListenAddress(None, "127.0.0.1", port)):
                pass


def test_requests_wait_in_files_until_they_are_answered(tmp_path: Path) -> None:
    spool = RequestSpool(tmp_path / "requests")
    spool.prepare()
    spool.save(b"../one", b"first")
    spool.save(b"two", b"second")
    (tmp_path / "requests" / "torn.request").write_bytes(b"\0\0")

    again = RequestSpool(tmp_path / "requests")
    again.prepare()
    assert sorted(again.list_requests()) == [(b"../one", b"first"), (b"two", b"second")]
    assert again.load(b"two") == b"second"
    again.remove(b"../one")
    assert list(again.list_requests()) == [(b"two", b"second")]


def test_silent_clients_are_found_beside_the_known_numbers() -> None:
    connected = {b"\0" + number.to_bytes(4, "big") for number in (2**32 - 1, 0, 3)}
    book = PeerBook(connected.__contains__)
    book.begin(b"\0" + (2**32 - 2).to_bytes(4, "big"))

    book.refresh(scan=True)
    assert set(book.list_since(0.0)) == connected
    connected.pop()
    book.refresh(scan=False)
    assert set(book.list_since(0.0)) == connected
