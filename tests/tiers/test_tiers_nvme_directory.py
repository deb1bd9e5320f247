"""The directory: its owner, its cap, what else lies in it. Names follow docs/disk-format.md."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from disk_records import CAP, GEOMETRY, block, get, open_nvme, payload, put, reopened

from tiers.errors import DirectoryError, DirectoryInUseError, NoSpaceError
from tiers.fake_files import FaultyFiles, MemoryFile, MemoryFiles
from tiers.files import FileFacts, Files, disk_usage
from tiers.nvme import Nvme
from tiers.record import Geometry

OTHER = GEOMETRY._replace(fingerprint=b"G" * 32)
OURS = f"/cache/{GEOMETRY.fingerprint.hex()}"
THEIRS = f"/cache/{OTHER.fingerprint.hex()}"
KIB_64 = Geometry(b"F" * 32, 16, "float32", "[layer][K|V][block_size][kv_heads][head_dim]", 64 << 10)


class Clock:
    """Sleeping is what makes time pass."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def du(path: Path) -> int:
    """As `du` does it: blocks of everything, directories too."""
    found = [path, *path.rglob("*")]
    return sum(p.lstat().st_blocks * 512 for p in found)


def segments(files: MemoryFiles, folder: str) -> set[str]:
    return {p.removeprefix(folder + "/") for p in files.tree if p.startswith(folder + "/")}


def filled(files: Files, n: int, geometry: Geometry = GEOMETRY, cap: int = CAP) -> Nvme:
    nvme = open_nvme(files, cap, geometry)
    nvme.recover()
    put(nvme, *[block(i, geometry=geometry) for i in range(n)])
    return nvme


# -- the cap ---------------------------------------------------------------------------------------------

def test_the_cap_holds_at_every_moment(tmp_path: Path) -> None:
    """Ten times the cap is wanted; another model's files and a stranger's are there already."""
    cap, root = 8 << 20, tmp_path / "cache"
    other = open_nvme(Files(), cap, KIB_64._replace(fingerprint=b"G" * 32), str(root))
    other.recover()
    put(other, *[block(n, geometry=other.geometry) for n in range(other.slots.capacity)])
    other.close()
    (root / "notes.txt").write_bytes(b"x" * 100_000)
    seen = [du(root)]

    class Measured(Files):
        """Looks after every call that may have changed something."""

        def allocate(self, descriptor: int, size: int) -> None:
            super().allocate(descriptor, size)
            seen.append(du(root))

        def close(self, descriptor: int) -> None:
            super().close(descriptor)
            seen.append(du(root))

    nvme = open_nvme(Measured(), cap, KIB_64, str(root))
    nvme.recover()
    wanted = 10 * cap // KIB_64.slot_bytes
    for n in range(wanted):
        if nvme.slots.free_count == 0:
            nvme.slots.free([n % nvme.slots.capacity])
        put(nvme, block(n, geometry=KIB_64))
    nvme.close()
    assert max(seen) <= cap
    assert max(seen) > 0.9 * cap  # and the cap is used
    assert nvme.facts()["bytes_on_disk"] == du(root)
    assert (root / "notes.txt").exists()


def test_a_segment_takes_all_of_its_space_when_it_is_made(tmp_path: Path) -> None:
    nvme = open_nvme(Files(), path=str(tmp_path))
    nvme.recover()
    assert not list(tmp_path.rglob("*.kv"))  # none before the first write
    put(nvme, block(0))
    [file] = tmp_path.rglob("*.kv")
    assert file.stat().st_size == nvme.sizes.segment_bytes
    assert file.stat().st_blocks * 512 >= nvme.sizes.segment_bytes
    nvme.close()


def test_a_segment_takes_all_of_its_space_when_it_is_made_or_there_is_no_file() -> None:
    memory = MemoryFiles()
    files = FaultyFiles(memory)
    nvme = filled(files, 18)
    files.fail("allocate", errno.ENOSPC)
    with pytest.raises(NoSpaceError):
        nvme.write(18, block(18), payload(block(18)))
    assert segments(memory, OURS) == {"000000.kv"}
    nvme.write(18, block(18), payload(block(18)))
    assert segments(memory, OURS) == {"000000.kv", "000001.kv"}


