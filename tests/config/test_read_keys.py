"""A key on the command line is obeyed or refused, by every command, for the whole schema."""

import subprocess
import sys

import pytest

from maxlite.config import load_config
from maxlite.config.command_line import CommandLine
from maxlite.config.read_keys import _CONDITIONS, READ_KEYS, check_typed
from maxlite.config.schema import KEYS, flatten
from maxlite.config.values import Setting
from maxlite.errors import UserError

# Keys that no run of the programs below reads: the families, losses and layouts that read them are
# not trained there, or a rule between keys refuses them where nothing reads them.
OF_OTHER_MODELS = {
  "base_mlp_dim", "first_num_dense_layers", "interleave_moe_layer_step", "capacity_factor",
  "megablox", "n_routing_groups", "topk_routing_group", "norm_topk_prob", "ragged_buffer_factor",
  "ragged_overflow", "routed_bias_update_rate", "lora_alpha", "lora_experts", "remat_saved_names",
  "mup_base_emb_dim", "mup_base_head_dim", "context_parallel_strategy",
  "inhomogeneous_layer_cycle_interval", "global_num_kv_heads", "num_kv_shared_layers",
  "use_double_wide_mlp", "hidden_size_per_layer_input", "scan_unroll",
  "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
  "gdn_num_key_heads", "gdn_num_value_heads", "gdn_key_head_dim", "gdn_value_head_dim",
  "gdn_conv_kernel_dim", "gdn_chunk_size",
  "attention_layers", "mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim",
  "mamba_conv_kernel_dim", "mamba_chunk_size", "short_conv_kernel_dim",
  "beta_fast", "mscale", "rope_truncate", "rope_attention_factor", "rope_short_factor",
  "rope_long_factor", "rope_long_context",
}  # fmt: skip
OF_OTHER_RUNS = {"reference_path", "dpo_beta", "dpo_label_smoothing", "chat_template_path"}
OF_OTHER_RUNS |= {"token_dtype", "document_end_id", "megatron_split"}
# Read while the config is resolved, or for the folder of the run.
OF_CONFIG = {"decoder_block", "model_name", "plugins", "trust_plugins", "run_name", "member"}
OF_CONFIG |= {"base_output_directory", "token_cache_directory", "packing"}


def settings(*argv):
  return CommandLine.split(argv).typed


def test_the_tables_name_keys_of_the_schema():
  for command, keys in READ_KEYS.items():
    assert keys <= KEYS.keys(), command
  for condition in _CONDITIONS:
    assert set(condition.keys) <= KEYS.keys()


def test_every_key_is_read_by_a_command():
  assert KEYS.keys() == set().union(*READ_KEYS.values())


@pytest.mark.parametrize("command", READ_KEYS)
def test_a_key_that_a_command_does_not_read_is_refused(command):
  cfg = load_config([])
  others = KEYS.keys() - READ_KEYS[command]
  typed = [Setting(key, "1", "command line") for key in others]
  with pytest.raises(UserError) as caught:
    check_typed(command, typed, cfg)
  assert len(caught.value.lines) == len(others)
  text = str(caught.value)
  assert all(key in text for key in others if key != "serve_api_key")


def test_a_key_that_repeats_the_value_of_the_run_is_accepted():
  cfg = load_config(["steps=7"])
  check_typed("maxlite.evaluate", settings("steps=7"), cfg, flatten(cfg))
  saved = flatten(cfg) | {"steps": 8}
  with pytest.raises(UserError, match=r"steps=7 is not read by maxlite.evaluate.* made with 8"):
    check_typed("maxlite.evaluate", settings("steps=7"), cfg, saved)


@pytest.mark.parametrize("key", ["load_parameters_path=x", "learning_rate=1", "prompt=x"])
@pytest.mark.parametrize("command", ["evaluate", "serve"])
def test_commands_that_open_a_run_refuse_other_keys(command, key):
  cfg = load_config([key])
  with pytest.raises(UserError, match=key.partition("=")[0]):
    check_typed(f"maxlite.{command}", settings(key), cfg, flatten(load_config([])))


