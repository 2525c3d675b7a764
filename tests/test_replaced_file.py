"""Files that take the place of others, and what is no file."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from llmc.replaced_file import replaced, write_replaced


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_replaced(path, "old")
    with pytest.raises(UnicodeEncodeError), replaced(path) as new:
        new.write_text("half \ud800", encoding="utf-8")
    assert path.read_text() == "old"
    with replaced(path) as new:
        new.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_link_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in ("first", "second"):
        write_replaced(link, text)
        assert link.is_symlink()
        assert target.read_text() == text


def test_what_is_no_file_is_written_itself(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_replaced(pipe, b"through")
    reader.join()
    assert read == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    write_replaced(link, "gone")
    assert link.is_symlink()
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(IsADirectoryError):
        write_replaced(tmp_path, "x")
