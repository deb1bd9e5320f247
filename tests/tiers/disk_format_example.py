"""The worked example of docs/disk-format.md, made by the real code. Run it to write it into the document."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tiers.fake_files import MemoryFiles
from tiers.files import aligned
from tiers.record import Geometry, Header, RecordName, checksum, pack_header
from tiers.segment import Table, segment_bytes, store

DOCUMENT = Path(__file__).parents[2] / "docs" / "disk-format.md"
MARK = "<!-- example: made by `python tests/tiers/disk_format_example.py` -->\n"

GEOMETRY = Geometry(b"F" * 32, 2, "float32", "[layer][K|V][block_size][kv_heads][head_dim]", 32)
TOKENS = struct.pack("<2i", 7, 258)
# SHA-256 of root and tokens, first 16 bytes: `printf 'RRRRRRRRRRRRRRRR\7\0\0\0\2\1\0\0' | sha256sum`
NAME = RecordName(b"R" * 16, bytes.fromhex("936d27bc03c078032fb6d128f77f9f32"), b"R" * 16, 0, TOKENS)
PAYLOAD = bytes(range(32))


def segment() -> bytes:
    """The whole file: slot 0 was written, slot 1 never, and no window is open."""
    files = MemoryFiles()
    descriptor = files.open("/example", create=True)
    files.allocate(descriptor, segment_bytes(GEOMETRY, 2))
    header = Header(NAME, 3, b"secret-1", checksum(PAYLOAD))
    page, payload = aligned(4096), aligned(GEOMETRY.stride)
    pack_header(page, GEOMETRY, header)
    payload[: len(PAYLOAD)] = PAYLOAD
    files.write(descriptor, [page, payload], 0)
    table = Table(GEOMETRY, 2)
    table.put(0, header)
    store(files, descriptor, table)
    return bytes(files.tree["/example"].data)


def dump(data: bytes) -> Iterator[str]:
    """Lines of 16 bytes with their offsets, as `hexdump -C` has them; lines of zeros are left out."""
    for at in range(0, len(data), 16):
        line = data[at : at + 16]
        if any(line):
            text = "".join(chr(b) if 32 <= b < 127 else "." for b in line)
            yield f"{at:08x}  {line[:8].hex(' ')}  {line[8:].hex(' ')}  |{text}|"


def undump(text: str, size: int) -> bytes:
    """The bytes that `dump` was given."""
    data = bytearray(size)
    for line in text.splitlines():
        at, rest = line.split("  ", 1)
        data[int(at, 16) : int(at, 16) + 16] = bytes.fromhex(rest.split("  |")[0])
    return bytes(data)


def in_document() -> str:
    """The example's hex, as the document has it."""
    after = DOCUMENT.read_text().split(MARK)[1]
    return after.split("```text\n")[1].split("```")[0]


if __name__ == "__main__":
    before, after = DOCUMENT.read_text().split(MARK)
    after = "\n## Rules\n" + after.split("\n## Rules\n")[1]
    DOCUMENT.write_text(before + MARK + "\n```text\n" + "\n".join(dump(segment())) + "\n```\n" + after)
