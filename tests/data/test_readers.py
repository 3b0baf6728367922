"""Readers lose nothing at piece boundaries, and their errors name the place."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.data.sources import text
from maxlite.data.sources.file_paths import expand_paths
from maxlite.data.sources.jsonl import jsonl_documents
from maxlite.data.sources.parquet import parquet_documents
from maxlite.data.sources.text import text_documents


def read(documents):
  return [b"".join(pieces) for pieces in documents]


@settings(max_examples=80, deadline=None)
@given(
  content=st.text(alphabet="ab é日🙂\n", max_size=60),
  piece_bytes=st.integers(4, 9),
  share=st.floats(0, 1),
)
def test_pieces_are_whole_characters_and_fractions_are_complete(
  tmp_path_factory, content, piece_bytes, share
):
  file = tmp_path_factory.mktemp("text") / "a.txt"
  file.write_bytes(content.encode())
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(text, "PIECE_BYTES", piece_bytes)
    both = ""
    for start, stop in ((0, share), (share, 1)):
      for pieces in text_documents(file, "", start, stop):
        for piece in pieces:
          assert 0 < len(piece) < 3 * piece_bytes
          both += piece.decode()  # strict: a cut character would raise
  assert both == content


def test_invalid_utf8_is_preserved(tmp_path, monkeypatch):
  monkeypatch.setattr(text, "PIECE_BYTES", 8)
  file = tmp_path / "a.bin"
  file.write_bytes(bytes(range(128, 256)) * 3)
  assert read(text_documents(file, "", 0, 1)) == [file.read_bytes()]


def test_pieces_end_at_newlines(tmp_path, monkeypatch):
  monkeypatch.setattr(text, "PIECE_BYTES", 16)
  file = tmp_path / "a.txt"
  file.write_text("some words\n" * 20)
  (pieces,) = [list(pieces) for pieces in text_documents(file, "", 0, 1)]
  assert len(pieces) > 5
  assert all(piece.endswith(b"\n") for piece in pieces)


def write_jsonl(file, lines):
  file.write_text("".join(f"{line}\n" for line in lines))
  return file


def test_jsonl_lines_are_documents_and_fractions_are_complete(tmp_path):
  texts = [f"line {i} é" for i in range(10)]
  file = write_jsonl(tmp_path / "a.jsonl", [json.dumps({"body": x, "n": 1}) for x in texts])
  whole = [x.encode() for x in texts]
  assert read(jsonl_documents(file, "body", 0, 1)) == whole
  head, tail = (read(jsonl_documents(file, "body", *share)) for share in ((0, 0.75), (0.75, 1)))
  assert (head + tail, len(tail)) == (whole, 3)


def test_jsonl_accepts_blank_lines_and_unpaired_surrogates(tmp_path):
  file = write_jsonl(tmp_path / "a.jsonl", ['{"text": "a"}', "", r'{"text": "x\ud800"}'])
  assert read(jsonl_documents(file, "text", 0, 1)) == [b"a", b"x?"]


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    ('{"text": ', "not JSON"),
    ('{"text": "\xff"', "not JSON"),
    ('["text"]', "not a JSON object"),
    ('{"body": "a"}', "no field 'text' among .*'body'.*text_column"),
    ('{"text": 3}', "field 'text' is not a string"),
  ],
)
def test_jsonl_errors_name_the_line(tmp_path, line, reason):
  file = tmp_path / "a.jsonl"
  file.write_bytes(b'{"text": "fine"}\n' + line.encode("latin-1") + b"\n")
  with pytest.raises(ValueError, match=rf"a\.jsonl:2: {reason}") as error:
    read(jsonl_documents(file, "text", 0, 1))
  assert "\n" not in str(error.value)


def write_parquet(file, columns):
  pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
  parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an extra")
  parquet.write_table(pyarrow.table(columns), file, row_group_size=3)
  return file


def test_parquet_rows_are_documents_and_fractions_are_complete(tmp_path):
  texts = [f"row {i} é" for i in range(10)]
  file = write_parquet(tmp_path / "a.parquet", {"text": [*texts, None], "n": list(range(11))})
  whole = [x.encode() for x in texts]
  assert read(parquet_documents(file, "text", 0, 1)) == whole
  head, tail = (read(parquet_documents(file, "text", *share)) for share in ((0, 0.5), (0.5, 1)))
  assert (head + tail, len(head)) == (whole, 5)


def test_parquet_errors_name_the_file(tmp_path):
  file = write_parquet(tmp_path / "a.parquet", {"n": [1, 2]})
  for column, reason in (("text", "no column 'text' among .*'n'"), ("n", "holds int64")):
    with pytest.raises(ValueError, match=rf"a\.parquet: .*{reason}"):
      read(parquet_documents(file, column, 0, 1))
  file.write_bytes(b"junk")
  with pytest.raises(ValueError, match="not a parquet file"):
    read(parquet_documents(file, "text", 0, 1))


def test_paths_expand_to_sorted_unique_files(tmp_path):
  for name in ("b.txt", "a.txt", "deep/c.jsonl", ".hidden/d.txt"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")

  def names(entries, suffix=""):
    return [file.name for file in expand_paths(entries, suffix, "dataset_path")]

  assert names([str(tmp_path)]) == ["a.txt", "b.txt", "c.jsonl"]
  assert names([str(tmp_path)], ".jsonl") == ["c.jsonl"]
  assert names([str(tmp_path / "*.txt"), str(tmp_path / "a.txt")]) == ["a.txt", "b.txt"]
  assert names([str(tmp_path / "b.txt"), str(tmp_path)]) == ["b.txt", "a.txt", "c.jsonl"]
  with pytest.raises(ValueError, match="eval_dataset_path: 'nowhere' gives no file"):
    expand_paths(["nowhere"], "", "eval_dataset_path")


def test_stdlib_expands_to_the_standard_library_without_tests():
  files = expand_paths(["stdlib"], "", "dataset_path")
  assert len(files) > 300
  assert not any("/test/" in str(file) or "site-packages" in str(file) for file in files)
  with pytest.raises(ValueError, match=r"gives no \*\.jsonl file"):
    expand_paths(["stdlib"], ".jsonl", "dataset_path")
