"""Headers: what is written is what is read, and nothing else is believed. Names follow docs/disk-format.md."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from disk_records import GEOMETRY, block, payload
from hypothesis import given

from tiers.errors import BadRecordError, TierError
from tiers.files import PAGE, aligned
from tiers.record import (
    FIELDS,
    SUM,
    SUM_AT,
    Geometry,
    Header,
    RecordName,
    check_record,
    checksum,
    pack_header,
    parse_header,
)

NAME = block(7)
PAYLOAD = payload(NAME)
HEADER = Header(NAME, 9, b"secret-1", checksum(PAYLOAD[: GEOMETRY.payload_bytes]))


def page(geometry: Geometry = GEOMETRY, header: Header = HEADER) -> memoryview:
    made = aligned(PAGE)
    pack_header(made, geometry, header)
    return made


def why(made: memoryview, geometry: Geometry = GEOMETRY, wanted: RecordName = NAME, data: memoryview = PAYLOAD) -> str:
    with pytest.raises(BadRecordError) as error:
        check_record(made, data, geometry, wanted)
    return error.value.cause


def test_what_a_header_says_is_read_back() -> None:
    assert parse_header(page(), GEOMETRY) == HEADER
    assert check_record(page(), PAYLOAD, GEOMETRY, NAME) == HEADER


def test_a_block_of_512_tokens_fits() -> None:
    geometry = GEOMETRY._replace(block_size=512, layout="x" * 96, dtype="y" * 24)
    header = HEADER._replace(name=block(1, geometry=geometry), sequence=2**64 - 1)
    assert parse_header(page(geometry, header), geometry) == header


@pytest.mark.parametrize(("field", "value"), [
    ("fingerprint", b"short"), ("block_size", 513), ("block_size", 0), ("payload_bytes", 0), ("dtype", "x" * 25),
    ("layout", "x" * 97), ("layout", "ü"),
])
def test_what_a_record_has_no_room_for_is_refused(field: str, value: object) -> None:
    with pytest.raises(TierError):
        GEOMETRY._replace(**{field: value}).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [NAME._replace(tokens=b"1234"), NAME._replace(root=b""),
                                  NAME._replace(digest=b"x" * 32)])
def test_a_name_of_other_lengths_is_refused(name: RecordName) -> None:
    with pytest.raises(TierError):
        page(header=HEADER._replace(name=name))


@given(at=st.integers(0, PAGE - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_a_header_is_a_miss(at: int, bit: int) -> None:
    made = page()
    made[at] ^= 1 << bit
    expected = "empty slot" if at < 8 else "another version" if at < 12 else "torn header"
    assert why(made) == expected


@pytest.mark.parametrize("at", [8, 12, 16, 32, 48, 64, 96, 104, 112, 120, 128, 132, 136, 160, 256, 271, 272, 4087,
                                4088, 4095])
def test_a_torn_header_is_a_miss(at: int) -> None:
    made = page()
    made[at] ^= 0xFF
    assert why(made) == ("another version" if at == 8 else "torn header")


@given(at=st.integers(0, GEOMETRY.payload_bytes - 1), bit=st.integers(0, 7))
def test_a_torn_payload_is_a_miss(at: int, bit: int) -> None:
    data = aligned(GEOMETRY.stride)
    data[:] = PAYLOAD
    data[at] ^= 1 << bit
    assert why(page(), data=data) == "torn payload"


def test_the_filling_behind_a_payload_means_nothing() -> None:
    data = aligned(GEOMETRY.stride)
    data[: GEOMETRY.payload_bytes] = PAYLOAD[: GEOMETRY.payload_bytes]
    assert check_record(page(), data, GEOMETRY, NAME) == HEADER


def test_an_empty_slot_is_a_miss() -> None:
    assert why(aligned(PAGE)) == "empty slot"


def test_another_version_is_a_miss() -> None:
    made = page()
    made[8] = 2
    SUM.pack_into(made, SUM_AT, checksum(made[:SUM_AT]))  # a good header, of a later format
    assert why(made) == "another version"


@pytest.mark.parametrize(("field", "value"), [
    ("fingerprint", b"G" * 32), ("dtype", "bfloat16"), ("layout", "[other]"), ("payload_bytes", 4999),
])
def test_a_foreign_record_is_a_miss(field: str, value: object) -> None:
    other = GEOMETRY._replace(**{field: value})  # type: ignore[arg-type]
    assert why(page(other)) == "foreign record"


def test_a_foreign_record_is_a_miss_by_block_size() -> None:
    other = GEOMETRY._replace(block_size=8)
    assert why(page(other, HEADER._replace(name=block(7, geometry=other)))) == "foreign record"


def test_a_stale_entry_is_a_miss() -> None:
    assert why(page(), wanted=block(8)) == "stale entry"
    assert why(page(), wanted=NAME._replace(root=b"S" * 16)) == "stale entry"


def test_the_fields_end_where_the_tokens_begin() -> None:
    assert FIELDS.size == 256


@given(data=st.binary(max_size=400), at=st.integers(0, PAGE - 400))
def test_garbage_is_never_a_header(data: bytes, at: int) -> None:
    made = page()
    made[at : at + len(data)] = data
    if made != page():
        with pytest.raises(BadRecordError):
            parse_header(made, GEOMETRY)
