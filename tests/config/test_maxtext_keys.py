"""Every key of MaxText is known or answered, and a pasted command is answered at once."""

from pathlib import Path

import pytest

from maxlite.config import load_config, main_config
from maxlite.config.maxtext.answers import answer_key, answer_value, maxtext_keys
from maxlite.config.schema import KEYS
from maxlite.errors import UserError

TABLES = maxtext_keys()
# All keys of MaxText's src/maxtext/configs/base.yml.
MAXTEXT_KEYS = Path(__file__).with_name("maxtext_keys.txt").read_text("utf-8").split()
# Keys in sections, or not in base.yml, of src/maxtext/configs/post_train/.
_POST_TRAINING_FILE = Path(__file__).with_name("maxtext_post_training_keys.txt")
POST_TRAINING = _POST_TRAINING_FILE.read_text("utf-8").split()
# Keys of MaxText's token files of Megatron.
TOKEN_FILES = [
  "blend_cache_dir",
  "blend_index_dir",
  "eod_mask_loss",
  "megatron_eval_files",
  "megatron_mmap_mode",
  "megatron_train_files",
  "mmap_eod_id",
  "mmap_npy_split",
  "mmap_split_sentences",
  "packing_max_segments_per_sample",
  "reset_attention_mask",
]
LACKING = list(TABLES.other_name)
for keys in (*TABLES.not_needed.values(), *TABLES.not_supported.values()):
  LACKING += keys


def test_every_key_of_maxtext_is_in_one_table():
  assert len(MAXTEXT_KEYS) == 696
  assert sorted(LACKING) == sorted(set(LACKING))
  assert not set(LACKING) & KEYS.keys()
  assert TABLES.same_name.keys() <= KEYS.keys()
  assert TABLES.same_name.keys() >= TABLES.other_meaning.keys()
  assert set(MAXTEXT_KEYS) - TABLES.same_name.keys() - set(LACKING) == set()
  assert set(MAXTEXT_KEYS) & KEYS.keys() <= TABLES.same_name.keys()


def test_every_key_that_maxlite_lacks_is_answered():
  with pytest.raises(UserError) as error:
    load_config([f"{key}=7" for key in LACKING])
  assert len(error.value.lines) == len(LACKING)
  for key, answer in zip(LACKING, error.value.lines, strict=True):
    assert answer.startswith(f"command line: {key}=7 is a key of MaxText")
    assert "; write " in answer or answer.endswith("; remove it")
    assert "{value}" not in answer
    assert "did you mean" not in answer


@pytest.mark.parametrize("form", ["{}=7", "--{}=7", "--config.{}=7"])
def test_every_key_of_post_training_and_of_token_files_is_answered(form):
  keys = [key for key in POST_TRAINING + TOKEN_FILES if key not in KEYS]
  if "config" in form:
    keys = [key for key in keys if "." not in key]
  with pytest.raises(UserError) as error:
    load_config([form.format(key) for key in keys])
  unanswered = [line for line in error.value.lines if "MaxText" not in line]
  assert not unanswered
  assert {line.split("=")[0].split()[-1] for line in error.value.lines} == set(keys)


def test_sections_of_a_file_are_answered_key_by_key(tmp_path):
  (tmp_path / "sft.yml").write_text(
    "lora:\n  lora_rank: 16\n  lora_restore_path: null\n  lora_tile_size:\n"
    "dpo: {algo: orpo, dpo_beta: 0.2}\n"
    "student_overrides:\n  base_emb_dim: 512\n  load_parameters_path: gs://student\n"
    "teacher_overrides:\n  model_name: x\n  load_parameters_path: gs://teacher\n"
    "generation_configs:\n  greedy:\n    eval_top_k: 1\n"
  )
  with pytest.raises(UserError) as error:
    load_config([str(tmp_path / "sft.yml")])
  answers: dict[str, str] = {}
  for line in error.value.lines:
    place, answer = line.removeprefix(f"{tmp_path}/").split(": ", 1)
    answers[place] = answers.get(place, "") + answer
  assert answers["sft.yml:2"] == "lora.lora_rank=16 is a key of MaxText; write lora_rank=16"
  assert "not needed to switch something off" in answers["sft.yml:3"]
  assert "not quantized" in answers["sft.yml:4"]
  assert "there is no ORPO" in answers["sft.yml:5"]
  assert answers["sft.yml:5"].endswith("write dpo_beta=0.2")
  assert answers["sft.yml:7"].endswith("write base_emb_dim=512")
  assert answers["sft.yml:8"].endswith("write load_parameters_path=gs://student")
  assert "teacher_path=FOLDER" in answers["sft.yml:10"]
  assert answers["sft.yml:11"].endswith("write teacher_path=gs://teacher loss_type=distill")
  assert "no such part" in answers["sft.yml:13"]


