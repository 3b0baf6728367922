"""Tokenizer files: stop tokens and chat templates survive import and export."""

import json
from pathlib import Path

import pytest

from maxlite.config.schema import DataConfig, flatten
from maxlite.data.tokenizer import open_tokenizer
from maxlite.errors import UserError
from maxlite.hf.hf_tokenizer import byte_tokenizer, write_tokenizer
from maxlite.storage.tokenizer_files import copy_tokenizer

TEMPLATE = Path(__file__).resolve().parents[2] / "configs" / "chat" / "plain.jinja"


@pytest.fixture
def source(tmp_path):
  """A folder like a published model's, with stop tokens only in config.json."""
  folder = tmp_path / "source"
  folder.mkdir()
  byte_tokenizer().save(str(folder / "tokenizer.json"))
  (folder / "config.json").write_text('{"bos_token_id": 256, "eos_token_id": [257, 65]}')
  return folder


def config_of(folder, **keys):
  path = str(folder / "tokenizer.json")
  return DataConfig(tokenizer_type="huggingface", tokenizer_path=path, **keys)


def copied(source, run):
  """The tokenizer of `source` in the folder of a run."""
  copy_tokenizer(flatten(config_of(source)), run)
  return run / "tokenizer"


def test_stop_tokens_of_config_json_are_kept(source, tmp_path):
  tokenizer = open_tokenizer(config_of(copied(source, tmp_path / "run")))
  assert (tokenizer.bos, tokenizer.stop_token_ids) == (256, (257, 65))


def test_an_existing_generation_config_is_not_modified(source, tmp_path):
  (source / "generation_config.json").write_text('{"eos_token_id": 66}')
  copy = copied(source, tmp_path / "run")
  assert open_tokenizer(config_of(copy)).stop_token_ids == (66,)


def test_stop_tokens_and_template_of_a_run_are_exported(source, tmp_path):
  (source / "generation_config.json").write_text('{"eos_token_id": 257, "top_p": 0.5}')
  out = tmp_path / "out"
  out.mkdir()
  cfg = config_of(source, chat_template_path=str(TEMPLATE))
  assert write_tokenizer(cfg, 256, (257, 66), out) == {
    "bos_token_id": 256,
    "eos_token_id": [257, 66],
  }
  written = json.loads((out / "generation_config.json").read_text())
  assert written == {"bos_token_id": 256, "eos_token_id": [257, 66], "top_p": 0.5}
  exported = open_tokenizer(config_of(out))
  assert (exported.stop_token_ids, exported.chat_template) == ((257, 66), TEMPLATE.read_text())


def test_the_byte_tokenizer_is_exported_with_its_template(tmp_path):
  cfg = DataConfig(chat_template_path=str(TEMPLATE))
  assert write_tokenizer(cfg, 256, (257,), tmp_path)["eos_token_id"] == 257
  exported = open_tokenizer(config_of(tmp_path))
  own = open_tokenizer(DataConfig())
  assert exported.chat_template == TEMPLATE.read_text()
  assert exported.special_tokens == own.special_tokens
  assert exported.special_tokens_map == own.special_tokens_map
  assert exported.encode_with_offsets("é<|end_of_text|>")[0].tolist() == [195, 169, 257]


def test_a_link_to_another_folder_is_not_copied(source, tmp_path):
  (tmp_path / "secret").write_text("{}")
  (source / "added_tokens.json").symlink_to(tmp_path / "secret")
  with pytest.raises(UserError, match=r"added_tokens\.json is a link to .*secret: replace it"):
    copied(source, tmp_path / "run")
  assert not (tmp_path / "run" / "tokenizer").exists()
