"""Files that are whole: what is at a name is the old or the new, whatever goes wrong."""

import errno
import os

import pytest

from ritz import files


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    target = files.write_text(tmp_path / "a", "old")

    def half(part):
        part.write_text("ne")
        raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        files.replace(target, half)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_error_of_another_library_that_speaks_of_the_system_is_one_of_the_system(tmp_path):
    def full(part):
        raise ValueError("I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError, match="No space left") as caught:
        files.replace(tmp_path / "a", full)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "a")


def test_a_write_that_the_disk_has_no_room_for_names_the_file(tmp_path):
    def full(part):
        raise OSError(errno.ENOSPC, "No space left on device")  # as `write` says it

    with pytest.raises(OSError, match="No space left") as caught:
        files.replace(tmp_path / "a", full)
    assert caught.value.filename == str(tmp_path / "a")


def test_the_folder_is_brought_to_the_disk_after_the_move(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (calls.append(name), real(*a)))
    files.write_text(tmp_path / "a", "new")
    assert calls == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize(("number", "raises"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_folders_is_let_be_and_a_broken_one_is_not(
    number, raises, tmp_path, monkeypatch
):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    if raises:
        with pytest.raises(OSError, match="Input/output"):
            files.sync_folder(tmp_path)
    else:
        files.sync_folder(tmp_path)
