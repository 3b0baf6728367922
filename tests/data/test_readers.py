"""Readers lose nothing at piece boundaries, and their errors name the place."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.data.sources import bad_rows, jsonl, text
from maxlite.data.sources.bad_rows import build_reject
from maxlite.data.sources.file_paths import count_suffixes, expand_paths
from maxlite.data.sources.jsonl import jsonl_documents
from maxlite.data.sources.tables import arrow_documents, parquet_documents
from maxlite.data.sources.text import text_documents
from maxlite.errors import UserError
from maxlite.storage.file_io import expand_glob


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


@pytest.mark.parametrize("piece_bytes", [16, 1 << 18])
def test_lines_that_are_not_utf8_are_rejected(tmp_path, monkeypatch, piece_bytes):
  monkeypatch.setattr(text, "PIECE_BYTES", piece_bytes)
  file = tmp_path / "a.txt"
  rejected = []
  file.write_bytes(b"caf\xe9 bad\n" + "é fine\r\n\n".encode() + b"\xff\n" + b"the end")
  with pytest.raises(ValueError, match=r"a\.txt: byte 3 is not UTF-8: convert the file"):
    read(text_documents(file, "", 0, 1))
  whole = read(text_documents(file, "", 0, 1, rejected.append))
  assert whole == ["é fine\r\n\nthe end".encode()]
  first, second = rejected
  assert "byte 3 " in str(first)
  assert "byte 19 " in str(second)


def test_bytes_that_are_not_utf8_are_rejected_in_long_lines(tmp_path, monkeypatch):
  monkeypatch.setattr(text, "PIECE_BYTES", 8)
  file = tmp_path / "a.bin"
  file.write_bytes(bytes(range(128, 256)) * 3)
  assert read(text_documents(file, "", 0, 1, lambda error: None)) == [b""]


def test_bad_rows_are_left_out_and_counted(tmp_path, caplog):
  counts = Counter()
  reject = build_reject("skip", counts)
  lines = ['{"text": "a"}', '{"te', "[]", '{"text": null}', '{"text": "b"}']
  file = write_jsonl(tmp_path / "a.jsonl", lines)
  assert read(jsonl_documents(file, "text", 0, 1, reject)) == [b"a", b"b"]
  assert counts == {"bad rows skipped": 3}
  assert re.search(r"the first: .*a\.jsonl:2: not JSON", caplog.text)
  with pytest.raises(ValueError, match="null, or set on_bad_row=skip"):
    build_reject("error", counts)(UserError("a.parquet: row 3: null"))


def test_pieces_end_at_newlines(tmp_path, monkeypatch):
  monkeypatch.setattr(text, "PIECE_BYTES", 16)
  file = tmp_path / "a.txt"
  file.write_text("some words\n" * 20)
  # A document is read while the next one has not been requested.
  (pieces,) = [list(document) for document in text_documents(file, "", 0, 1)]
  assert len(pieces) > 5
  assert all(piece.endswith(b"\n") for piece in pieces)


def write_jsonl(file, lines):
  file.write_text("".join(f"{line}\n" for line in lines))
  return file


def test_jsonl_lines_are_documents_and_fractions_are_complete(tmp_path):
  texts = [f"line {i} é" for i in range(10)]
  lines = [json.dumps({"body": text, "n": 1}) for text in texts]
  file = write_jsonl(tmp_path / "a.jsonl", lines)
  whole = [text.encode() for text in texts]
  assert read(jsonl_documents(file, "body", 0, 1)) == whole
  head = read(jsonl_documents(file, "body", 0, 0.75))
  tail = read(jsonl_documents(file, "body", 0.75, 1))
  assert head + tail == whole
  assert len(tail) == 3


def test_jsonl_accepts_blank_lines_and_unpaired_surrogates(tmp_path):
  file = write_jsonl(tmp_path / "a.jsonl", ['{"text": "a"}', "", r'{"text": "x\ud800"}'])
  assert read(jsonl_documents(file, "text", 0, 1)) == [b"a", b"x?"]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_many_blank_lines_are_refused(tmp_path, monkeypatch, share):
  monkeypatch.setattr(jsonl, "MAX_BLANK_LINES", 5)
  row = '{"text": "a"}'
  file = write_jsonl(tmp_path / "a.jsonl", [row, "", " ", "", " ", "", row, "", "", "", "", ""])
  assert read(jsonl_documents(file, "text", 0, 1)) == [b"a", b"a"]
  file = write_jsonl(tmp_path / "a.jsonl", [row, "", "", "", "", "", ""])
  with pytest.raises(UserError, match=r"a\.jsonl: 5 blank lines up to line 6: remove them"):
    read(jsonl_documents(file, "text", share, 1))


def test_a_byte_order_mark_is_not_text(tmp_path):
  mark = b"\xef\xbb\xbf"
  file = tmp_path / "a.txt"
  file.write_bytes(mark + mark + "é\n".encode() + b"\xff\n" + b"b")
  with pytest.raises(UserError, match="byte 9 is not UTF-8"):
    read(text_documents(file, "", 0, 1))
  whole = read(text_documents(file, "", 0, 1, lambda error: None))
  assert whole == [mark + "é\nb".encode()]
  file = tmp_path / "b.txt"
  file.write_bytes(mark)
  assert read(text_documents(file, "", 0, 1)) == [b""]
  file = tmp_path / "a.jsonl"
  file.write_bytes(mark + b'\n{"text": "a"}\n')
  assert read(jsonl_documents(file, "text", 0, 1)) == [b"a"]


def test_rows_left_out_are_reported_while_there_are_more(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(bad_rows, "REPORT_SECONDS", 0)
  reject = build_reject("skip", Counter())
  file = write_jsonl(tmp_path / "a.jsonl", ["?", "?", "?"])
  read(jsonl_documents(file, "text", 0, 1, reject))
  assert re.search(r"has left out 3 rows, up to: .*a\.jsonl:3", caplog.text)


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
  rejected = []
  with pytest.raises(ValueError, match=r"a\.parquet: row 11: null"):
    read(parquet_documents(file, "text", 0, 1))
  assert read(parquet_documents(file, "text", 0, 1, rejected.append)) == whole
  assert len(rejected) == 1
  head = read(parquet_documents(file, "text", 0, 0.5, rejected.append))
  tail = read(parquet_documents(file, "text", 0.5, 1, rejected.append))
  assert head + tail == whole
  assert len(head) == 5


def test_a_damaged_page_of_parquet_is_one_line(tmp_path):
  texts = [f"{i}" * 500 for i in range(99)]
  file = write_parquet(tmp_path / "a.parquet", {"text": texts})
  content = bytearray(file.read_bytes())
  content[40:2000] = bytes(1960)
  file.write_bytes(content)
  with pytest.raises(ValueError, match=r"a\.parquet: .*damaged .*replace it") as error:
    read(parquet_documents(file, "text", 0, 1))
  assert "\n" not in str(error.value)


def test_text_that_is_another_format_is_answered_by_it(tmp_path):
  file = tmp_path / "train-00000-of-00001"
  write_parquet(file, {"text": ["é" * 9] * 9})
  with pytest.raises(UserError, match="is not UTF-8: write dataset_type=parquet"):
    read(text_documents(file, "", 0, 1))
  file.write_bytes(gzip.compress(b"text"))
  with pytest.raises(UserError, match=r"is not UTF-8: decompress the file, or name it \*\.txt\.gz"):
    read(text_documents(file, "", 0, 1))


def test_parquet_errors_name_the_file(tmp_path):
  file = write_parquet(tmp_path / "a.parquet", {"n": [1, 2]})
  for column, reason in (("text", "no column 'text' among .*'n'"), ("n", "holds int64")):
    with pytest.raises(ValueError, match=rf"a\.parquet: .*{reason}"):
      read(parquet_documents(file, column, 0, 1))
  file.write_bytes(b"junk")
  with pytest.raises(ValueError, match="not a file of dataset_type=parquet, or damaged"):
    read(parquet_documents(file, "text", 0, 1))


def test_paths_expand_to_sorted_unique_files(tmp_path):
  for name in ("b.txt", "a.txt", "deep/c.jsonl", ".hidden/d.txt"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")

  def names(entries, suffix=""):
    files, _ = expand_paths(entries, suffix, "dataset_path")
    return [file.name for file in files]

  assert names([str(tmp_path)]) == ["a.txt", "b.txt"]
  assert names([str(tmp_path)], ".jsonl") == ["c.jsonl"]
  assert names([str(tmp_path / "*.txt"), str(tmp_path / "a.txt")]) == ["a.txt", "b.txt"]
  assert names([str(tmp_path / "b.txt"), str(tmp_path)]) == ["b.txt", "a.txt"]
  assert names([str(tmp_path), str(tmp_path / "**")]) == ["a.txt", "b.txt", "c.jsonl"]
  with pytest.raises(ValueError, match="eval_dataset_path: 'nowhere' gives no file"):
    expand_paths(["nowhere"], "", "eval_dataset_path")


def test_globs_do_not_follow_links_to_folders(tmp_path):
  above = tmp_path / "above"
  folder = above / "folder"
  for name in ("a.txt", "deep/er/b.txt", ".hidden/c.txt", "deep/.d.txt"):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("x")
  (above / "outside.txt").write_text("x")
  (folder / "up").symlink_to(above)
  (folder / "deep" / "link.txt").symlink_to(folder / "a.txt")

  def names(pattern):
    matches = expand_glob(f"{folder}/{pattern}")
    files = [match for match in matches if Path(match).is_file()]
    return sorted(match.removeprefix(f"{folder}/") for match in files)

  every = ["a.txt", "deep/er/b.txt", "deep/link.txt"]
  assert names("**") == names("**/**") == names("**/*.txt") == every
  assert names("*/**/b.txt") == names("**/er/*") == ["deep/er/b.txt"]
  assert names("**/.hidden/**") == [".hidden/c.txt"]
  assert names("**/.*.txt") == ["deep/.d.txt"]
  assert names("*.txt") == ["a.txt"]
  assert names("none/**") == []


def test_a_folder_of_text_skips_and_reports_other_formats(tmp_path):
  for name in ("a.txt", "b.py", "LICENSE", "c.jsonl", "d.parquet", "e.tar.gz", "f.PNG"):
    (tmp_path / name).write_text("x")
  files, skipped = expand_paths([str(tmp_path)], "", "dataset_path")
  assert [file.name for file in files] == ["LICENSE", "a.txt", "b.py"]
  assert count_suffixes(skipped) == "1 .PNG and 1 .gz and 1 .jsonl and 1 .parquet"
  _, skipped = expand_paths([str(tmp_path), str(tmp_path / "c.jsonl")], "", "")
  assert skipped[0].name == "d.parquet"
  for file in files:
    file.unlink()
  with pytest.raises(ValueError, match=r"gives no file \(only 1 .PNG and 1 .gz and 1 .jsonl"):
    expand_paths([str(tmp_path)], "", "dataset_path")


@pytest.mark.parametrize(
  ("suffix", "name"),
  [("", "a.gz"), (".jsonl", "a.gz"), (".jsonl", "a.jsonl.xz"), (".parquet", "a.parquet.gz")],
)
def test_a_compressed_file_of_another_kind_is_an_error(tmp_path, suffix, name):
  (tmp_path / name).write_bytes(b"\x1f\x8b")
  with pytest.raises(ValueError, match=rf"dataset_path: .*{name} is compressed: decompress it"):
    expand_paths([str(tmp_path / name)], suffix, "dataset_path")


@pytest.mark.parametrize(
  ("suffix", "name", "kind"),
  [
    ("", "a.parquet", "parquet"),
    ("", "a.jsonl.gz", "jsonl"),
    (".parquet", "a.jsonl.gz", "jsonl"),
    (".parquet", "a.jsonl", "jsonl"),
    (".jsonl", "a.array_record", "array_record"),
    (".jsonl", "a.arrow", "arrow"),
  ],
)
def test_a_file_of_another_type_is_answered_by_that_type(tmp_path, suffix, name, kind):
  (tmp_path / name).write_bytes(b"x")
  for entry in (tmp_path / name, f"{tmp_path}/**"):
    with pytest.raises(UserError, match=rf"{name} is of another type: write dataset_type={kind}$"):
      expand_paths([str(entry)], suffix, "dataset_path")
  with pytest.raises(UserError, match=rf"gives no .*\(only 1 .*\): write dataset_type={kind}$"):
    expand_paths([str(tmp_path)], suffix, "dataset_path")


def test_files_of_text_and_json_may_have_other_names(tmp_path):
  for suffix, name in (("", "a.jsonl"), (".jsonl", "a.json.gz"), (".jsonl", "a.json")):
    (tmp_path / name).write_bytes(b"x")
    files, _ = expand_paths([str(tmp_path / name)], suffix, "dataset_path")
    assert files


def test_stdlib_expands_to_the_standard_library_without_tests():
  files, _ = expand_paths(["stdlib"], "", "dataset_path")
  assert len(files) > 300
  for file in files:
    assert "/test/" not in str(file)
    assert "site-packages" not in str(file)
  with pytest.raises(ValueError, match=r"gives no \*\.jsonl file"):
    expand_paths(["stdlib"], ".jsonl", "dataset_path")


def write_arrow(file, texts):
  pa = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
  file.parent.mkdir(parents=True, exist_ok=True)
  table = pa.table({"text": texts})
  with pa.ipc.new_stream(str(file), table.schema) as writer:
    writer.write_table(table)


@pytest.mark.parametrize("entry", ["", "*.arrow", "**"])
def test_of_a_saved_dataset_only_its_files_are_read(tmp_path, entry):
  """Not what `datasets` caches beside them; a cache file that is named is read."""
  folder = tmp_path / "train"
  for name in ("data-00000-of-00002.arrow", "data-00001-of-00002.arrow", "cache-0a1b.arrow"):
    write_arrow(folder / name, [name])
  names = [{"filename": f"data-0000{n}-of-00002.arrow"} for n in range(2)]
  (folder / "state.json").write_text(json.dumps({"_data_files": names}))
  files, skipped = expand_paths([str(folder / entry)], ".arrow", "dataset_path")
  assert [file.name[:10] for file in files if file.suffix == ".arrow"] == [
    "data-00000",
    "data-00001",
  ]
  assert "cache-0a1b.arrow" in [file.name for file in skipped]
  (folder / "state.json").unlink()
  files, _ = expand_paths([str(folder)], ".arrow", "dataset_path")
  assert len(files) == 2
  named, _ = expand_paths([str(folder / "cache-0a1b.arrow")], ".arrow", "dataset_path")
  assert len(named) == 1
  (folder / "state.json").write_text("{}")
  with pytest.raises(UserError, match=r"state\.json lists no _data_files"):
    expand_paths([str(folder)], ".arrow", "dataset_path")


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".arrow", ".array_record"])
def test_what_an_unfinished_job_left_is_not_read(tmp_path, suffix):
  kept = tmp_path / f"part-0{suffix}"
  for name in (kept.name, f"_temporary/0/part-1{suffix}", f"_part-2{suffix}", f".part-3{suffix}"):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("a")
  files, skipped = expand_paths([str(tmp_path)], suffix, "dataset_path")
  assert files == [kept]
  assert len(skipped) == 2


def test_a_name_with_an_underscore_may_be_text(tmp_path):
  (tmp_path / "__init__.py").write_text("a")
  (tmp_path / "_temporary").mkdir()
  (tmp_path / "_temporary" / "part-0").write_text("a")
  files, _ = expand_paths([str(tmp_path)], "", "dataset_path")
  assert [file.name for file in files] == ["__init__.py"]


@pytest.mark.parametrize(
  ("log", "kind"),
  [
    ("_delta_log/0.json", "a Delta table"),
    (".hoodie/hoodie.properties", "a Hudi table"),
    ("metadata/v1.metadata.json", "an Iceberg table"),
  ],
)
def test_a_table_whose_log_says_what_was_removed_is_refused(tmp_path, log, kind):
  for name in ("part-0.parquet", log):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("a")
  with pytest.raises(UserError, match=f"is {kind}, which may hold removed files: export its rows"):
    expand_paths([str(tmp_path)], ".parquet", "dataset_path")


@pytest.mark.parametrize("name", ["a.bin", "a.idx", "a.npy", "a.npz"])
@pytest.mark.parametrize("named", [True, False])
def test_token_files_are_no_text(tmp_path, name, named):
  (tmp_path / name).write_bytes(b"text")
  entry = tmp_path / name if named else tmp_path / "**"
  with pytest.raises(UserError, match="write dataset_type=tokens") as error:
    expand_paths([str(entry)], "", "dataset_path")
  assert "on_bad_row" not in str(error.value)


@pytest.mark.parametrize("kind", ["dictionary", "string_view", "large_string"])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_every_kind_of_strings_is_text(tmp_path, kind, suffix):
  pa = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
  parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an extra")
  texts = ["a", "b", None, "a", "a longer text of many bytes"]
  column = pa.array(texts)
  if kind == "dictionary":
    column = column.dictionary_encode()
  else:
    column = column.cast(getattr(pa, kind)())
  table = pa.table({"number": [1, 2, 3, 4, 5], "text": column})
  file = tmp_path / f"a.{suffix}"
  if suffix == "parquet":
    parquet.write_table(table, file)
  else:
    with pa.ipc.new_file(str(file), table.schema) as writer:
      writer.write_table(table)
  read = parquet_documents if suffix == "parquet" else arrow_documents
  bad = []
  documents = [b"".join(pieces).decode() for pieces in read(file, "text", 0, 1, bad.append)]
  assert documents == [text for text in texts if text]
  assert len(bad) == 1
