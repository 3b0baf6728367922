"""A tokenizer's files: what ends a text, and how a conversation is rendered, goes in and out."""

import json
from pathlib import Path

import pytest

from maxlite.config.schema import DataConfig
from maxlite.data.tokenizers.tokenizer import open_tokenizer
from maxlite.hf.hf_tokenizer import byte_tokenizer, copy_tokenizer, write_tokenizer

TEMPLATE = Path(__file__).resolve().parents[2] / "configs" / "chat" / "plain.jinja"


@pytest.fixture
def source(tmp_path):
  """A folder as of a published model, whose config.json alone tells what ends a text."""
  folder = tmp_path / "source"
  folder.mkdir()
  byte_tokenizer(256, 257).save(str(folder / "tokenizer.json"))
  (folder / "config.json").write_text('{"bos_token_id": 256, "eos_token_id": [257, 65]}')
  return folder


def config_of(folder, **keys):
  path = str(folder / "tokenizer.json")
  return DataConfig(tokenizer_type="huggingface", tokenizer_path=path, **keys)


def test_what_config_json_alone_says_is_kept(source, tmp_path):
  copy_tokenizer(source, tmp_path / "run")
  assert not (tmp_path / "run" / "config.json").exists()
  tokenizer = open_tokenizer(config_of(tmp_path / "run"))
  assert (tokenizer.bos, tokenizer.stop_token_ids) == (256, (257, 65))


def test_a_generation_config_that_is_there_is_left_as_it_is(source, tmp_path):
  (source / "generation_config.json").write_text('{"eos_token_id": 66}')
  copy_tokenizer(source, tmp_path / "run")
  assert open_tokenizer(config_of(tmp_path / "run")).stop_token_ids == (66,)


def test_what_a_run_ends_answers_with_is_exported(source, tmp_path):
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


def test_bytes_leave_with_their_template(tmp_path):
  cfg = DataConfig(chat_template_path=str(TEMPLATE))
  assert write_tokenizer(cfg, 256, (257,), tmp_path)["eos_token_id"] == 257
  exported, own = open_tokenizer(config_of(tmp_path)), open_tokenizer(DataConfig())
  assert exported.chat_template == TEMPLATE.read_text()
  assert exported.special_tokens == own.special_tokens
  assert exported.special_tokens_map == own.special_tokens_map
  assert exported.encode_with_offsets("é<|end_of_text|>")[0].tolist() == [195, 169, 257]