def test_a_segment_that_was_cut_takes_all_of_its_space_again(tmp_path: Path) -> None:
    nvme = open_nvme(Files(), path=str(tmp_path))
    nvme.recover()
    put(nvme, block(0), block(1))
    [file] = tmp_path.rglob("*.kv")
    os.truncate(file, 12_288)
    nvme.tidy()
    assert file.stat().st_size == 12_288  # no table behind a hole
    put(nvme, block(2))
    assert file.stat().st_blocks * 512 >= nvme.sizes.segment_bytes
    nvme.close()


def test_overwriting_needs_no_space() -> None:
    memory = MemoryFiles()
    nvme = filled(memory, 72)
    memory.size -= memory.free_space("/")
    for slot in range(72):
        nvme.write(slot, block(100 + slot), payload(block(100 + slot)))
    get(nvme, 71, block(171))


def test_other_fingerprints_go_first() -> None:
    """Theirs make room for ours one by one, the oldest first; none is read."""
    memory = MemoryFiles()
    filled(memory, 72, OTHER).close()
    assert len(segments(memory, THEIRS)) == 4
    nvme = open_nvme(memory)
    assert nvme.recover() == []
    assert len(segments(memory, THEIRS)) == 4  # room for ours is made when it is needed
    left = []
    for n in range(72):
        put(nvme, block(n))
        left.append(len(segments(memory, THEIRS)))
    assert left[0] == 3
    assert left[-1] == 0
    assert segments(memory, OURS) == {f"00000{n}.kv" for n in range(4)}
    assert THEIRS not in memory.tree
    assert nvme.facts()["foreign_bytes"] == 0


def test_other_fingerprints_go_first_and_of_them_the_oldest() -> None:
    memory = MemoryFiles()
    filled(memory, 72, OTHER).close()
    memory.tree[f"{THEIRS}/000002.kv"].mtime = -1.0
    filled(memory, 1)
    assert segments(memory, THEIRS) == {"000000.kv", "000001.kv", "000003.kv"}


def test_other_fingerprints_go_first_at_a_start() -> None:
    """A smaller cap, and theirs and ours together are over it."""
    memory = MemoryFiles()
    filled(memory, 72, OTHER, 2 * CAP).close()
    filled(memory, 72, cap=2 * CAP).close()
    assert segments(memory, THEIRS) == segments(memory, OURS) == {"000000.kv", "000001.kv"}
    _, records = reopened(memory, cap=CAP)
    assert len(records) == 2 * 18
    assert segments(memory, THEIRS) == {"000001.kv"}
    assert sum(f.on_disk for p, f in memory.tree.items() if p.startswith("/cache")) <= CAP


def test_other_fingerprints_go_first_when_the_disk_is_at_its_floor() -> None:
    memory = MemoryFiles(2 << 20)
    filled(memory, 72, OTHER).close()
    memory.size = (1 << 20) + memory.size - memory.free_space("/") - 200_000
    nvme = open_nvme(memory, floor=1 << 20)
    nvme.recover()
    put(nvme, block(0))
    assert memory.free_space("/") >= 1 << 20


@pytest.mark.parametrize("n", [36, 72])
def test_other_fingerprints_go_first_where_ours_are_sparse(tmp_path: Path, n: int) -> None:
    """A copy of the cache without its holes takes its space later, without asking."""
    ours = open_nvme(Files(), path=str(tmp_path))
    ours.recover()
    put(ours, *[block(i) for i in range(n)])
    ours.close()
    for file in (tmp_path / GEOMETRY.fingerprint.hex()).iterdir():
        size = file.stat().st_size
        os.truncate(file, 0)
        os.truncate(file, size)
    theirs = open_nvme(Files(), path=str(tmp_path), geometry=OTHER)
    theirs.recover()
    put(theirs, *[block(i) for i in range(n)])
    theirs.close()
    ours = open_nvme(Files(), path=str(tmp_path))
    ours.recover()
    for slot in reversed(range(72)):
        ours.write(slot, block(slot), payload(block(slot)))
        assert du(tmp_path) <= CAP
    ours.close()


def test_the_cap_holds_at_every_moment_where_files_take_more_than_their_length() -> None:
    class Heavy(MemoryFiles):
        """A file system that takes two pages of its own for a segment."""

        def _facts(self, file: MemoryFile) -> FileFacts:
            facts = super()._facts(file)
            return facts._replace(on_disk=facts.on_disk + 8192 * (facts.size > 100_000))

    memory = Heavy()
    for geometry in (OTHER, GEOMETRY):
        nvme = filled(memory, 0, geometry)
        for n in range(72):
            put(nvme, block(n))
            assert disk_usage(memory, "/cache") <= CAP
        nvme.close()


