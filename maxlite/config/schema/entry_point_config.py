"""Sections that a single entry point reads: generate, serve, plan, audit, convert, data."""

import dataclasses

from maxlite.config.config_field import field, machine_field

DEFAULT_NEW_TOKENS = 200  # the number that max_new_tokens=-1 stands for


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
  """Prompts and sampling in `maxlite.generate`."""

  prompt: str = field(
    "def ",
    "Prompt; empty with use_chat_template: a conversation, whose messages are read line by line "
    "from the terminal.",
  )
  prompt_file: str = machine_field(
    "",
    'Prompts as JSON lines {"prompt": "..."} or {"messages": [...]}, instead of `prompt`; prints '
    "JSON lines.",
  )
  use_chat_template: bool = field(
    False, "A prompt is the message of a user, which the model answers by its chat template."
  )
  max_new_tokens: int = field(
    -1,
    f"Maximum number of generated tokens; -1: {DEFAULT_NEW_TOKENS}, or fewer where the completion "
    "would exceed max_target_length.",
    low=-1,
  )
  decode_sampling_temperature: float = field(0.8, "Softmax temperature; 0: greedy.", low=0)
  decode_sampling_top_k: int = field(0, "Sample from the k most likely tokens; 0: from all.", low=0)
  decode_sampling_nucleus_p: float = field(
    1.0, "Sample from the smallest set with this probability (top-p); 1: from all.", low=0, high=1
  )
  decode_sampling_min_p: float = field(
    0.0, "Minimum probability, relative to the most likely.", low=0, high=1
  )
  decode_sampling_repetition_penalty: float = field(
    1.0, "Divides positive and multiplies negative logits of tokens already in the text.", low=0
  )
  stop: tuple[str, ...] = field((), "Stop strings; the completion ends before the first.")
  decode_sampling_seed: int = field(
    0, "Seed of the sampling; the n-th prompt of prompt_file adds n.", low=0
  )
  decode_batch_size: int = field(8, "Maximum number of sequences decoded at once.", low=1)
  return_expert_ids: bool = field(
    False,
    "JSON lines have `expert_ids`, the experts of every token of prompt and completion that was "
    "read, [tokens, MoE layers, experts per token]: all but the last.",
  )
  num_speculative_tokens: int = field(
    -1,
    "Tokens that draft heads, or the layers of multi-token prediction, propose per step "
    "(speculative decoding), up to one each; 0: none; -1: one each.",
    low=-1,
  )


@dataclasses.dataclass(frozen=True)
class ServeConfig:
  """The servers of `maxlite.serve` and `maxlite.tinker`."""

  serve_host: str = machine_field(
    "127.0.0.1", "Address to bind; by default only this machine has access."
  )
  serve_port: int = machine_field(8000, "Port to bind; 0: any free port.", low=0, high=65535)
  serve_queue_size: int = machine_field(
    32, "Waiting requests; more are rejected with status 429.", low=0
  )
  serve_connections_per_address: int = machine_field(
    64,
    "Connections of one address; more are rejected with status 429. 0: any number, behind a proxy "
    "that limits its clients.",
    low=0,
  )
  serve_api_key: str = machine_field(
    "", "Key that clients must send; empty: that in MAXLITE_SERVE_API_KEY, or none.", secret=True
  )
  max_loras: int = machine_field(
    8, "Adapters that `maxlite.tinker` keeps on the device; others wait in host memory.", low=1
  )
  max_lora_rank: int = machine_field(
    32, "Bound of the ranks of adapters in `maxlite.tinker`; each takes the memory of it.", low=1
  )
  served_model_name: str = machine_field(
    "",
    "Name under which clients of `maxlite.tinker` ask for the base model, such as `Qwen/Qwen3-8B`; "
    "empty: run_name.",
  )


@dataclasses.dataclass(frozen=True)
class PlanConfig:
  """Compilation target of `maxlite.plan`."""

  compile_topology: str = field(
    "",
    "Accelerators to plan for. `v5p-64` is a TPU slice by its number of TensorCores (v4, v5p, "
    "tpu7x: two per chip) or chips (v5e, v6e); `h100-8` is eight GPUs (a100, h100, h200, b200, "
    "gb200). Empty: this machine's devices.",
  )
  compile_topology_num_slices: int = field(1, "Number of such slices.", low=1)
  gpu_target_config: str = machine_field(
    "",
    "GpuTargetConfigProto text file of the GPU to compile for; empty: the figures that XLA "
    "publishes for the GPU of compile_topology.",
  )
  save_hlo: str = machine_field("", "Folder for the compiled program's text; empty: not written.")


AUDIT_DEVICES = ("simulated", "all")


@dataclasses.dataclass(frozen=True)
class AuditConfig:
  """What `maxlite.audit` compares."""

  audit_meshes: int = field(
    6,
    "Meshes of eight simulated devices that it compares with one device, after each axis alone; "
    "the first is of the config's own axes, the others are random. -1: all.",
    low=-1,
  )
  audit_devices: str = field(
    "simulated",
    "`simulated`: a tiny model in float64 on simulated devices; `all`: the model itself, in its "
    "types, on all devices of this machine, compared with float32 on one.",
    choices=AUDIT_DEVICES,
  )
  audit_seed: int = field(0, "Seed of these meshes, and of what else varies on them.", low=0)
  audit_json: str = machine_field(
    "", "File to which the result is written as JSON; empty: not written."
  )


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
  """What `maxlite.data train_tokenizer` trains; also vocab_size and tokenizer_path."""

  tokenizer_special_tokens: tuple[str, ...] = field(
    ("<|endoftext|>",), "Special tokens, such as those of a chat template; the first ids."
  )
  tokenizer_train_bytes: int = field(
    1_000_000_000, "Bytes of text to train on; of more text, a random part.", low=1
  )


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
  """Output of `maxlite.convert`."""

  output_path: str = machine_field(
    "",
    "Folder that to_hf or to_peft writes; name of the run that upcycle creates; file that "
    "maxlite.rollout writes, by default samples.jsonl in the run's folder; folder that "
    "maxlite.data export writes.",
  )


@dataclasses.dataclass(frozen=True)
class InspectConfig:
  """The rows that `maxlite.data inspect` prints."""

  inspect_split: str = field(
    "train",
    "`train`: rows in the order of the run; `eval`: held-out rows in the order of the files.",
    choices=("train", "eval"),
  )
  inspect_first_row: int = field(0, "The first row.", low=0)
  inspect_num_rows: int = field(4, "Their number.", low=1)
