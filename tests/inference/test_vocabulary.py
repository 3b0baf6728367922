"""A tokenizer with more ids than the model has rows is refused wherever text becomes ids."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import tiny_engine as tiny
from support.tiny import config_of
from tokenizers import AddedToken, Tokenizer

import maxlite
from maxlite import convert
from maxlite.config import load_config
from maxlite.hf.hf_tokenizer import byte_tokenizer
from maxlite.inference.engine import GenerationRequest
from maxlite.inference.generation import Completer, run_generation
from maxlite.inference.server.address import listen
from maxlite.inference.server.serving import run_serving

LLAMA = Path(__file__).resolve().parents[1] / "hf" / "hf_fixtures" / "llama"
MESSAGE = "the tokenizer has 318 ids and the model vocab_size=258: set vocab_size=320"


def add_tokens(file):
  """Add 60 tokens to a tokenizer.json, as `add_tokens` without `resize_token_embeddings`."""
  tokenizer = Tokenizer.from_file(str(file))
  tokenizer.add_special_tokens([AddedToken(f"<x{n}>", special=True) for n in range(60)])
  tokenizer.save(str(file))


@pytest.fixture
def tokenizer(tmp_path):
  path = tmp_path / "tokenizer.json"
  byte_tokenizer().save(str(path))
  add_tokens(path)
  keys = ["tokenizer_type=huggingface", f"tokenizer_path={path}", "vocab_size=258"]
  return [*keys, f"base_output_directory={tmp_path}", "prompt=a"]


def serve(cfg):
  with listen("127.0.0.1", 0) as listening:
    run_serving(cfg, listening)


@pytest.mark.parametrize(("name", "program"), [("generate", run_generation), ("serve", serve)])
def test_programs_refuse_it(name, program, tokenizer, capsys):
  cfg = load_config(tokenizer, needs_data=False)
  with pytest.raises(SystemExit, match="2"):
    program(cfg)
  assert capsys.readouterr().err == f"maxlite.{name}: {MESSAGE}\n"


def test_completions_during_training_refuse_it(tokenizer, program_of):
  keys = dict(key.split("=") for key in tokenizer) | {"vocab_size": 258, "dataset_type": "text"}
  with pytest.raises(ValueError, match=re.escape(MESSAGE)):
    Completer(config_of(**keys), program_of(**keys), ["a"])


def test_an_import_says_so(tmp_path, monkeypatch, capsys):
  folder = shutil.copytree(LLAMA, tmp_path / "model")
  byte_tokenizer().save(str(folder / "tokenizer.json"))

  def note(name, *keys):
    argv = ["from_hf", str(folder), f"run_name={name}", f"base_output_directory={tmp_path}", *keys]
    monkeypatch.setattr(sys, "argv", ["convert", *argv])
    assert convert.main() == 0
    return capsys.readouterr().out

  assert "the tokenizer has 258 ids and the model vocab_size=40: set vocab_size=320" in note("a")
  assert "the tokenizer" not in note("b", "vocab_size=320")
  model, _ = maxlite.load(tmp_path / "b")
  assert model.cfg.vocab_size == 320


@pytest.mark.parametrize("token", [-1, tiny.KEYS["vocab_size"], 2**40])
def test_the_engine_refuses_ids_without_a_row(token, two_rows):
  with pytest.raises(ValueError, match=f"token {token} is outside of the model's vocab_size=48"):
    two_rows.check(GenerationRequest([1, token, 2], 1))


def test_the_engine_accepts_ids_of_all_rows(two_rows):
  two_rows.check(GenerationRequest([0, tiny.KEYS["vocab_size"] - 1], 1))
