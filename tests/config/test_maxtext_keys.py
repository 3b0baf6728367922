"""Every key of MaxText is known or answered, and a pasted command is answered at once."""

from pathlib import Path

import pytest

from maxlite.config import UserError, load_config, main_config
from maxlite.config.maxtext_answers import answer_key, answer_value
from maxlite.config.maxtext_keys import NOT_NEEDED, NOT_SUPPORTED, OTHER_NAME
from maxlite.config.maxtext_same_keys import OTHER_MEANING, SAME_NAME, UNSUPPORTED_VALUES, VALUES
from maxlite.config.schema import KEYS

# All keys of MaxText's src/maxtext/configs/base.yml.
MAXTEXT_KEYS = Path(__file__).with_name("maxtext_keys.txt").read_text("utf-8").split()
LACKING = list(OTHER_NAME)
for keys in (*NOT_NEEDED.values(), *NOT_SUPPORTED.values()):
  LACKING += keys.split()


def test_every_key_of_maxtext_is_in_one_table():
  assert len(MAXTEXT_KEYS) == 696
  assert sorted(LACKING) == sorted(set(LACKING))
  assert not set(LACKING) & KEYS.keys()
  assert SAME_NAME.keys() <= KEYS.keys()
  assert SAME_NAME.keys() >= OTHER_MEANING.keys()
  assert set(MAXTEXT_KEYS) - SAME_NAME.keys() - set(LACKING) == set()
  assert set(MAXTEXT_KEYS) & KEYS.keys() <= SAME_NAME.keys()


def test_every_key_that_maxlite_lacks_is_answered():
  with pytest.raises(UserError) as error:
    load_config([f"{key}=7" for key in LACKING])
  assert len(error.value.lines) == len(LACKING)
  for key, answer in zip(LACKING, error.value.lines, strict=True):
    assert answer.startswith(f"command line: {key}=7 is a key of MaxText")
    assert "; write " in answer or answer.endswith("; remove it")
    assert "{value}" not in answer
    assert "did you mean" not in answer


def test_advice_names_keys_of_maxlite():
  advised = list(OTHER_NAME.values())
  for table in VALUES.values():
    advised += table.values()
  for advice in advised:
    words = advice.replace("(", " ").split()
    names = [word.partition("=")[0] for word in words if "=" in word and word[0].islower()]
    assert names or any(word.strip(",;") in KEYS for word in words), advice
    assert set(names) - {"file_format"} <= KEYS.keys(), advice


def test_every_value_of_maxtext_is_answered():
  values = []
  for key, table in VALUES.items():
    values += [(key, value) for value in table]
  for key, table in UNSUPPORTED_VALUES.items():
    for words in table.values():
      values += [(key, value) for value in words.split()]
  with pytest.raises(UserError) as error:
    load_config([f"{key}={value}" for key, value in values])
  assert len(error.value.lines) == len(values)
  for (key, value), answer in zip(values, error.value.lines, strict=True):
    assert answer.startswith(f"command line: {key}={value} is a value of MaxText")


def test_a_value_with_a_place_is_filled_in():
  assert answer_key("hf_train_files", "a.parquet").startswith(
    "is a key of MaxText; write dataset_path=a.parquet "
  )
  assert answer_key("mlp_bias", "false") == "is a key of MaxText; write expert_bias=false"
  assert answer_key("use_sft", "True").endswith("write dataset_type=chat dataset_path=FILE.jsonl")
  assert "switch something off; remove it" in answer_key("use_sft", "False")
  assert answer_value("mlp_activations_limit", "-1.0").endswith("write mlp_activations_limit=0")
  assert not answer_key("stepz", "3")
  assert not answer_value("steps", "3")


def test_all_mistakes_of_a_pasted_command_are_answered_at_once(capsys, tmp_path):
  (tmp_path / "mine.yml").write_text(
    "steps: 3\nuse_dpo: false\nweight_sparsity_n: null\nvllm_hf_overrides: {}\n"
  )
  argv = [
    str(tmp_path / "mine.yml"),
    "model_name=llama3.1-405b",
    "dataset_type=tfds",
    "steps=9",
    "ici_pipeline_parallelism=2",
    "--enable_goodput_recording=true",
    "learning_rate=1e-3x",
    "plugins=none.py",
    "stepz=3",
  ]
  with pytest.raises(SystemExit, match="2"):
    main_config(argv, "maxlite.train")
  lines = capsys.readouterr().err.splitlines()
  assert all(line.startswith("maxlite.train: ") for line in lines)
  named = (
    "mine.yml:2: use_dpo",
    "mine.yml:3: weight_sparsity_n",
    "mine.yml:4: vllm_hf_overrides",
    "llama3.1-405b",
    "ici_pipeline_parallelism",
    "1e-3x",
    "stepz=3",
    "--enable_goodput_recording",
  )
  for name in named:
    assert sum(name in line for line in lines) == 1, name
  assert len(lines) == len(named)  # the choices of dataset_type follow the import of plug-ins
  with pytest.raises(UserError) as error:
    load_config([word for word in argv if not word.startswith("plugins")])
  assert sum("dataset_type=tfds" in line for line in error.value.lines) == 1
