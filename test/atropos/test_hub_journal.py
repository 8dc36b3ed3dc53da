"""The hub's file: what was appended is read back, and a damaged end costs no more than the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.atropos.hub_journal import Journal

RECORDS = [({"kind": "a", "n": 1}, b"first"), ({"kind": "b"}, b""), ({"kind": "c"}, b"x" * 5000)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "journal"


def write(path, records=RECORDS):
    journal = Journal(path)
    list(journal.replay())
    for note, body in records:
        journal.append(note, body)
    journal.close()


def read(path):
    journal = Journal(path)
    try:
        return list(journal.replay())
    finally:
        journal.close()


def test_records_are_read_back_in_order(path):
    write(path)
    assert read(path) == RECORDS
    write(path)
    assert read(path) == RECORDS * 2


@given(data=st.data())
def test_a_file_that_was_cut_short_loses_its_last_records_only(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "journal"
    write(path)
    whole = path.read_bytes()
    length = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:length])
    found = read(path)
    assert found == RECORDS[:len(found)]
    assert len(found) == 3 or length < len(whole)
    write(path, RECORDS[:1])  # and goes on behind the last whole one
    assert read(path) == [*found, RECORDS[0]]


def test_a_record_with_a_wrong_byte_ends_the_file(path):
    write(path)
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    assert read(path) == RECORDS[:2]


def test_it_can_be_rewritten(path):
    write(path)
    journal = Journal(path)
    list(journal.replay())
    journal.compact(RECORDS[:1])
    assert journal.size == path.stat().st_size
    journal.append(*RECORDS[1])
    journal.close()
    assert read(path) == RECORDS[:2]
    assert [file.name for file in path.parent.iterdir()] == ["journal"]


def test_another_file_is_left_alone(path):
    path.parent.mkdir()
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not a journal of the hub"):
        Journal(path)
    assert path.read_bytes() == b"something else"


def test_one_hub_at_a_time(path):
    journal = Journal(path)
    with pytest.raises(BlockingIOError, match="in use by another hub"):
        Journal(path)
    journal.compact(RECORDS)
    with pytest.raises(BlockingIOError, match="in use by another hub"):
        Journal(path)
    journal.close()
    assert read(path) == RECORDS


def test_a_full_disk_leaves_whole_records(path, monkeypatch):
    journal = Journal(path)
    list(journal.replay())
    journal.append(*RECORDS[0])
    file, write = journal._file, journal._file.write

    class Full:
        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, data):
            return write(data[:10])

    journal._file = Full()
    with pytest.raises(OSError, match="is the disk full"):
        journal.append(*RECORDS[1])
    journal._file = file
    journal.append(*RECORDS[2])
    journal.close()
    assert read(path) == [RECORDS[0], RECORDS[2]]