def test_the_answers_to_a_command_do_not_contradict_each_other():
  hub = "hf://datasets/HuggingFaceH4/ultrachat_200k/**"
  for extra, rows in (("use_sft=true", "chat"), ("use_dpo=True", "preference")):
    command = f"""
      dataset_type=hf hf_path=HuggingFaceH4/ultrachat_200k train_split=train_sft
      hf_eval_split=test_sft train_data_columns=['messages'] eval_data_columns=['text'] {extra}
    """
    command = command.replace(
      "messages", {"chat": "messages", "preference": "chosen','rejected"}[rows]
    )
    with pytest.raises(UserError) as error:
      load_config(command.split())
    written: dict[str, set[str]] = {}
    for line in error.value.lines:
      for word in line.partition("; write ")[2].replace(",", "").replace(";", "").split():
        key, equals, value = word.partition("=")
        if equals:
          written.setdefault(key, set()).add(value)
    assert written["dataset_path"] == {f"{hub}/train_sft-*.parquet"}
    assert written["eval_dataset_path"] == {f"{hub}/test_sft-*.parquet"}
    assert rows in written["dataset_type"] <= {rows, "chat"}


def test_files_of_the_hub_follow_from_all_keys_of_a_command():
  beside = {"hf_path": "openai/gsm8k", "hf_name": "main", "train_split": "test"}
  written = "dataset_path=hf://datasets/openai/gsm8k/main/**/test-*.parquet"
  for key, value in beside.items():
    assert answer_key(key, value, beside).endswith(written)
  assert answer_value("dataset_type", "hf", beside).endswith(f"dataset_type=parquet {written}")
  files = {"hf_path": "parquet", "hf_train_files": "gs://data/*.parquet"}
  assert answer_key("hf_path", "parquet", files).endswith("write dataset_path=gs://data/*.parquet")


def test_a_scale_of_all_sizes_names_the_sizes():
  # MaxText scales heads and hidden sizes by the first of three factors of 2, the width by the
  # second, and layers by the third.
  for scale, heads, width, layers in ((2, 2, 1, 1), (4, 2, 2, 1), (8, 2, 2, 2), (32, 4, 4, 2)):
    answer = answer_key("global_parameter_scale", str(scale))
    assert "remove" not in answer
    assert f"base_moe_mlp_dim times {heads}, base_emb_dim times {width}," in answer
    assert answer.endswith(f"base_num_decoder_layers times {layers}")
  assert "not needed" in answer_key("global_parameter_scale", "1")


def test_a_key_with_one_value_is_not_needed_only_with_that_value():
  assert TABLES.one_value.keys() <= set(LACKING)
  for key, one in TABLES.one_value.items():
    assert "is not needed: " in answer_key(key, one.capitalize())
    assert f"with one value here, {one}: " in answer_key(key, "7")


@pytest.mark.parametrize("key", ["epochs", "num_epochs", "num_train_epochs", "num_epoch"])
def test_epochs_are_answered_by_steps(key):
  with pytest.raises(UserError, match="write steps=N; a run prints at its start how many steps"):
    load_config([f"{key}=3"])


def test_advice_names_keys_of_maxlite():
  advised = [*TABLES.other_name.values(), *TABLES.dotted.values()]
  for table in TABLES.values.values():
    advised += table.values()
  for advice in advised:
    words = advice.replace("(", " ").split()
    names = [word.partition("=")[0] for word in words if "=" in word and word[0].islower()]
    assert names or any(word.strip(",;") in KEYS for word in words), advice
    assert set(names) - {"file_format"} <= KEYS.keys(), advice


def test_every_value_of_maxtext_is_answered():
  values = []
  for key, table in TABLES.values.items():
    values += [(key, value) for value in table]
  for key, table in TABLES.unsupported_values.items():
    for words in table.values():
      values += [(key, value) for value in words]
  with pytest.raises(UserError) as error:
    load_config([f"{key}={value}" for key, value in values])
  assert len(error.value.lines) == len(values)
  for (key, value), answer in zip(values, error.value.lines, strict=True):
    assert answer.startswith(f"command line: {key}={value} is a value of MaxText")


def test_a_value_with_a_place_is_filled_in():
  assert answer_key("hf_train_files", "a.parquet").endswith("write dataset_path=a.parquet")
  assert answer_key("mlp_bias", "false") == "is a key of MaxText; write expert_bias=false"
  assert answer_key("use_sft", "True").endswith("write dataset_type=chat")
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
    "model_name=gpt3-175b",
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
    "gpt3-175b",
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
