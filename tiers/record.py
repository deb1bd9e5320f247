"""A record: a block's header and its bytes in a slot, as docs/disk-format.md has it.

Knows the header's fields, writes them and checks them. Does not know files, segments or which slot is whose.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from tiers.errors import BadRecordError, TierError
from tiers.files import PAGE, pages

MAGIC = b"TRNKBLK\0"
VERSION = 1
DIGEST_BYTES = 16
FINGERPRINT_BYTES = 32
CHECK_BYTES = 8
DTYPE_BYTES = 24
LAYOUT_BYTES = 96
MAX_BLOCK_SIZE = 512  # tokens: their ids and the fields fit into a page with room for more fields

HEADER_BYTES = PAGE
# magic, version, depth, root, digest, parent, fingerprint, check, sequence, payload bytes, payload sum, block size,
# (zeros), dtype, layout
FIELDS = struct.Struct("<8sII16s16s16s32s8sQQQI4x24s96s")
TOKENS_AT = 256
SUM_AT = HEADER_BYTES - 8
SUM = struct.Struct("<Q")

# Why a record is a miss: the values of `BadRecordError.cause`.
EMPTY, OTHER_VERSION, TORN_HEADER, FOREIGN = "empty slot", "another version", "torn header", "foreign record"
STALE, TORN_PAYLOAD, SHORT, REMOVED = "stale entry", "torn payload", "short record", "removed segment"


class RecordName(NamedTuple):
    """What a record says it is."""

    root: bytes  # 16: its namespace
    digest: bytes  # 16
    parent: bytes  # 16; the root at depth 0
    depth: int  # blocks before it on its path
    tokens: bytes  # int32 little-endian, block_size of them


class Geometry(NamedTuple):
    """What all records of a directory's namespace have in common."""

    fingerprint: bytes  # 32
    block_size: int  # tokens
    dtype: str
    layout: str
    payload_bytes: int

    @property
    def stride(self) -> int:
        """A payload's bytes in a slot: whole pages."""
        return pages(self.payload_bytes)

    @property
    def slot_bytes(self) -> int:
        return HEADER_BYTES + self.stride

    def check(self) -> None:
        """Raise `TierError` if a record can't say this."""
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise TierError(f"a fingerprint of {len(self.fingerprint)} bytes; a record holds {FINGERPRINT_BYTES}")
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise TierError(f"a block size of {self.block_size} tokens: choose one of 1 to {MAX_BLOCK_SIZE}")
        if self.payload_bytes < 1:
            raise TierError(f"a block of {self.payload_bytes} bytes can't be stored")
        for text, room in ((self.dtype, DTYPE_BYTES), (self.layout, LAYOUT_BYTES)):
            if not text.isascii() or len(text) > room:
                raise TierError(f"{text!r} does not fit into a record: at most {room} ASCII characters")


class Header(NamedTuple):
    """What a good header says, beside what its geometry says."""

    name: RecordName
    sequence: int
    check: bytes  # 8: which secret
    payload_sum: int


def checksum(data: memoryview | bytes) -> int:
    """XXH3_64 with seed 0: finds accidents, not attacks."""
    return xxhash.xxh3_64_intdigest(data)


def text_field(text: str, room: int) -> bytes:
    return text.encode("ascii").ljust(room, b"\0")


def check_name(name: RecordName, geometry: Geometry) -> None:
    """Raise `TierError` if the name's parts have not the lengths that a record has room for."""
    lengths = (len(name.root), len(name.digest), len(name.parent), len(name.tokens))
    wanted = (DIGEST_BYTES, DIGEST_BYTES, DIGEST_BYTES, 4 * geometry.block_size)
    if lengths != wanted:
        raise TierError(f"root, digest, parent and tokens of {lengths} bytes; a record here has {wanted}")


def pack_header(into: memoryview, geometry: Geometry, header: Header) -> None:
    """Write the header over the page `into`."""
    name = header.name
    check_name(name, geometry)
    FIELDS.pack_into(into, 0, MAGIC, VERSION, name.depth, name.root, name.digest, name.parent, geometry.fingerprint,
                     header.check, header.sequence, geometry.payload_bytes, header.payload_sum, geometry.block_size,
                     text_field(geometry.dtype, DTYPE_BYTES), text_field(geometry.layout, LAYOUT_BYTES))
    end = TOKENS_AT + 4 * geometry.block_size
    into[TOKENS_AT:end] = name.tokens
    into[end:SUM_AT] = bytes(SUM_AT - end)
    SUM.pack_into(into, SUM_AT, checksum(into[:SUM_AT]))


def parse_header(page: memoryview, geometry: Geometry) -> Header:
    """What the page says; `BadRecordError` if it is not a good header of this geometry."""
    (magic, version, depth, root, digest, parent, fingerprint, check, sequence, payload_bytes, payload_sum,
     block_size, dtype, layout) = FIELDS.unpack_from(page)
    if magic != MAGIC:
        raise BadRecordError(EMPTY, "there is no record in the slot")
    if version != VERSION:
        raise BadRecordError(OTHER_VERSION, f"the record is of version {version}, not {VERSION}")
    if SUM.unpack_from(page, SUM_AT)[0] != checksum(page[:SUM_AT]):
        raise BadRecordError(TORN_HEADER, "the header's checksum is wrong")
    found = (fingerprint, block_size, dtype, layout, payload_bytes)
    if found != (geometry.fingerprint, geometry.block_size, text_field(geometry.dtype, DTYPE_BYTES),
                 text_field(geometry.layout, LAYOUT_BYTES), geometry.payload_bytes):
        raise BadRecordError(FOREIGN, "the record is of another model, block size or layout")
    tokens = bytes(page[TOKENS_AT : TOKENS_AT + 4 * block_size])
    return Header(RecordName(root, digest, parent, depth, tokens), sequence, check, payload_sum)


def check_record(page: memoryview, payload: memoryview, geometry: Geometry, wanted: RecordName) -> Header:
    """The header, if header and payload are those of `wanted` (by root and digest); else `BadRecordError`."""
    header = parse_header(page, geometry)
    if (header.name.root, header.name.digest) != (wanted.root, wanted.digest):
        raise BadRecordError(STALE, f"the slot holds block {header.name.digest.hex()}, not {wanted.digest.hex()}")
    if checksum(payload[: geometry.payload_bytes]) != header.payload_sum:
        raise BadRecordError(TORN_PAYLOAD, "the payload's checksum is wrong")
    return header