def test_another_fingerprint_finds_its_records_again_while_there_is_room() -> None:
    memory = MemoryFiles()
    filled(memory, 18, OTHER).close()
    filled(memory, 18).close()
    _, records = reopened(memory, geometry=OTHER)
    assert len(records) == 18


def test_a_smaller_cap_drops_the_highest_segments() -> None:
    memory = MemoryFiles()
    limit = 225_280  # so that segments are as long as with the smaller cap
    nvme = open_nvme(memory, 2 * CAP, segment_limit=limit)
    nvme.recover()
    put(nvme, *[block(n) for n in range(nvme.slots.capacity)])
    assert nvme.sizes.slots_each == 18
    assert len(segments(memory, OURS)) == 8
    nvme.close()
    files = FaultyFiles(memory)
    nvme = open_nvme(files)
    assert files.calls["read"] == 0  # deleted unread
    assert segments(memory, OURS) == {f"00000{n}.kv" for n in range(4)}
    assert {r.name for r in nvme.recover()} == {block(n) for n in range(72)}


def test_a_smaller_cap_cuts_longer_segments_and_keeps_what_fits() -> None:
    memory = MemoryFiles()
    nvme = filled(memory, 150, cap=2 * CAP)
    each = nvme.sizes.slots_each
    assert each > 36
    nvme.close()
    nvme, records = reopened(memory)
    assert {r.name for r in records} == {block(each * s + i) for s in range(4) for i in range(18) if each * s + i < 150}
    for record in records:
        get(nvme, record.slot, record.name)
    assert max(f.on_disk for f in memory.tree.values()) == nvme.sizes.segment_bytes


def test_a_larger_cap_keeps_everything() -> None:
    memory = MemoryFiles()
    filled(memory, 72).close()
    nvme, records = reopened(memory, cap=3 * CAP)
    assert {r.name for r in records} == {block(n) for n in range(72)}
    put(nvme, *[block(n) for n in range(100, 200)])
    nvme, records = reopened(memory, nvme, cap=3 * CAP)
    assert len(records) == 172
    for record in records:
        get(nvme, record.slot, record.name)


def test_a_strangers_file_is_left_alone() -> None:
    memory = MemoryFiles()
    filled(memory, 72, OTHER).close()
    for name in ("notes.txt", f"{OTHER.fingerprint.hex()}/readme", f"{GEOMETRY.fingerprint.hex()}/1.kv"):
        memory.make_directory(os.path.dirname(f"/cache/{name}"))
        memory.open(f"/cache/{name}", create=True)
        memory.tree[f"/cache/{name}"].data[:] = b"x" * 5000
    filled(memory, 50)
    for name in ("notes.txt", f"{OTHER.fingerprint.hex()}/readme", f"{GEOMETRY.fingerprint.hex()}/1.kv"):
        assert memory.tree[f"/cache/{name}"].data == b"x" * 5000


def test_a_strangers_file_that_came_later_costs_segments_not_the_cap() -> None:
    memory = MemoryFiles()
    nvme = filled(memory, 18)
    memory.open("/cache/notes.txt", create=True)
    memory.tree["/cache/notes.txt"].data[:] = bytes(400_000)
    for slot in range(18, 36):
        nvme.write(slot, block(slot), payload(block(slot)))
    with pytest.raises(NoSpaceError, match="over the cap"):
        nvme.write(36, block(36), payload(block(36)))
    assert sum(f.on_disk for p, f in memory.tree.items() if p.startswith("/cache")) <= CAP
    get(nvme, 0, block(0))


def test_the_disk_keeps_a_floor_of_free_space() -> None:
    memory = MemoryFiles((3 << 20) + 800_000)
    nvme = open_nvme(memory, floor=3 << 20)
    nvme.recover()
    slots = nvme.slots.take(72)
    assert slots
    for slot in slots[:54]:
        nvme.write(slot, block(slot), payload(block(slot)))
    with pytest.raises(NoSpaceError, match="3,145,728 bytes free"):
        nvme.write(54, block(54), payload(block(54)))
    assert memory.free_space("/") >= 3 << 20
    assert len(segments(memory, OURS)) == 4 - 1
    get(nvme, 0, block(0))
    memory.size += 1 << 20  # somebody made room
    nvme.write(71, block(71), payload(block(71)))


