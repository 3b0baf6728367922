"""Every metric that a run can write is described in the catalogue and on its page."""

import fnmatch
import functools
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import jax
import numpy as np
import pytest
from support.tiny import build, config_of

from maxlite.evaluation.held_out import compile_eval_step, held_out_row
from maxlite.metrics.catalogue import METRICS, describe_metric
from maxlite.metrics.goodput import Stopwatch
from maxlite.metrics.prometheus import PrometheusWriter
from maxlite.metrics.step_row import TIME, training_row
from maxlite.phases.phase_plan import LOSS_NAMES
from maxlite.training.step_log import TOTAL_TOKENS

ROOT = Path(__file__).resolve().parents[2]
# Keys of runs that together write all metrics, except those of a teacher's run and of a replay.
RUNS = {
  "experts": {
    "decoder_block": "mixtral",
    "z_loss_multiplier": 1e-4,
    "mtp_num_layers": 1,
    "qk_clip_threshold": 100,
    "skip_step_on_spikes": True,
  },
  "indexer": {"decoder_block": "deepseek", "use_indexer": True, "q_lora_rank": 8},
  "phases": {
    "decoder_block": "llama",
    "num_draft_heads": 2,
    "phases": "[{name: fit, train: ['.*'], steps: 1, loss: next_token_and_draft}]",
    "ema_decay": 0.9,
  },
  "pairs": {
    "decoder_block": "llama",
    "lora_rank": 2,
    "phases": "[{name: lora, train: ['.*lora.*'], steps: 1, loss: dpo}]",
    "dataset_type": "preference",
    "dataset_path": str(ROOT / "configs/chat/preferences.jsonl"),
    "chat_template_path": str(ROOT / "configs/chat/plain.jinja"),
  },
  "rollouts": {
    "decoder_block": "llama",
    "loss_type": "grpo",
    "dataset_type": "prompts",
    "dataset_path": str(ROOT / "configs/rl/sort_prompts.jsonl"),
  },
}
# Those of the host, in a run with rollouts.
OF_ROLLOUTS = {
  "kl",
  "reward",
  "reward/*",
  "eval_task/*",
  "eval_task_stderr/*",
  "reward_std",
  "silent_groups",
  "completion_length",
  "truncated_share",
  "rollout_agreement",
  "rollout_rounds",
  "generation_seconds",
  "verification_seconds",
  "reward_seconds",
}
OTHERS = {"distill_loss", "sampled_entropy", "replayed_steps", "expert_buffer_factor", *OF_ROLLOUTS}


def ones_of(tree, dtype=None):
  return jax.tree.map(lambda leaf: np.ones(leaf.shape, dtype or leaf.dtype), tree)


@functools.cache
def names_in(name):
  """The metrics of a step and of an evaluation, by tracing, and those of the host."""
  cfg = config_of(**{"dataset_type": "synthetic", "sharding_tolerance": 1, **RUNS[name]})
  program = build(cfg)
  inputs = program.abstract_inputs(program.objectives[0])
  _, metrics = jax.eval_shape(program.build_joint_step(), program.abstract_state, inputs)
  on_host = ones_of(metrics) | {"phase": 0}
  speed = {"step_seconds": 1.0, "num_devices": 1, "flops_per_step": 1.0, "peak_tflops": 1.0}
  row = training_row(1, on_host, **speed)
  for feature in program.features:
    row |= feature.add_to_row(row)
  eval_step = compile_eval_step(program, np.ones(cfg.model.vocab_size, np.float32))
  sums = ones_of(jax.eval_shape(eval_step, program.abstract_state.params, inputs), np.float64)
  row |= held_out_row({name: [sums | {"ema": sums}] for name in ("wiki", "code")})
  return {*row, *Stopwatch().row(), TOTAL_TOKENS, TIME}


@pytest.mark.parametrize("name", RUNS)
def test_all_metrics_are_in_the_catalogue(name):
  assert len(names_in(name)) > 25
  assert [each for each in names_in(name) if describe_metric(each) is None] == []


def test_the_catalogue_has_no_metric_that_does_not_exist():
  written = set.union(*map(names_in, RUNS))
  for pattern in METRICS.keys() - OTHERS - {f"*/{loss}" for loss in LOSS_NAMES}:
    assert fnmatch.filter(written, pattern), pattern
  sources = ""
  for folder in ("training", "rollouts"):
    for path in (ROOT / "maxlite" / folder).rglob("*.py"):
      sources += path.read_text("utf-8")
  assert all(f'"{name.removesuffix("*")}' in sources for name in OTHERS)


def test_the_page_of_metrics_is_up_to_date():
  command = [sys.executable, "tools/inspect/metrics_reference.py", "--check"]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stdout + result.stderr


def scrape(port):
  with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
    return answer.read().decode()


def free_port():
  with socket.create_server(("127.0.0.1", 0)) as listener:
    return listener.getsockname()[1]


def test_prometheus_gets_the_latest_value_of_every_metric_with_its_meaning():
  port = free_port()
  writer = PrometheusWriter("127.0.0.1", port, 'my "run"', pytest.fail)
  writer.write({"step": 10, "loss": 2.5, "eval_loss/wiki-en": 3.0})
  writer.write({"step": 20, "loss": float("nan")})
  text = scrape(port)
  assert "# HELP maxlite_loss Mean cross-entropy of the step's tokens" in text
  assert "# TYPE maxlite_loss gauge" in text
  values = dict(re.findall(r'^maxlite_(\w+)\{run="my \\"run\\""\} (\S+)$', text, re.MULTILINE))
  assert values == {"step": "20.0", "loss": "NaN", "eval_loss_wiki_en": "3.0"}
  writer.close()
  with pytest.raises(urllib.error.URLError):
    scrape(port)


def test_a_port_in_use_is_one_line_and_the_run_goes_on():
  port = free_port()
  first = PrometheusWriter("127.0.0.1", port, "first", pytest.fail)
  lines = []
  second = PrometheusWriter("127.0.0.1", port, "second", lines.append)
  second.write({"step": 1})
  second.close()
  assert len(lines) == 1
  assert lines[0].startswith(f"metrics_port={port} metrics_host=127.0.0.1: Address already in use")
  first.write({"step": 3})
  assert 'maxlite_step{run="first"} 3.0' in scrape(port)
  first.close()
