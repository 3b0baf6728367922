"""What precedes a text is what transformers puts there, of a folder and of its export."""

import json
from importlib.util import find_spec

import pytest
import tokenizers
from tokenizers import processors

from maxlite.config.schema import DataConfig, flatten
from maxlite.data.tokenizer import encode_prompt, open_tokenizer
from maxlite.hf.hf_tokenizer import byte_tokenizer, write_tokenizer
from maxlite.storage.tokenizer_files import copy_tokenizer

# Imported in the tests: to import transformers takes longer than to collect all tests.
pytestmark = [
  pytest.mark.hf,
  pytest.mark.skipif(not find_spec("transformers"), reason="needs the package transformers"),
]
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
CLASSES = ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer"]


def template(single):
  return processors.TemplateProcessing(single=single, special_tokens=[(BOS, 256), (EOS, 257)])


POST_PROCESSORS = {
  "none": None,
  "byte level": processors.ByteLevel(trim_offsets=False),
  "bos": template(f"{BOS} $A"),
  "two": template(f"{EOS} {BOS} $A"),
  "sequence": processors.Sequence([processors.ByteLevel(), template(f"{BOS} $A")]),
}


def write_folder(folder, post_processor, tokenizer_class, bos, add_bos_token):
  """A folder like a published model's."""
  folder.mkdir()
  raw = json.loads(byte_tokenizer().to_str())
  raw["post_processor"] = None
  tokenizer = tokenizers.Tokenizer.from_str(json.dumps(raw))
  if post_processor is not None:
    tokenizer.post_processor = post_processor
  tokenizer.save(str(folder / "tokenizer.json"))
  config = {"tokenizer_class": tokenizer_class, "bos_token": bos, "eos_token": EOS}
  if add_bos_token is not None:
    config["add_bos_token"] = add_bos_token
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  ids = {"bos_token_id": 256 if bos else None, "eos_token_id": 257}
  (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | ids))
  return ids


def ids_of_transformers(folder):
  import transformers

  return transformers.AutoTokenizer.from_pretrained(str(folder))("a cat")["input_ids"]


def data_config(folder, **keys):
  path = str(folder / "tokenizer.json")
  return DataConfig(tokenizer_type="huggingface", tokenizer_path=path, **keys)


@pytest.mark.parametrize("tokenizer_class", CLASSES)
@pytest.mark.parametrize("post_processor", POST_PROCESSORS)
@pytest.mark.parametrize(
  ("bos", "add_bos_token"), [(BOS, None), (BOS, True), (BOS, False), (None, None)]
)
def test_prompts_equal(tmp_path, tokenizer_class, post_processor, bos, add_bos_token):
  folder = tmp_path / "model"
  ids = write_folder(folder, POST_PROCESSORS[post_processor], tokenizer_class, bos, add_bos_token)
  copy_tokenizer(flatten(data_config(folder)), tmp_path / "run")
  cfg = data_config(tmp_path / "run" / "tokenizer")
  tokenizer = open_tokenizer(cfg)
  expected = ids_of_transformers(folder)
  assert encode_prompt(tokenizer, b"a cat") == expected
  out = tmp_path / "out"
  out.mkdir()
  assert write_tokenizer(cfg, tokenizer.bos, tokenizer.stop_token_ids, out) == ids
  assert ids_of_transformers(out) == expected


@pytest.mark.parametrize("post_processor", POST_PROCESSORS)
@pytest.mark.parametrize("add_bos", ["true", "false"])
def test_an_export_has_what_a_key_overrides(tmp_path, post_processor, add_bos):
  folder = tmp_path / "model"
  write_folder(folder, POST_PROCESSORS[post_processor], CLASSES[0], BOS, None)
  cfg = data_config(folder, add_bos=add_bos)
  out = tmp_path / "out"
  out.mkdir()
  write_tokenizer(cfg, 256, (257,), out)
  ids = encode_prompt(open_tokenizer(cfg), b"a cat")
  assert ids == [*[256] * (add_bos == "true"), *b"a cat"]
  assert (
    ids_of_transformers(out) == encode_prompt(open_tokenizer(data_config(out)), b"a cat") == ids
  )