# -- sizes that do not exist -----------------------------------------------------------------------------

def test_a_cap_that_holds_too_little_is_refused_with_the_numbers() -> None:
    files = MemoryFiles()
    with pytest.raises(DirectoryError, match=r"a cap of 100,000 bytes .* 12,288 bytes; at least 16 .* bytes") as error:
        open_nvme(files, 100_000)
    needed = int(str(error.value).split("which is ")[1].split(" bytes")[0].replace(",", ""))
    with pytest.raises(DirectoryError):
        open_nvme(files, needed - 10_000)
    assert open_nvme(files, needed).slots.capacity >= 16  # what the message asks for is enough


def test_a_cap_that_the_disk_has_not_is_refused_with_the_numbers() -> None:
    memory = MemoryFiles(CAP)
    filled(memory, 18, cap=CAP - 50_000).close()
    with pytest.raises(DirectoryError, match=r"a cap of 1,100,000 bytes is more .* [\d,]+ bytes are free, and [\d,]+"):
        open_nvme(memory, 1_100_000)
    assert len(reopened(memory, cap=CAP - 50_000)[1]) == 18  # what it has already counts


def test_a_directory_full_of_other_things_is_refused_with_the_numbers() -> None:
    memory = MemoryFiles()
    memory.make_directory("/cache")
    memory.open("/cache/film", create=True)
    memory.tree["/cache/film"].data[:] = bytes(CAP)
    with pytest.raises(DirectoryError, match=r"1,0\d\d,\d\d\d of them for files that are no cache"):
        open_nvme(memory)


# -- who owns it -----------------------------------------------------------------------------------------

def test_one_server_owns_a_directory(tmp_path: Path) -> None:
    first = open_nvme(Files(), path=str(tmp_path))
    clock = Clock()
    with pytest.raises(DirectoryInUseError, match=rf"process {os.getpid()}, for 10 s.*stop that server") as error:
        open_nvme(Files(), path=str(tmp_path), clock=clock, sleep=clock.sleep)
    assert str(tmp_path) in str(error.value)
    assert 15.0 <= clock.now < 15.5
    first.close()
    open_nvme(Files(), path=str(tmp_path)).close()


def test_one_server_owns_a_directory_whatever_its_model(tmp_path: Path) -> None:
    first = open_nvme(Files(), path=str(tmp_path))
    clock = Clock()
    with pytest.raises(DirectoryInUseError):
        open_nvme(Files(), path=str(tmp_path), geometry=OTHER, clock=clock, sleep=clock.sleep)
    first.close()


def test_a_start_goes_on_when_the_owner_ends_meanwhile(tmp_path: Path) -> None:
    first = open_nvme(Files(), path=str(tmp_path))
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now > 8:
            first.close()

    second = open_nvme(Files(), path=str(tmp_path), clock=clock, sleep=sleep)
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    assert 8 < clock.now < 9
    second.close()


def test_a_start_that_is_refused_lets_the_directory_go() -> None:
    files = MemoryFiles()
    with pytest.raises(DirectoryError):
        open_nvme(files, 100_000)
    open_nvme(files)


def test_what_is_made_is_its_owners_alone(tmp_path: Path) -> None:
    nvme = open_nvme(Files(), path=str(tmp_path / "cache"))
    nvme.recover()
    put(nvme, block(0))
    nvme.close()
    for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize(("method", "nth"), [("make_directory", 1), ("make_directory", 2), ("create", 1), ("create", 2),
                                             ("entries", 1), ("free_space", 1)])
def test_a_directory_that_can_not_be_used_is_named(method: str, nth: int) -> None:
    memory = MemoryFiles()
    files = FaultyFiles(memory)
    files.fail(method, errno.EACCES, nth=nth)
    with pytest.raises(DirectoryError, match="/cache can't hold the cache: Permission denied; give a directory"):
        open_nvme(files)
    open_nvme(files)  # and its lock is free


def test_a_file_in_the_directorys_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryError, match="file can't hold the cache"):
        open_nvme(Files(), path=str(tmp_path / "file"))
