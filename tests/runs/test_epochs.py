"""A command that asks for epochs is told their steps."""

import re

import pytest

from maxlite.config import load_config
from maxlite.errors import UserError
from maxlite.runs.epochs import refuse_epochs


@pytest.fixture
def argv(tmp_path):
  (tmp_path / "a.txt").write_text("x" * 798)  # 800 tokens with bos and eos, 799 of them inputs
  return [
    f"dataset_path={tmp_path}/a.txt",
    f"base_output_directory={tmp_path}/runs",
    "eval_fraction=0",
    "max_target_length=8",
  ]


@pytest.mark.parametrize("key", ["epochs", "--epochs", "num_epoch", "num_train_epochs"])
def test_the_steps_of_small_data_are_counted(argv, key):
  text = "an epoch has 100 rows, 33.3 steps of global_batch_size=3; write steps=100"
  with pytest.raises(UserError, match=re.escape(f"{key}=3 is not a key; {text}")):
    refuse_epochs([*argv, f"{key}=3", "global_batch_size=3"])
  text = "50.0 steps of per_device_batch_size=2 on one device; write steps=25"
  with pytest.raises(UserError, match=re.escape(text)):
    refuse_epochs([f"{key}=0.5", *argv, "per_device_batch_size=2"])


def test_other_mistakes_are_left_to_the_config(argv, tmp_path):
  for more in (["stepz=3"], ["dataset_type=chat"], [f"dataset_path={tmp_path}/missing"]):
    refuse_epochs([*argv, *more, "epochs=3"])
    with pytest.raises(UserError):
      load_config([*argv, *more, "epochs=3"])
  refuse_epochs([*argv, "epochs=many"])
  refuse_epochs(argv)
