"""Files that may be a stranger's are regular files of limited size, and are replaced whole."""

import errno
import os
import socket

import pytest

from maxlite.errors import UserError, exit_on_user_error
from maxlite.storage.file_io import (
  MAX_CONFIG_BYTES,
  open_regular,
  read_json_object,
  read_regular,
  replaced,
  write_atomically,
)


def bind_socket(path):
  os.chdir(path.parent)  # the name of a socket is short
  with socket.socket(socket.AF_UNIX) as bound:
    bound.bind(path.name)


# How a path is made that is no file, and what is said about it.
OTHERS = {
  "link": (lambda path: path.symlink_to(path.parent / "target"), "is a link to .*target"),
  "dangling": (lambda path: path.symlink_to("nothing"), "is a link to nothing"),
  "loop": (lambda path: path.symlink_to(path.name), "is a loop of links"),
  "device": (lambda path: path.symlink_to("/dev/zero"), "is a link to /dev/zero"),
  "pipe": (os.mkfifo, "is not a file"),
  "socket": (bind_socket, "is not a file"),
  "folder": (lambda path: path.mkdir(), "is a folder"),
}


@pytest.fixture(params=OTHERS)
def other(request, tmp_path, monkeypatch):
  """(path that is no regular file, what is said about it)."""
  monkeypatch.chdir(tmp_path)
  make, problem = OTHERS[request.param]
  (tmp_path / "target").write_text("{}")
  make(tmp_path / "file")
  return tmp_path / "file", problem


def test_only_regular_files_are_read(other):
  path, problem = other
  with pytest.raises(UserError, match=f"file {problem}: replace it by a file, or move it away"):
    read_regular(path, 10)


def test_only_regular_files_are_written_in_place(other):
  path, problem = other
  before = sorted(path.parent.iterdir())
  for flags in (os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_APPEND | os.O_CREAT):
    with pytest.raises(UserError, match=problem):
      open_regular(path, flags)
  assert (path.parent / "target").read_text() == "{}"
  assert sorted(path.parent.iterdir()) == before  # a dangling link did not create its target


@pytest.mark.parametrize("device", ["/dev/zero", "pipe"])
def test_links_that_may_be_followed_lead_to_files(device, tmp_path):
  os.mkfifo(tmp_path / "pipe")
  (tmp_path / "link").symlink_to(device)
  with pytest.raises(UserError, match="link is not a file"):
    read_regular(tmp_path / "link", 10, follows_links=True)
  with pytest.raises(UserError, match="link is not a file"):
    read_json_object(tmp_path / "link", "copy it again")


@pytest.mark.parametrize("kind", ["link", "dangling", "loop", "device", "pipe"])
def test_a_file_replaces_what_was_there_but_not_its_target(kind, tmp_path):
  make, _ = OTHERS[kind]
  (tmp_path / "target").write_text("kept")
  make(tmp_path / "file")
  write_atomically(tmp_path / "file", "new")
  assert not (tmp_path / "file").is_symlink()
  assert (tmp_path / "file").read_text() == "new"
  assert (tmp_path / "target").read_text() == "kept"
  assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "target"]


def test_more_than_the_limit_is_an_error(tmp_path):
  path = tmp_path / "file"
  path.write_bytes(b"x" * 10)
  assert read_regular(path, 10) == b"x" * 10
  with pytest.raises(UserError, match="file has more than 9 bytes"):
    read_regular(path, 9)
  with path.open("wb") as file:
    file.truncate(1 << 40)  # sparse
  with pytest.raises(UserError, match=f"more than {MAX_CONFIG_BYTES:,} bytes"):
    read_regular(path, MAX_CONFIG_BYTES)


def test_an_error_leaves_the_old_file_and_no_other(tmp_path):
  path = tmp_path / "file"
  path.write_text("old")
  with pytest.raises(ZeroDivisionError), replaced(path) as file:
    file.write(b"%d" % (1 // 0))
  assert list(tmp_path.iterdir()) == [path]
  assert path.read_text() == "old"


def test_a_full_disk_names_the_file(tmp_path, capsys):
  with pytest.raises(SystemExit), exit_on_user_error("maxlite.train"), replaced(tmp_path / "file"):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  error = capsys.readouterr().err
  assert error.startswith(f"maxlite.train: {tmp_path}/file: No space left on device: free space")
