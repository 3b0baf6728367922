"""Changed data of a run that resumes are found before JAX is imported."""

import os
import re
import resource
import subprocess
import sys

import jax.numpy as jnp
import pytest
from support.tiny import config_of

from maxlite.checkpoint.manager import Checkpoints
from maxlite.config import save_resolved
from maxlite.config.phases import phases_of
from maxlite.data.loader import open_data
from maxlite.data.train_streams import TrainStreams
from maxlite.errors import UserError
from maxlite.runs import resumed_data
from maxlite.runs.resumed_data import check_resumed_data
from maxlite.runs.saved_run import run_folder, token_cache

SIZE = 4


def keys_of(folder, **keys):
  paths = {"base_output_directory": folder, "dataset_type": "text", "dataset_path": folder / "data"}
  return paths | {"tokenizer_type": "byte", "run_name": "run"} | keys


def open_streams(cfg):
  def opened(data):
    return open_data(
      data,
      vocab_size=cfg.model.vocab_size,
      global_batch_size=SIZE,
      rows=range(SIZE),
      cache_directory=token_cache(cfg),
      evaluates=data == cfg.data,
    )

  by_phase = {phase.name: phase.data for phase in phases_of(cfg)} or {"train": cfg.data}
  return TrainStreams({name: opened(data) for name, data in by_phase.items()}), list(by_phase)


@pytest.fixture
def start(tmp_path, monkeypatch):
  """Write the config and a checkpoint of a run that has taken a batch of each phase."""
  monkeypatch.chdir(tmp_path)
  for name in ("data", "other"):
    (tmp_path / name).mkdir()
    for n in range(9):
      (tmp_path / name / f"{n}.txt").write_text(f"def {name}{n}(x): return {n} * x\n" * 20)

  def start(**keys):
    cfg = config_of(**keys_of(tmp_path, **keys))
    streams, names = open_streams(cfg)
    list(map(streams.take, names))
    folder = run_folder(cfg)
    save_resolved(cfg, folder.config)
    checkpoints = Checkpoints(cfg.checkpoint, folder.checkpoints, report=print)
    checkpoints.save(3, {"x": jnp.zeros(2)}, streams.state())
    checkpoints.close()
    streams.close()

  return start


def check(folder, **keys):
  cfg = config_of(**keys_of(folder, **keys))
  check_resumed_data(cfg, run_folder(cfg))


OTHER_DATA = "the checkpoint was trained on other data than this run would read: restore the files"


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"dataset_path": "other"}, OTHER_DATA),
    ({"eval_fraction": 0.5}, OTHER_DATA),
    ({"packing_strategy": "best_fit"}, OTHER_DATA),
    ({"data_shuffle_seed": 7}, "was written with data_shuffle_seed=0, this run has 7: set"),
    ({"max_target_length": 8}, "was written with max_target_length=16, this run has 8: set"),
  ],
)
def test_other_keys_of_the_data_are_refused(start, tmp_path, keys, message):
  start()
  check(tmp_path, steps=99, per_device_batch_size=1)
  with pytest.raises(UserError, match=message):
    check(tmp_path, **keys)


def test_files_are_compared_by_their_content(start, tmp_path):
  start()
  (tmp_path / "data").rename(tmp_path / "moved")
  os.utime(tmp_path / "moved" / "0.txt")
  check(tmp_path, dataset_path="moved")
  text = (tmp_path / "moved" / "0.txt").read_text()
  (tmp_path / "moved" / "0.txt").write_text(text.replace("x", "y"))
  with pytest.raises(UserError, match=OTHER_DATA):
    check(tmp_path, dataset_path="moved")


def test_a_source_of_a_mixture_is_named(start, tmp_path):
  mixture = "[{name: a, path: data, weight: 1}, {name: b, path: other, weight: 1}]"
  start(dataset_mixture=mixture)
  later = mixture.replace("}]", "}, {name: c, path: data, weight: 1, from_step: 9}]")
  check(tmp_path, dataset_mixture=later)
  with (tmp_path / "other" / "0.txt").open("a") as file:
    file.write("more")
  with pytest.raises(UserError, match="first 1 batches would have other data of b than"):
    check(tmp_path, dataset_mixture=later)


def test_the_phase_is_named(start, tmp_path):
  rest = "train: [.*], steps: 1"
  phases = f"[{{name: a, {rest}}}, {{name: b, {rest}, dataset_path: [other]}}]"
  start(phases=phases)
  check(tmp_path, phases=phases)
  with pytest.raises(UserError, match=f"^phase b: {OTHER_DATA}"):
    check(tmp_path, phases=phases.replace("other", "other/0.txt"))


def test_what_cannot_be_compared_here_is_left_to_the_run(start, tmp_path, monkeypatch):
  start()
  check(tmp_path, dataset_path="other", enable_checkpointing=False)
  check(tmp_path, dataset_path="other", run_name="new")
  monkeypatch.setattr(resumed_data, "_MAX_BYTES", 1000)
  check(tmp_path, dataset_path="other")
  monkeypatch.undo()
  manifest = tmp_path / "run/checkpoints/3/manifest/metadata"
  manifest.write_text(manifest.read_text()[:100])
  check(tmp_path, dataset_path=tmp_path / "other")


def test_the_command_answers_without_jax(start, tmp_path):
  start()
  arguments = [str(tmp_path / "run/config.yml"), f"dataset_path={tmp_path / 'other'}"]
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  done = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "maxlite.train", *arguments],
    capture_output=True,
    text=True,
    check=False,
  )
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
  assert (done.returncode, len(lines)) == (2, 1)
  assert lines[0].startswith(f"maxlite.train: {OTHER_DATA}")
  assert not re.search(r"\| +(jax|grain|huggingface_hub\.hf_api)$", done.stderr, re.MULTILINE)
  assert after.ru_utime - before.ru_utime < 1  # [s] of CPU time: the machine may be busy