# Each key without effect, and the keys beside it with which it has one.
WITHOUT_EFFECT = {
  "num_experts=4": ("decoder_block=llama", "decoder_block=mixtral"),
  "kv_lora_rank=8": ("decoder_block=llama", "decoder_block=deepseek"),
  "gdn_num_key_heads=4": ("decoder_block=mixtral", "decoder_block=qwen3_next"),
  "mamba_num_heads=4": ("decoder_block=qwen3_next", "decoder_block=bamba"),
  "base_mlp_dim=64": ("decoder_block=mixtral", "decoder_block=llama"),
  "muon_beta=0.9": ("", "opt_type=muon"),
  "adam_eps=1e-7": ("opt_type=lion", "opt_type=adamw"),
  "adam_b1=0.8": ("opt_type=adafactor", "opt_type=lion"),
  "wsd_decay_steps_fraction=0.2": ("", "lr_schedule_type=wsd"),
  "lora_alpha=8": ("", "lora_rank=4"),
  "checkpoint_period=7": ("enable_checkpointing=false", ""),
  "load_checkpoint=best": ("", "load_parameters_path=x"),
  "profiler_steps=2": ("", "profiler=xplane"),
  "text_column=a": ("", "dataset_type=jsonl"),
  "data_shuffle_seed=2": ("enable_data_shuffling=false", ""),
  "eval_fraction=0.1": ("eval_dataset_path=[stdlib]", ""),
  "per_device_batch_size=2": ("global_batch_size=8", ""),
  "prompt=x": ("", "callbacks=[completions]"),
  "phase_strategy=switch": ("", "phases=[{name: a, train: [.*], steps: 1}]"),
  "dataset_path=[x]": ("dataset_mixture=[{name: a, path: [stdlib], weight: 1}]", ""),
}


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_a_key_without_effect_is_refused(key):
  unread, read = WITHOUT_EFFECT[key]
  name = key.partition("=")[0]
  with pytest.raises(UserError, match=f"{name}=.* has no effect; .*, or remove it"):
    load_config([key, *_keys(unread)], command="maxlite.train", needs_data=False)
  load_config([key, *_keys(read)], command="maxlite.train", needs_data=False)


@pytest.mark.parametrize(
  "source",
  [
    "dataset_type=chat",
    "dataset_mixture=[{name: a, path: [x], weight: 1, type: chat}]",
    "phases=[{name: a, train: [.*], steps: 1, dataset_type: chat}]",
  ],
)
def test_conversations_read_their_columns(source):
  columns = "data_columns={messages: a}"
  template = "chat_template_path=configs/chat/plain.jinja"
  load_config([columns, source, template], command="maxlite.train", needs_data=False)
  with pytest.raises(UserError, match=r"data_columns=.* has no effect; write dataset_type=chat"):
    load_config([columns], command="maxlite.train", needs_data=False)


def _keys(text):
  return [text] if text else []


def test_the_optimizer_of_a_phase_reads_a_key():
  phases = "phases=[{name: a, train: [.*], steps: 1, optimizer: muon}]"
  load_config([phases, "muon_beta=0.9"], command="maxlite.train", needs_data=False)


def test_a_member_reads_a_key():
  members = "members=[{decoder_block: llama},{decoder_block: mixtral}]"
  load_config([members, "num_experts=4"], command="maxlite.train", needs_data=False)
  dense = "members=[{decoder_block: llama},{decoder_block: qwen3}]"
  with pytest.raises(UserError, match="num_experts=4 has no effect"):
    load_config([dense, "num_experts=4"], command="maxlite.train", needs_data=False)


RECORDER = """
import dataclasses, importlib, sys
from maxlite.config.schema import Config, KEYS

def sections(section):
  for field in dataclasses.fields(section):
    if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
      yield field.type
      yield from sections(field.type)

seen = set()
resolving = ("/maxlite/config/", "dataclasses.py", "<string>", "run_folder.py", "saved_run.py")
for section in set(sections(Config)):
  def read(self, name, original=section.__getattribute__):
    if name in KEYS:
      file = sys._getframe(1).f_code.co_filename
      if not any(part in file for part in resolving):
        seen.add(name)
    return original(self, name)
  section.__getattribute__ = read
module = importlib.import_module(sys.argv[1])
sys.argv = sys.argv[1:]
module.main()
print("seen", *seen)
"""


@pytest.mark.slow
def test_keys_that_evaluate_and_generate_accept_are_read(tmp_path):
  keys = ["base_emb_dim=16", "base_num_decoder_layers=1", "base_moe_mlp_dim=16", "steps=1"]
  keys += ["max_target_length=32", f"base_output_directory={tmp_path}", "eval_steps=1"]

  def keys_read_by(program, *argv):
    command = [sys.executable, "-c", RECORDER, program, *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    return set(done.stdout.splitlines()[-1].split()[1:])

  keys_read_by("maxlite.train", *keys)
  for program in ("maxlite.evaluate", "maxlite.generate"):
    seen = keys_read_by(program, f"base_output_directory={tmp_path}")
    unseen = READ_KEYS[program] - seen - OF_OTHER_MODELS - OF_OTHER_RUNS - OF_CONFIG
    assert not unseen, program
