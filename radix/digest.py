"""A block's name outside the process: roots and chained digests.

    root   = SHA-256( len(fingerprint) fingerprint  len(adapter) adapter  len(salt) salt )[:16]
    digest = SHA-256( parent digest (16 bytes)  token ids (int32 little-endian) )[:16]

Lengths are 8 bytes, little-endian; they keep ("ab", "c") from meeting ("a", "bc"). Nothing here depends on
the process (`hash()` does), so two machines agree. Computed when a block first leaves the process, never on
the way of a request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

DIGEST_BYTES = 16


def root_digest(fingerprint: bytes, adapter: bytes = b"", salt: bytes = b"") -> bytes:
    """The first parent of a namespace's blocks: 16 bytes."""
    h = hashlib.sha256()
    for part in (fingerprint, adapter, salt):
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.digest()[:DIGEST_BYTES]


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """The name of the block that holds `tokens` behind `parent`: 16 bytes."""
    return hashlib.sha256(parent + tokens).digest()[:DIGEST_BYTES]


def chain(root: bytes, tokens: bytes, block_size: int) -> Iterator[bytes]:
    """The digests of each whole block of `tokens`, from the head; a rest shorter than a block has none."""
    stride = 4 * block_size
    parent = root
    for at in range(0, len(tokens) - stride + 1, stride):
        parent = block_digest(parent, tokens[at : at + stride])
        yield parent
