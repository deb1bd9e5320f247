"""The nvme tier, block by block: written, read, recovered, and every fault named. Names follow docs/disk-format.md."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest
from disk_records import CAP, GEOMETRY, ROOT, block, cause, get, open_nvme, payload, put, reopened

from tiers.errors import BadRecordError, NoSpaceError, TierError
from tiers.fake_files import Crash, FaultyFiles, MemoryFiles
from tiers.files import Files, aligned
from tiers.nvme import Nvme
from tiers.record import RecordName

SEGMENT = f"/cache/{GEOMETRY.fingerprint.hex()}/000000.kv"


def fresh(size: int = 1 << 30) -> tuple[FaultyFiles, MemoryFiles, Nvme]:
    memory = MemoryFiles(size)
    files = FaultyFiles(memory)
    nvme = open_nvme(files)
    assert nvme.recover() == []
    return files, memory, nvme


def test_what_is_written_is_read_back() -> None:
    _, _, nvme = fresh()
    names = [block(n) for n in range(30)]
    for slot, name in zip(put(nvme, *names), names, strict=True):
        get(nvme, slot, name)


@pytest.mark.parametrize("direct", [False, True])
def test_real_files_past_and_through_the_page_cache(tmp_path: Path, direct: bool) -> None:
    class Buffered(Files):
        def open(self, path: str, *, write: bool = False, create: bool = False, direct: bool = False) -> int:
            if direct:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().open(path, write=write, create=create)

    files = Files() if direct else Buffered()
    nvme = open_nvme(files, path=str(tmp_path / "a" / "b"))
    if direct and nvme.facts()["direct"] != "O_DIRECT":
        pytest.skip("this file system knows no O_DIRECT")
    assert nvme.facts()["direct"] == ("O_DIRECT" if direct else "buffered")
    nvme.recover()
    names = [block(n) for n in range(40)]
    slots = put(nvme, *names)
    nvme.close()
    again = open_nvme(files, path=str(tmp_path / "a" / "b"))
    assert {r.slot: r.name for r in again.recover()} == dict(zip(slots, names, strict=True))
    for slot, name in zip(slots, names, strict=True):
        get(again, slot, name)
    again.close()


def test_many_threads_read_at_once() -> None:
    _, _, nvme = fresh()
    names = [block(n) for n in range(40)]
    slots = put(nvme, *names)
    wrong: list[BaseException] = []

    def reader(seed: int) -> None:
        order = random.Random(seed).sample(range(40), 40)
        try:
            for n in order:
                get(nvme, slots[n], names[n])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_buffer_of_another_size_is_refused() -> None:
    _, _, nvme = fresh()
    with pytest.raises(TierError, match="8,192"):
        nvme.write(0, block(1), aligned(4096))
    with pytest.raises(TierError):
        nvme.read(0, block(1), aligned(GEOMETRY.stride)[: GEOMETRY.payload_bytes])


# -- writing ---------------------------------------------------------------------------------------------

def test_a_slot_is_open_before_it_is_overwritten() -> None:
    """Whatever part of an overwriting reaches the disk, a start finds the old record, the new one, or a miss."""
    for torn in range(0, GEOMETRY.slot_bytes + 1, 1024):
        files, memory, nvme = fresh()
        put(nvme, *[block(n) for n in range(18)])
        nvme.tidy()  # every entry is LIVE
        nvme.slots.free([5])
        taken = nvme.slots.take(1)
        assert taken == [5]
        files.tear(torn, nth=2)  # the first write is the table
        with pytest.raises(Crash):
            nvme.write(5, block(99), payload(block(99)))
        again, records = reopened(memory)
        said = {r.slot: r.name for r in records}
        assert {slot: name for slot, name in said.items() if slot != 5} == {n: block(n) for n in range(18) if n != 5}
        if torn == 0:
            assert said[5] == block(5)
            get(again, 5, block(5))
        elif torn < 4096:
            assert said.get(5) in (None, block(5)) or cause(again, 5, said[5])
        else:
            assert said[5] == block(99)
            assert cause(again, 5, block(99)) == ("" if torn >= 4096 + GEOMETRY.payload_bytes else "torn payload")


@pytest.mark.parametrize("torn", [0, 100, 256, 400, 2000, 4095])
def test_a_table_that_was_torn_while_it_was_written_costs_its_headers(torn: int) -> None:
    files, memory, nvme = fresh()
    put(nvme, *[block(n) for n in range(18)])
    nvme.tidy()
    nvme.slots.free([5])
    nvme.slots.take(1)
    files.tear(torn)
    with pytest.raises(Crash):
        nvme.write(5, block(99), payload(block(99)))
    again, records = reopened(memory)
    assert {r.slot: r.name for r in records} == {n: block(n) for n in range(18)}
    for record in records:
        get(again, record.slot, record.name)


def test_sequences_only_grow() -> None:
    _, memory, nvme = fresh()
    put(nvme, block(1), block(2))
    nvme, records = reopened(memory)
    first = {r.sequence for r in records}
    put(nvme, block(3))
    nvme.close()
    _, records = reopened(memory)
    new = {r.name: r.sequence for r in records}
    assert len(first) == 2
    assert new[block(1)] < new[block(2)] < new[block(3)]


def test_sequences_only_grow_when_a_segment_was_unreadable_at_the_start() -> None:
    _, memory, nvme = fresh()
    put(nvme, *[block(n) for n in range(5)])
    nvme.close()
    memory.restart()
    files = FaultyFiles(memory)
    nvme = open_nvme(files)
    files.fail("read", errno.EIO)
    assert nvme.recover() == []
    nvme.write(7, block(4), payload(block(4)))
    _, records = reopened(memory, nvme)
    assert {r.slot: r.name for r in records} == {7: block(4), **{n: block(n) for n in range(4)}}


def test_a_write_that_failed_leaves_no_record() -> None:
    files, memory, nvme = fresh()
    slots = put(nvme, *[block(n) for n in range(4)])
    nvme.tidy()
    nvme.slots.free([slots[2]])
    nvme.slots.take(1)
    files.fail("write", errno.EIO, nth=2)
    with pytest.raises(OSError, match="Input/output error"):
        nvme.write(slots[2], block(50), payload(block(50)))
    nvme.close()
    _, records = reopened(memory)
    assert {r.slot: r.name for r in records} == {0: block(0), 1: block(1), 3: block(3)}


@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_table_write_opens_nothing(nth: int) -> None:
    """The table could not be written: the next write has to write it again, before its slot."""
    files, memory, nvme = fresh()
    put(nvme, *[block(n) for n in range(4)])
    nvme.tidy()
    files.fail("write", errno.EIO, times=nth)
    for _ in range(nth):
        with pytest.raises(OSError, match="Input/output"):
            nvme.write(2, block(50), payload(block(50)))
    writes = files.calls["write"]
    nvme.write(2, block(50), payload(block(50)))
    assert files.calls["write"] - writes == 2
    _, records = reopened(memory)
    assert {r.slot: r.name for r in records} == {0: block(0), 1: block(1), 2: block(50), 3: block(3)}


@pytest.mark.parametrize("n_bytes", [0, 4096, 8192])
def test_a_short_write_is_finished_or_fails(n_bytes: int) -> None:
    files, _, nvme = fresh()
    put(nvme, block(1))
    files.short("write", n_bytes)
    if n_bytes:
        slots = put(nvme, block(2))
        get(nvme, slots[0], block(2))
    else:
        with pytest.raises(OSError, match="0 of 12,288 bytes"):
            put(nvme, block(2))


def test_a_full_disk_is_said_so_and_reading_goes_on() -> None:
    files, memory, nvme = fresh()
    slots = put(nvme, block(1))
    files.fail("write", errno.ENOSPC, times=2)
    for n in (2, 3):
        with pytest.raises(NoSpaceError, match="No space left"):
            nvme.write(1, block(n), payload(block(n)))
    get(nvme, slots[0], block(1))
    assert len(nvme.facts()["notes"]) == 1
    nvme.write(1, block(2), payload(block(2)))
    get(nvme, 1, block(2))
    assert {r.slot for r in reopened(memory)[1]} == {0, 1}


# -- reading ---------------------------------------------------------------------------------------------

def test_a_short_record_is_a_miss() -> None:
    _, memory, nvme = fresh()
    put(nvme, block(0), block(1))
    for length in (12288 + 12287, 12288 + 4096, 12288 + 1, 12288, 100, 0):
        del memory.tree[SEGMENT].data[length:]
        assert cause(nvme, 1, block(1)) == "short record"
    assert cause(nvme, 0, block(0)) == "short record"


@pytest.mark.parametrize("direct", [False, True])
def test_a_short_read_is_finished(direct: bool) -> None:
    files = FaultyFiles(MemoryFiles(direct=direct))
    nvme = open_nvme(files)
    put(nvme, block(0))
    for n_bytes in (4096, 5000, 8192, 12287):
        files.short("read", n_bytes)
        get(nvme, 0, block(0))


@pytest.mark.parametrize("method", ["open", "read"])
def test_a_passing_fault_keeps_the_record(method: str) -> None:
    files, _, nvme = fresh()
    put(nvme, block(0))
    for code in (errno.EIO, errno.EIO, errno.EMFILE):
        files.fail(method, code)
        with pytest.raises(OSError, match="reading slot 0 failed"):
            get(nvme, 0, block(0))
    assert len(nvme.facts()["notes"]) == 1
    get(nvme, 0, block(0))
    files.fail(method, errno.EIO)
    with pytest.raises(OSError, match="reading slot 0 failed"):
        get(nvme, 0, block(0))
    assert len(nvme.facts()["notes"]) == 2  # it had worked in between, so it is said again


def test_a_removed_segment_is_a_miss() -> None:
    _, memory, nvme = fresh()
    names = [block(n) for n in range(20)]
    put(nvme, *names)
    memory.remove(SEGMENT)
    assert {cause(nvme, n, names[n]) for n in range(18)} == {"removed segment"}
    assert [cause(nvme, n, names[n]) for n in (18, 19)] == ["", ""]
    assert len(nvme.facts()["notes"]) == 1
    nvme.slots.free([4])
    assert put(nvme, block(77)) == [4]
    get(nvme, 4, block(77))
    assert cause(nvme, 5, names[5]) == "empty slot"
    _, records = reopened(memory)
    assert {r.slot: r.name for r in records} == {4: block(77), 18: names[18], 19: names[19]}


def test_a_removed_directory_is_misses_until_it_is_there_again() -> None:
    files, memory, nvme = fresh()
    put(nvme, block(0), block(1))
    memory.remove_all("/cache")
    assert cause(nvme, 0, block(0)) == "removed segment"
    for _ in range(3):
        with pytest.raises(OSError, match="No such file or directory"):
            nvme.write(0, block(5), payload(block(5)))
    nvme.tidy()
    assert len(nvme.facts()["notes"]) == 2  # one for reading, one for writing
    files.make_directory("/cache")
    nvme.write(0, block(5), payload(block(5)))
    get(nvme, 0, block(5))
    assert cause(nvme, 1, block(1)) == "empty slot"
    nvme.close()
    assert [r.name for r in reopened(memory)[1]] == [block(5)]


def test_a_directory_that_another_server_has_now_is_not_written() -> None:
    _, memory, nvme = fresh()
    put(nvme, block(0))
    memory.remove_all("/cache")
    other = open_nvme(memory)
    other.recover()
    put(other, block(8))
    with pytest.raises(OSError, match="owns it now"):
        nvme.write(0, block(5), payload(block(5)))
    nvme.close()
    get(other, 0, block(8))
    other.close()


def test_what_another_directory_in_its_place_holds_is_kept() -> None:
    """A backup was put back: its tables count, not what we remember of the old ones."""
    _, memory, nvme = fresh()
    put(nvme, *[block(n) for n in range(4)])
    nvme.tidy()
    backup = bytes(memory.tree[SEGMENT].data)
    for slot in range(4):
        nvme.write(slot, block(10 + slot), payload(block(10 + slot)))
    memory.remove_all("/cache")
    memory.make_directory(os.path.dirname(SEGMENT))
    memory.close(memory.open(SEGMENT, create=True))
    memory.tree[SEGMENT].data[:] = backup
    nvme.write(5, block(5), payload(block(5)))
    _, records = reopened(memory, nvme)
    assert {r.slot: r.name for r in records} == {**{n: block(n) for n in range(4)}, 5: block(5)}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_directory_that_became_read_only_says_so(code: int) -> None:
    files, _, nvme = fresh()
    put(nvme, *[block(n) for n in range(18)])
    files.fail("create", code, times=2)
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(code)):
            nvme.write(18, block(18), payload(block(18)))
    assert len(nvme.facts()["notes"]) == 1
    get(nvme, 0, block(0))
    nvme.write(18, block(18), payload(block(18)))


# -- a start ---------------------------------------------------------------------------------------------

def test_the_newer_of_two_copies_wins() -> None:
    for close in (True, False):
        _, memory, nvme = fresh()
        twice = block(1)
        put(nvme, block(0), twice, block(2), twice)
        nvme, records = reopened(memory, nvme if close else None)
        assert {r.slot: r.name for r in records} == {0: block(0), 2: block(2), 3: twice}
        assert nvme.facts()["duplicates"] == 1
        nvme, records = reopened(memory, nvme)
        assert {r.slot: r.name for r in records} == {0: block(0), 2: block(2), 3: twice}
        assert nvme.facts()["duplicates"] == 0  # the loser is EMPTY in the table now


def test_the_newer_of_two_copies_wins_where_both_are_one_file() -> None:
    _, memory, nvme = fresh()
    put(nvme, block(0), block(1))
    nvme.close()
    copy = SEGMENT.replace("000000", "000002")
    memory.open(copy, create=True)
    memory.tree[copy].data[:] = memory.tree[SEGMENT].data
    nvme, records = reopened(memory)
    assert {r.name for r in records} == {block(0), block(1)}
    assert nvme.slots.used() == {r.slot for r in records}


def test_an_orphan_is_freed_and_counted() -> None:
    _, memory, nvme = fresh()
    child = block(5, parent=block(4))
    put(nvme, block(0), child, block(2))
    nvme, _ = reopened(memory, nvme)
    nvme.orphaned([1])
    assert nvme.slots.used() == {0, 2}
    assert nvme.facts()["orphans"] == 1
    nvme, records = reopened(memory, nvme)
    assert {r.name for r in records} == {block(0), block(2)}


def test_an_orphans_slot_can_be_written_at_once() -> None:
    _, memory, nvme = fresh()
    put(nvme, block(0), block(1))
    nvme, _ = reopened(memory, nvme)
    nvme.orphaned([1])
    assert put(nvme, block(9)) == [1]
    _, records = reopened(memory, nvme)
    assert {r.name for r in records} == {block(0), block(9)}


def test_another_secret_is_a_note() -> None:
    memory = MemoryFiles()
    nvme = open_nvme(memory, check=b"secret-1")
    nvme.recover()
    put(nvme, block(0), block(1))
    nvme, _ = reopened(memory, nvme, check=b"secret-2")
    put(nvme, block(2))
    assert "2 records" in nvme.facts()["notes"][0]
    nvme, records = reopened(memory, nvme, check=b"secret-2")
    assert len(records) == 3
    assert "2 records" in nvme.facts()["notes"][0]
    assert "1 with this one" in nvme.facts()["notes"][0]


def test_recovered_records_say_all_that_was_written() -> None:
    _, memory, nvme = fresh()
    parent = block(0)
    child = block(4, parent)
    put(nvme, parent, child)
    for close in (False, True):
        nvme, records = reopened(memory, nvme if close else None)
        assert [(r.slot, r.name, r.sequence) for r in records] == [(0, parent, 1), (1, child, 2)]
        assert records[1].name == RecordName(ROOT, child.digest, parent.digest, 1, child.tokens)


def test_an_unreadable_segment_is_left_out_of_a_start() -> None:
    _, memory, nvme = fresh()
    put(nvme, *[block(n) for n in range(20)])
    nvme.close()
    memory.restart()
    files = FaultyFiles(memory)
    nvme = open_nvme(files)
    files.fail("read", errno.EIO)
    assert {r.name for r in nvme.recover()} == {block(18), block(19)}
    assert "Input/output error" in nvme.facts()["notes"][0]


@pytest.mark.parametrize("method", ["open", "read", "entries", "facts"])
def test_no_fault_is_an_exception_of_a_start(method: str) -> None:
    for nth in range(1, 12):
        _, memory, nvme = fresh()
        names = [block(n) for n in range(20)]
        put(nvme, *names)
        memory.restart()  # not closed: open slots, too
        files = FaultyFiles(memory)
        nvme = open_nvme(files)
        files.fail(method, errno.EIO, nth=nth)
        records = nvme.recover()
        files.heal()
        for record in records:
            get(nvme, record.slot, record.name)


@pytest.mark.parametrize("method", ["open", "create", "read", "write", "entries", "facts", "allocate", "free_space",
                                    "make_directory"])
def test_any_fault_while_writing_is_an_error_that_costs_that_write_alone(method: str) -> None:
    for nth in range(1, 7):
        for code in (errno.EIO, errno.ENOSPC, errno.EACCES):
            files, memory, nvme = fresh()
            files.fail(method, code, nth=nth)
            wrote, failed = {}, []
            for n in range(20):
                try:
                    nvme.write(n, block(n), payload(block(n)))
                    wrote[n] = block(n)
                except OSError as error:
                    failed.append(error)
            files.heal()
            assert len(failed) <= 1
            assert all(isinstance(error, NoSpaceError) == (code == errno.ENOSPC) for error in failed)
            for close in (False, True):
                again, records = reopened(memory, nvme if close else None)
                assert {r.slot: r.name for r in records} == wrote
                for slot, name in wrote.items():
                    get(again, slot, name)
                nvme = again


def test_a_close_writes_the_tables_and_never_raises() -> None:
    files, memory, nvme = fresh()
    put(nvme, block(0))
    files.fail("write", errno.EIO)
    nvme.close()
    nvme.close()
    nvme, records = reopened(memory)
    assert [r.name for r in records] == [block(0)]


def test_used_bytes_are_the_sum_of_live_records() -> None:
    _, memory, nvme = fresh()
    rng = random.Random(7)
    live: dict[int, RecordName] = {}
    for n in range(600):
        if live and (rng.random() < 0.4 or nvme.slots.free_count == 0):
            slot = rng.choice(list(live))
            nvme.slots.free([slot])
            del live[slot]
        else:
            live[put(nvme, block(n))[0]] = block(n)
        if rng.random() < 0.05:
            nvme.tidy()
        assert nvme.facts()["used_bytes"] == len(live) * GEOMETRY.slot_bytes
    for slot, name in live.items():
        get(nvme, slot, name)
    nvme, records = reopened(memory, nvme if rng.random() < 0.5 else None)
    assert {r.slot: r.name for r in records}.items() >= live.items()
    assert nvme.facts()["used_bytes"] == len(records) * GEOMETRY.slot_bytes


def test_a_slot_that_holds_another_record_is_named() -> None:
    _, _, nvme = fresh()
    put(nvme, block(0))
    with pytest.raises(BadRecordError, match=block(0).digest.hex()):
        nvme.read(0, block(1), aligned(GEOMETRY.stride))
    assert nvme.facts()["bad_records"] == {"stale entry": 1}


def test_the_cap_in_these_tests_is_four_segments() -> None:
    _, _, nvme = fresh()
    assert nvme.sizes.segments == 4
    assert nvme.sizes.slots_each == 18
    assert CAP == 1 << 20
