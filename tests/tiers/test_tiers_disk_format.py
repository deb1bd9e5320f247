"""docs/disk-format.md is what the code does: its offsets, its example, its rules' tests."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

from disk_format_example import DOCUMENT, GEOMETRY, NAME, PAYLOAD, dump, in_document, segment, undump

from tiers import record
from tiers import segment as segments
from tiers.directory import FREE_FLOOR, LOCK_WAIT_S, RESERVE, SEGMENT_LIMIT, SEGMENT_SLACK
from tiers.fake_files import MemoryFiles

TEXT = DOCUMENT.read_text()
TESTS = Path(__file__).parents[1]


def rows(heading: str, nth: int = 0) -> dict[str, tuple[str, str]]:
    """field: (offset, bytes) of the nth table under a heading."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    tables = re.split(r"\| ---: \| ---: \| --- \| --- \|\n", section)[1:]
    found = {}
    for line in tables[nth].split("\n\n")[0].splitlines():
        offset, size, field, _ = [cell.strip() for cell in line.strip("|").split("|")]
        found.setdefault(field, (offset, size))
    return found


def at(fields: dict[str, tuple[str, str]], name: str, data: bytes) -> bytes:
    """The bytes of a field, by the document's own numbers."""
    offset, size = (int(text) for text in fields[name])
    return data[offset : offset + size]


def test_the_example_is_what_the_code_writes() -> None:
    assert in_document().splitlines() == list(dump(segment()))


def test_the_example_says_what_the_text_says_by_the_documents_offsets() -> None:
    data = undump(in_document(), 20_480)
    header = rows("A slot")
    assert at(header, "magic", data) == b"TRNKBLK\0"
    assert at(header, "root", data) == at(header, "parent", data) == b"R" * 16
    assert at(header, "digest", data) == hashlib.sha256(b"R" * 16 + struct.pack("<2i", 7, 258)).digest()[:16]
    assert at(header, "fingerprint", data) == b"F" * 32
    assert at(header, "check", data) == b"secret-1"
    assert at(header, "dtype", data).rstrip(b"\0") == b"float32"
    assert at(header, "layout", data).rstrip(b"\0") == GEOMETRY.layout.encode()
    numbers = {"version": 1, "depth": 0, "sequence": 3, "payload bytes": 32, "block size": 2,
               "payload sum": record.checksum(PAYLOAD), "header sum": record.checksum(data[:4088])}
    assert {name: int.from_bytes(at(header, name, data), "little") for name in numbers} == numbers
    assert data[int(header["token ids"][0]) :][:8] == struct.pack("<2i", 7, 258)
    assert data[int(header["payload"][0]) :][:32] == PAYLOAD


def test_the_examples_table_says_what_the_text_says_by_the_documents_offsets() -> None:
    data = undump(in_document(), 20_480)
    head, entry = rows("The table", 0), rows("The table", 1)
    table = data[2 * 8192 :]
    assert at(head, "magic", table) == b"TRNKTAB\0"
    assert at(head, "fingerprint", table) == b"F" * 32
    numbers = {"version": 1, "slots": 2, "slot bytes": 8192, "payload bytes": 32, "block size": 2, "entry bytes": 88}
    assert {name: int.from_bytes(at(head, name, table), "little") for name in numbers} == numbers
    assert int.from_bytes(table[-8:], "little") == record.checksum(table[:-8])
    first = table[int(head["entries"][0]) :]
    assert at(entry, "state", first) == b"\2"
    assert at(entry, "state", first[88:]) == b"\0"
    header = rows("A slot")
    for name in ("depth", "sequence", "root", "digest", "parent", "check", "payload sum"):
        assert at(entry, name, first) == at(header, name, data)
    assert first[int(entry["token ids"][0]) :][:8] == NAME.tokens


def test_the_code_reads_the_documents_example() -> None:
    files = MemoryFiles()
    descriptor = files.open("/example", create=True)
    files.tree["/example"].data[:] = undump(in_document(), 20_480)
    loaded = segments.load(files, descriptor, GEOMETRY, 2)
    assert (loaded.was, loaded.read_singly) == ("good", 0)
    assert [(i, header.name, header.sequence) for i, header in loaded.table.records()] == [(0, NAME, 3)]
    page, payload = memoryview(bytearray(4096)), memoryview(bytearray(4096))
    files.read(descriptor, [page, payload], 0)
    assert record.check_record(page, payload, GEOMETRY, NAME).sequence == 3


def test_the_documents_constants_are_the_codes() -> None:
    assert (SEGMENT_LIMIT, RESERVE, SEGMENT_SLACK) == (256 << 20, 64 << 10, 16 << 10)
    assert "64 KiB of reserve and 16 KiB a segment" in TEXT
    assert "less than 256 MiB free" in TEXT
    assert FREE_FLOOR == 256 << 20
    assert f"waits {LOCK_WAIT_S:.0f} s" in TEXT
    assert f"windows of {segments.WINDOW_SLOTS} " in TEXT
    assert f"at most {segments.OPEN_WINDOWS} windows" in TEXT
    assert f"at most {segments.WINDOW_SLOTS * segments.OPEN_WINDOWS} headers" in TEXT
    assert f"at most {record.MAX_BLOCK_SIZE}" in TEXT


def test_every_rule_has_a_test_of_its_name() -> None:
    rules = re.findall(r"^- \*\*(.+?)\.\*\*", TEXT.split("\n## Rules\n")[1].split("\n## ")[0], re.MULTILINE)
    assert len(rules) > 20
    source = "".join(p.read_text() for folder in ("tiers", "crash") for p in (TESTS / folder).glob("test_tiers_*.py"))
    tests = re.findall(r"^def (test_\w+)", source, re.MULTILINE)
    names = {rule: "test_" + re.sub(r"\W+", "_", rule.lower().replace("'", "")) for rule in rules}
    missing = [rule for rule, name in names.items() if not any(test.startswith(name) for test in tests)]
    assert not missing
