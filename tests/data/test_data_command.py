"""`python -m maxlite.data`: tokenize, print and export the data of a run."""

import json

import numpy as np
import pytest

from maxlite.config.schema import DataConfig, InspectConfig
from maxlite.data.__main__ import main
from maxlite.data.inspect_rows import render
from maxlite.data.loader import open_data
from maxlite.data.token_export import write_indexed
from maxlite.errors import UserError

TEMPLATE = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"


def rows_of(cfg, folder):
  rows = open_data(
    cfg, vocab_size=258, global_batch_size=1, rows=range(1), cache_directory=folder / "cache"
  ).source
  return [rows.train[n] for n in range(len(rows.train))], [
    rows.eval[n] for n in range(len(rows.eval))
  ]


def test_exported_documents_are_the_rows_of_the_text(tmp_path, capsys):
  texts = [f"text {n} é" * (n % 5 + 1) for n in range(60)]
  (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
  keys = [f"dataset_path={tmp_path}/a.jsonl", "dataset_type=jsonl", "eval_fraction=0.2"]
  keys += [f"token_cache_directory={tmp_path}/cache"]
  assert main(["tokenize", *keys]) == 0
  assert "data: read 1 .jsonl; train" in capsys.readouterr().out
  assert main(["export", *keys, f"output_path={tmp_path}/out"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line.rpartition("/")[2].split()[0] for line in lines] == ["train.bin:", "eval.bin:"]
  common = {"max_target_length": 16, "eval_fraction": 0.2}
  text = DataConfig(dataset_type="jsonl", dataset_path=(f"{tmp_path}/a.jsonl",), **common)
  tokens = DataConfig(
    dataset_type="tokens",
    dataset_path=(f"{tmp_path}/out/train.bin",),
    eval_dataset_path=(f"{tmp_path}/out/eval.bin",),
    **common,
  )
  for own, exported in zip(rows_of(text, tmp_path), rows_of(tokens, tmp_path), strict=True):
    for row, other in zip(own, exported, strict=True):
      for name, x_T in row.items():
        np.testing.assert_array_equal(x_T, other[name])
  with pytest.raises(SystemExit):
    main(["export", *keys, f"output_path={tmp_path}/out"])
  assert "exists: name a new folder" in capsys.readouterr().err


def test_an_id_that_does_not_fit_is_not_wrapped(tmp_path):
  documents = [np.array([1, 2]), np.array([3, 1 << 16])]
  with pytest.raises(UserError, match="document 1 has the id 65536, which uint16 cannot hold"):
    write_indexed(tmp_path / "a", documents, np.dtype("<u2"))


def test_what_is_only_read_is_marked(tmp_path):
  row = {"prompt": "two?", "completion": "2\x1b[0m"}
  (tmp_path / "a.jsonl").write_text(json.dumps(row))
  (tmp_path / "template").write_text(TEMPLATE)
  cfg = DataConfig(
    dataset_type="chat",
    dataset_path=(f"{tmp_path}/a.jsonl",),
    chat_template_path=f"{tmp_path}/template",
    max_target_length=32,
    eval_fraction=0.0,
  )
  rows = InspectConfig(inspect_num_rows=1)
  head, text = render(cfg, rows, 258, tmp_path / "cache")
  assert head == "--- train row 0 (row 0 of the data): 1 segments, 10 of 32 positions, 6 learned"
  assert text == "⟦two?<257>⟧2\\x1b[0m<257>"


def test_the_second_half_of_a_text_is_printed_in_colour(tmp_path, monkeypatch):
  (tmp_path / "a.txt").write_text("abcdef")
  monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
  monkeypatch.delenv("NO_COLOR", raising=False)
  cfg = DataConfig(dataset_path=(f"{tmp_path}/a.txt",), max_target_length=4, eval_fraction=0.0)
  cfg = DataConfig(**{**vars(cfg), "enable_data_shuffling": False})
  rows = InspectConfig(inspect_first_row=1, inspect_num_rows=1)
  _, text = render(cfg, rows, 258, tmp_path / "cache")
  assert text == "\033[2md\033[0m\033[32mef<257>\033[0m"


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    ([], "write one of tokenize, inspect, export, train_tokenizer first"),
    (["export", "steps=2"], "steps=2 is not read by maxlite.data export"),
    (["export"], "output_path is missing"),
    (["tokenize", "inspect_num_rows=2"], "inspect_num_rows=2 is not read by maxlite.data tokenize"),
    (["train_tokenizer", "tokenizer_type=sentencepiece"], "write tokenizer_type=huggingface"),
  ],
)
def test_mistakes_are_answered(argv, message, capsys):
  with pytest.raises(SystemExit) as exit_:
    main(argv)
  assert exit_.value.code == 2
  assert message in capsys.readouterr().err
