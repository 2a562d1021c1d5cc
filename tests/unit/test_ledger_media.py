"""Media: what the gateway took out of a message is put back, byte for byte; forged references are nothing."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import msgspec
import pytest
from tests.ledger_runs import exchange

from holdwater.conversation.trajectory import ExchangeTree
from holdwater.core.errors import LedgerCorrupt
from holdwater.gateway.media import extract_media
from holdwater.ledger.blobs import BlobStore, find_references, resolve_references
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog, read_exchanges


def image(size: int) -> str:
    return "data:image/png;base64," + base64.b64encode(os.urandom(size)).decode()


def test_what_was_taken_out_is_put_back_exactly(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    text = 'she said \\"data:image/png;base64,AAAA\\"'
    message = json.dumps({"content": [image(5000), text, image(3), image(9001)]}).encode()

    stored = extract_media(message, blobs.put)

    assert len(stored) < 500
    assert len(list(find_references(stored))) == 2
    assert resolve_references(stored, blobs) == message


def test_text_that_looks_like_a_reference_stays_text(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    name = blobs.put(b"a secret of another attempt")
    message = json.dumps({"content": f"holdwater-blob:{name}:text/plain"}).encode()

    stored = extract_media(message, blobs.put)

    assert list(find_references(stored)) == []
    assert json.loads(resolve_references(stored, blobs)) == json.loads(message)


@pytest.mark.parametrize("content", [b"", b"text " * 1000, os.urandom(3000)], ids=["empty", "text", "noise"])
def test_a_blob_is_kept_once_and_checked(tmp_path: Path, content: bytes) -> None:
    blobs = BlobStore(tmp_path)
    names = {blobs.put(content), blobs.put(content)}
    [name] = names
    [path] = [p for p in tmp_path.rglob("*") if p.is_file()]

    assert blobs.get(name) == content
    path.write_bytes(b"something else")
    with pytest.raises(LedgerCorrupt):
        blobs.get(name)


def test_a_name_that_is_no_hash_reaches_no_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"")

    with pytest.raises(LedgerCorrupt, match="missing"):
        BlobStore(tmp_path / "blobs").get("../secret")


def test_a_conversation_is_rebuilt_from_what_each_exchange_added(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    log = AttemptLog(directory, 1234)
    picture = json.dumps({"content": image(6000)}).encode()
    log.append(exchange(1, [b'"a"', b'"b"', b'"c"']))
    log.append(exchange(2, [extract_media(picture, log.blob), b'"e"'], keep=2))
    log.append(exchange(3, [b'"f"'], keep=3))
    log.sync()
    log.close()

    tree = ExchangeTree(directory, 1234)
    first, third = (
        [resolve_references(bytes(raw), tree.blobs) for _, raw in tree.request(number)] for number in (1, 3)
    )
    assert third == [b'"a"', b'"b"', picture, b'"f"']
    assert first == [b'"a"', b'"b"', b'"c"']
    assert log.path == tmp_path / "run" / "exchanges" / "1" / "1234.seg"


def test_an_exchange_comes_back_as_it_was(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    log = AttemptLog(directory, 7)
    first = exchange(1, [b'{"content":"\xc3\xa4"}'])
    failed = msgspec.structs.replace(exchange(2, keep=1), reply=None, status=503, error="gone", streamed=True)
    log.append(first)
    log.append(failed)
    log.close()

    back = list(read_exchanges(directory, 7))

    assert [msgspec.json.encode(e) for e in back] == [msgspec.json.encode(e) for e in (first, failed)]
    assert back[1].reply is None and back[1].head is None


def test_blobs_of_runs_that_kept_them_one_directory_deeper_are_found(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    name = blobs.put(os.urandom(100))
    (path,) = blobs.paths()
    deeper = path.parent / name[2:4] / path.name
    deeper.parent.mkdir()
    path.rename(deeper)

    assert len(blobs.get(name)) == 100
    assert blobs.put(blobs.get(name)) == name and list(blobs.paths()) == [deeper]
