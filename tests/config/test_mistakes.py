"""Every user error is one line with its source, the key and the fix."""

import errno
import importlib
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from buffer_mistakes import BUFFER_MISTAKES
from indexer_mistakes import INDEXER_MISTAKES
from member_mistakes import MEMBER_MISTAKES
from mtp_mistakes import MTP_MISTAKES
from rollout_mistakes import ROLLOUT_MISTAKES
from rope_mistakes import ROPE_MISTAKES
from tuning_mistakes import TUNING_MISTAKES

from maxlite.config import load_config, main_config
from maxlite.config.help_text import own_keys
from maxlite.config.schema import ENTRIES, KEYS, SECTIONS
from maxlite.config.yaml_files import CONFIGS
from maxlite.errors import UserError, exit_on_user_error

ROOT = Path(__file__).resolve().parents[2]
DETERMINISTIC = (
  "deterministic_reductions=true",
  "gradient_accumulation_steps=8",
  "global_batch_size=16",
)
GROUPED = "router=group_limited_greedy"
# Arguments -> what the line must contain: the source, the key with its value, the fix.
MISTAKES = (
  {
    ("ici_fsdp_paralelism=2",): ("command line", "ici_fsdp_paralelism=2", "ici_fsdp_parallelism?"),
    ("--ici_fsdp_paralelism=2",): ("--ici_fsdp_paralelism", "ici_fsdp_parallelism?"),
    ("--noscan_layer",): ("--noscan_layer", "scan_layers?"),
    ("members=[{remat_save: x}]",): ("members[0]: remat_save=x", "remat_saved_names?"),
    ("qqqqqq=1",): ("command line", "qqqqqq=1", "--help"),
    ("step",): ("command line", "step", "steps?"),
    ("steps =3",): ("command line: steps =3 has a space before =; write steps=3",),
    ("--steps =3",): ("command line: --steps =3 has a space before =; write --steps=3",),
    ("steps",): ("steps has no value; write steps=VALUE, without spaces around =",),
    ("steps=", "3"): ("command line: steps= 3 has a space after =; write steps=3",),
    ("=3",): ("=3 has no key; write KEY=3",),
    ("--flagfile=gone.txt",): ("--flagfile=gone.txt cannot be read: No such file", "--key=value"),
    ("--flagfile",): ("--flagfile has no value; write --flagfile=FILE",),
    ("--steps",): ("command line", "--steps", "--key=value"),
    ("base_config=a.yml",): ("command line", "base_config=a.yml", "name the file itself"),
    ("steps=3.5",): ("command line", "steps=3.5", "a whole number", "steps=3"),
    ("--steps=true",): ("--steps", "steps=true", "a whole number", "steps=4"),
    ("steps=0",): ("command line", "steps=0", "below 1", "steps=1"),
    ("steps=3000000000",): ("command line", "steps=3000000000", "steps=2147483647"),
    ("warmup_steps_fraction=2",): ("warmup_steps_fraction=2", "above 1", "warmup_steps_fraction=1"),
    ("learning_rate=nan",): ("learning_rate=nan", "a finite number", "learning_rate=0.5"),
    ("learning_rate=1e-3x",): ("is not a finite number", "learning_rate=1e-3"),
    ("steps=1e-1",): ("is not a whole number", "steps=1"),
    ("learning_rate=fast",): ("learning_rate=fast", "a finite number", "learning_rate=0.5"),
    ("scan_layers=1",): ("scan_layers=1", "true or false", "scan_layers=true"),
    ("dtype=float8",): ("dtype=float8", "float32, bfloat16", "float32?"),
    ("remat_saved_names=[query_prj]",): ("remat_saved_names=[query_prj]", "query_proj?"),
    ("audit_period=10", "diloco_sync_period=4"): ("write audit_period=0, or diloco_sync_period=0",),
    ("audit_period=10", *DETERMINISTIC): ("or deterministic_reductions=false",),
    ("ragged_buffer_factor=1.5", "audit_period=10"): ("ragged_overflow=drop",),
    (*DETERMINISTIC, "ici_tensor_parallelism=2"): ("write ici_tensor_parallelism=1",),
    (*DETERMINISTIC, "diloco_sync_period=4"): ("write diloco_sync_period=0",),
    (*DETERMINISTIC, "global_batch_size=0"): ("write global_batch_size=N",),
    (*DETERMINISTIC, "gradient_accumulation_steps=1"): ("gradient_accumulation_steps=8",),
    (*DETERMINISTIC, "compiler_options={xla_disable_hlo_passes: dce}"): (
      "compiler_options={xla_disable_hlo_passes: dce} with deterministic_reductions=true",
      "remove it from the options",
    ),
    ("dataset_path=a,,b",): ("dataset_path=a,,b", "a list of text", "[a, b]"),
    ("logical_axis_rules=[embed]",): ("logical_axis_rules=[embed]", "[[embed, [fsdp]]]"),
    ("logical_axis_rules=[[embed, [fsdb]]]",): ("logical_axis_rules=", "fsdb", "fsdp?"),
    ("logical_axis_rules=[[embed, [fsdp, fsdp]]]",): ("logical_axis_rules=", "once"),
    ("dataset_mixture=[{name: a, path: stdlib, weight: 1}]", "eval_dataset_path=stdlib"): (
      "eval_dataset_path=[stdlib]",
      "write eval_path",
    ),
    ("dataset_mixture=[{name: a, path: nothing.txt, weight: 1}]",): (
      "a: path=[nothing.txt]",
      "write path=FILE",
    ),
    ("dataset_mixture=[{name: a, weight: 1, dataset_path: x}]",): ("dataset_path=x", "mean path?"),
    ("dataset_mixture=[{name: a, weight: 1, path: x, steps: 3}]",): (
      "dataset_mixture[0]: a: steps=3 applies to the whole run",
      "outside of dataset_mixture",
    ),
    ("phases=[{name: a, train: x, until: {metric: loss, max_steps: 9, patienc: 3}}]",): (
      "phases[0]: patienc=3 is not a key of until",
      "did you mean patience?",
    ),
    ("phases=[{name: a, train: x, until: 3}]",): ("phases[0]: until=3", "a mapping"),
    ("data_columns={message: talk}",): ("data_columns={message: talk}", "did you mean messages?"),
    ("data_columns={messages: [a]}",): (
      "messages needs one column",
      "data_columns={messages: NAME}",
    ),
    ("data_columns={prompt: a, completion: a}",): ("two fields have one column",),
    ("dataset_mixture=[{name: a, path: x, weight: 1, type: jsonl, columns: {messages: b}}]",): (
      "dataset_mixture[0]: a has columns, which type=jsonl does not read",
    ),
    ("batch_size_schedule=[[0, 8, 1]]",): ("a list of [number, number]", "[[0, 8], [1000, 16]]"),
    ("batch_size_schedule=[[1, 8]]",): ("batch_size_schedule=[[1, 8]]", "ascend from 0"),
    ("batch_size_schedule=[[0, 8], [4, 8], [2, 16]]",): ("ascend from 0",),
    ("batch_size_schedule=[[0, 0]]",): ("a step needs tokens", "1 or more"),
    ("batch_size_schedule=[[0, 8]]", "global_batch_size=8"): ("write global_batch_size=0",),
    (
      "sequence_length_schedule=[[0, 2]]",
      "context_parallel_strategy=ring",
      "ici_context_parallelism=2",
    ): (
      "sequence_length_schedule=[[0, 2]]",
      "write multiples of 4",
    ),
    ("sequence_length_schedule=[[0, 100]]",): ("max_target_length=256", "write 64"),
    ("sequence_length_schedule=[[0, 64]]", "sweep={grid: {learning_rate: [1, 2]}}"): (
      "batches must have one shape",
      "write sequence_length_schedule=[]",
    ),
    ("model_name=mixtrall",): ("command line", "model_name=mixtrall", "configs/models"),
    ("nothing.yml",): ("command line", "nothing.yml", "an existing YAML file"),
    ("run_name=a/b",): ("run_name=a/b", "one folder", "run_name=NAME"),
    ("run_name=..",): ("run_name=..", "one folder", "run_name=NAME"),
    ("run_name=",): ("run_name=''", "one folder", "run_name=NAME"),
    ("profiler=xplane", "steps=7"): (
      "profiler=xplane",
      "skip_first_n_steps_for_profiler",
      "steps=8",
    ),
    ("base_num_query_heads=6",): ("base_num_kv_heads=4 (default)", "base_num_kv_heads=3"),
    ("context_parallel_strategy=ring", "ici_context_parallelism=2", "attention=splash"): (
      "attention=splash",
      "cannot merge",
      "attention=chunked",
    ),
    ("context_parallel_strategy=ring", "ici_context_parallelism=4", "max_target_length=100"): (
      "max_target_length=100",
      "even",
      "max_target_length=104",
    ),
    ("context_parallel_strategy=ulysses", "ici_context_parallelism=16", "max_target_length=160"): (
      "base_num_query_heads=8",
      "do not divide",
      "context_parallel_strategy=ring",
    ),
    ("head_dim=33",): ("head_dim=33", "even", "head_dim=34"),
    ("num_experts=1",): ("num_experts=1", "decoder_block=llama"),
    ("lora_experts=true",): ("lora_rank=0 (default)", "write lora_rank=8"),
    ("lora_experts=true", "lora_rank=2", "decoder_block=llama"): ("write lora_experts=false",),
    ("num_experts=4", "--num_experts_per_tok=5"): (
      "--num_experts_per_tok",
      "num_experts_per_tok=4",
    ),
    ("first_num_dense_layers=4",): ("first_num_dense_layers=4", "first_num_dense_layers=3"),
    ("mlp_only_layers=[1,0]",): ("mlp_only_layers=[1, 0]", "from 0 to 3, in order"),
    ("mlp_only_layers=[4]",): ("mlp_only_layers=[4]", "from 0 to 3, in order"),
    ("mlp_only_layers=[0,1,2,3]",): ("mlp_only_layers=[0, 1, 2, 3]", "leaves no MoE layer"),
    ("mlp_only_layers=[0]",): ("mlp_only_layers=[0]", "write first_num_dense_layers=1 interleave"),
    ("mlp_only_layers=[2]", "first_num_dense_layers=1"): (
      "mlp_only_layers=[2]",
      "write first_num_dense_layers=0",
    ),
    ("first_num_dense_layers=1", "decoder_block=qwen3_next"): (
      "first_num_dense_layers=1",
      "mlp_only_layers lists the dense layers",
    ),
    ("mlp_only_layers=[1]", "decoder_block=gemma4_moe", "sliding_window_size=8"): (
      "decoder_block=gemma4_moe",
      "write mlp_only_layers=[]",
    ),
    ("decoder_block=smollm3", "global_layers=[2,1]"): (
      "global_layers=[2, 1]",
      "from 0 to 3, in order",
    ),
    ("decoder_block=llama", "global_layers=[1]"): (
      "decoder_block=llama",
      "write global_layers=[]",
    ),
    ("decoder_block=falcon_h1", "ssm_multipliers=[1,2]"): (
      "ssm_multipliers=[1.0, 2.0]",
      "has 2 numbers, but 5",
    ),
    ("decoder_block=nemotron_h", "hybrid_override_pattern=M-"): (
      "hybrid_override_pattern=M-",
      "each of the 4 layers",
      "hybrid_override_pattern='M-M-'",
    ),
    ("decoder_block=nemotron_h", "hybrid_override_pattern=MEM-"): ("letters are M * -",),
    ("decoder_block=nemotron_h_moe", "hybrid_override_pattern=M-M*"): (
      "leaves no MoE layer",
      "decoder_block=nemotron_h",
    ),
    ("decoder_block=nemotron_h_moe", "hybrid_override_pattern=MEM*", "mlp_only_layers=[1]"): (
      "mlp_only_layers=[1]",
      "write mlp_only_layers=[]",
    ),
    ("decoder_block=nemotron_h", "hybrid_override_pattern=M-M-", "mtp_num_layers=1"): (
      "write mtp_num_layers=0",
    ),
    ("first_num_dense_layers=1", "interleave_moe_layer_step=2"): (
      "interleave_moe_layer_step=2",
      "the 3 other layers",
      "interleave_moe_layer_step=1",
    ),
    (GROUPED, "n_routing_groups=3"): ("n_routing_groups=3", "n_routing_groups=2"),
    (GROUPED, "n_routing_groups=4", "topk_routing_group=5"): ("topk_routing_group=4",),
    (GROUPED, "n_routing_groups=8", "topk_routing_group=1"): (
      "num_experts_per_tok=2 (default)",
      "hold 1 experts",
      "num_experts_per_tok=1",
      "larger topk_routing_group",
    ),
    ("norm_topk_prob=false",): ("router=softmax_topk (default)", "router=topk_softmax"),
    ("n_routing_groups=2",): ("router=softmax_topk (default)", "router=group_limited_greedy"),
    ("capacity_factor=0", "sparse_matmul=false"): ("capacity_factor=0.0", "capacity_factor=1.25"),
    ("capacity_factor=1.5",): ("sparse_matmul=true (default)", "sparse_matmul=false"),
    ("use_ring_of_experts=true", "sparse_matmul=false"): ("sparse_matmul=true",),
    ("grouped_matmul=megablox", "megablox=false"): ("megablox=true", "grouped_matmul=auto"),
    ("grouped_matmul=tiled", "sparse_matmul=false"): ("sparse_matmul=true", "grouped_matmul=auto"),
    ("wi_tile_drhs=512,1024",): ("wi_tile_drhs=[512, 1024]", "wi_tile_drhs=[512, 1024, 1024]"),
    ("partial_rotary_factor=0.1",): ("partial_rotary_factor=0.1", "head_dim=32", "write 1"),
    ("partial_rotary_factor=0.5", "decoder_block=deepseek"): ("latent attention", "write 1"),
    ("rope_truncate=false",): ("only read by yarn", "rope_truncate=true"),
    ("rope_type=linear", "rope_factor=1"): ("rope_factor=1.0", "rope_type=default"),
    ("trainable_position_size=8",): ("decoder_block=mixtral", "trainable_position_size=0"),
    ("decoder_block=llama4", "num_experts_per_tok=1", "norm_topk_prob=false"): (
      "sliding_window_size=0",
      "write sliding_window_size=8192",
    ),
    ("decoder_block=llama4", "sliding_window_size=8"): ("num_experts_per_tok=2", "write num_exp"),
    ("decoder_block=llama4", "sliding_window_size=8", "num_experts_per_tok=1"): (
      "norm_topk_prob=true",
      "write norm_topk_prob=false",
    ),
    ("mlp_activations=[xielu]",): ("decoder_block=mixtral", "only supported in dense MLPs"),
    ("decoder_block=llama", "mlp_activations=[xielu, linear]"): ("mlp_activations=", "dense MLPs"),
    ("decoder_block=gpt2",): ("trainable_position_size=0", "write trainable_position_size="),
    ("decoder_block=opt", "trainable_position_size=64", "max_target_length=128"): (
      "longer rows have positions without an embedding",
      "write max_target_length=64",
    ),
    ("decoder_block=falcon_alibi", "base_num_kv_heads=1"): ("write base_num_kv_heads=8",),
    ("decoder_block=falcon_alibi", "base_num_kv_heads=8", "rope_type=linear"): (
      "no rotary embedding",
      "write rope_type=default",
    ),
    ("decoder_block=phi", "mtp_num_layers=1"): ("have a bias", "write mtp_num_layers=0"),
    ("decoder_block=phi", "num_draft_heads=1"): ("have a bias", "write num_draft_heads=0"),
    ("decoder_block=phi", "logits_scaling=2"): ("have a bias", "write logits_scaling=1"),
    ("local_rope_max_timescale=10",): ("decoder_block=mixtral", "local_rope_max_timescale=0"),
    ("decoder_block=deepseek", "sliding_window_size=4"): ("latent", "sliding_window_size=0"),
    ("decoder_block=gpt_oss", "attention=dot_product"): ("sinks", "attention=chunked"),
    ("attn_logits_soft_cap=2", "attention=dot_product"): ("soft cap", "attention=chunked"),
    ("decoder_block=gpt_oss", "attention=tokamax"): ("sinks", "attention=chunked"),
    ("attention=tokamax", "dtype=float32"): ("float32", "dtype=bfloat16"),
    ("mlp_activations=[linear_plus_one]",): ("one activation", "mlp_activations=[silu, linear]"),
    ("rope_type=yarn", "rope_factor=1"): ("rope_factor=1.0", "rope_type=default"),
    ("rope_type=yarn", "rope_max_timescale=1"): ("rope_max_timescale=10000",),
    ("decoder_block=deepseek", "qk_rope_head_dim=7"): ("qk_rope_head_dim=7", "qk_rope_head_dim=8"),
    ("decoder_block=olmoe", "num_experts=1"): ("num_experts=1", "decoder_block=llama"),
    ("compile_topology_num_slices=2",): ("compile_topology=''", "compile_topology=v5p-64"),
    ("gpu_target_config=gone.txt",): ("gpu_target_config=gone.txt", "gpu_target_config=FILE"),
    ("mlp_activations=linear",): ("mlp_activations=[linear]", "mlp_activations=[silu, linear]"),
    ("mlp_activations=silu,gelu",): ("mlp_activations=[silu, gelu]", "[silu, linear]"),
    ("mlp_activations=",): ("mlp_activations=[]", "mlp_activations=[silu, linear]"),
    ("remat_policy=custom",): (
      "remat_saved_names=[]",
      "remat_policy=custom",
      "remat_saved_names=[query_proj]",
    ),
    ("remat_saved_names=mlpwi",): ("remat_saved_names=[mlpwi]", "remat_policy=custom"),
    ("vocab_size=257",): ("vocab_size=257", "tokenizer_type=byte", "vocab_size=258"),
    (f"tokenizer_path={__file__}",): ("tokenizer_path=", "tokenizer_type=huggingface"),
    ("tokenizer_path=t.json",): ("tokenizer_path=t.json", "no such file", "tokenizer_path=FILE"),
    ("tokenizer_path=gpt2",): ("no such file", "tokenizer_path=hf://OWNER/gpt2/tokenizer.json"),
    ("tokenizer_type=huggingface", "tokenizer_path=me/m"): ("hf://me/m/tokenizer.json",),
    ("tokenizer_type=huggingface",): ("tokenizer_path=''", "tokenizer_path=FILE"),
    ("dataset_path=none/*.txt",): ("dataset_path=[none/*.txt]", "no file", "dataset_path=FILE"),
    ("dataset_path=",): ("dataset_path=[]", "[stdlib]"),
    ("dataset_type=jsonl",): ("dataset_path=[stdlib]", "dataset_type=jsonl", "dataset_path=FILE"),
    ("dataset_type=jsonl", "text_column="): ("text_column=''", "text_column=text"),
    ("dataset_type=chat", "tokenizer_type=sentencepiece", f"tokenizer_path={__file__}"): (
      "tokenizer_type=sentencepiece",
      "tokenizer_type=huggingface",
    ),
    ("dataset_type=chat",): ("dataset_type=chat", "tokenizer_type=byte", "chat_template_path="),
    ("dataset_path=data/*.parquet",): ("matches no file",),
    ("dataset_path=hf://datasets/a/b/x.parquet",): ("another type", "write dataset_type=parquet"),
    ("dataset_type=parquet", "dataset_path=s3://b/x.jsonl.gz"): ("write dataset_type=jsonl",),
    ("chat_template_path=gone.jinja",): ("gone.jinja", "no such file", "chat_template_path=FILE"),
    ("packing=false",): ("packing=false", "dataset_type=text (default)", "packing=true"),
    ("eval_dataset_path=no.txt",): ("eval_dataset_path=[no.txt]", "eval_dataset_path=FILE"),
    ("max_new_tokens=0",): ("max_new_tokens=0", "max_new_tokens=-1"),
    ("decode_sampling_nucleus_p=0",): ("keeps no token", "decode_sampling_nucleus_p=0.95"),
    ("decode_sampling_repetition_penalty=0",): ("decode_sampling_repetition_penalty=1",),
    ("eval_steps=0",): ("eval_steps=0", "eval_steps=-1"),
    ("per_device_batch_size=0",): ("per_device_batch_size=0.0", "per_device_batch_size=1"),
    ("learning_rate_schedule_steps=0",): ("learning_rate_schedule_steps=0", "=-1"),
    ("lr_schedule_type=wsd", "warmup_steps_fraction=0.95"): ("wsd_decay_steps_fraction=0.05",),
    ("adam_b2=1",): ("adam_b2=1.0", "adam_b2=0.95"),
    ("adam_eps=0",): ("adam_eps=0.0", "adam_eps=1e-08"),
    ("ici_data_parallelism=-1",): ("ici_fsdp_parallelism=-1 (default)", "ici_fsdp_parallelism=1"),
    ("dcn_expert_parallelism=0",): ("dcn_expert_parallelism=0", "dcn_expert_parallelism=1"),
    ("ici_tensor_parallelism=3",): ("ici_tensor_parallelism=3", "base_num_query_heads=8", "make 2"),
    ("ici_tensor_parallelism=8",): ("ici_tensor_parallelism=8", "base_num_kv_heads=4", "make 4"),
    ("ici_tensor_parallelism=2", "vocab_size=321"): ("vocab_size=321", "make 1"),
    ("ici_expert_parallelism=16",): ("ici_expert_parallelism=16", "num_experts=8", "make 8"),
    ("model_name=deepseek2-tiny", "ici_expert_parallelism=32"): ("num_experts=16", "make 16"),
    ("model_name=deepseek2-tiny", "ici_fsdp_parallelism=128"): ("kv_lora_rank=64", "make 64"),
    ("first_num_dense_layers=1", "base_mlp_dim=5", "ici_tensor_parallelism=2"): ("base_mlp_dim=5",),
    ("ici_fsdp_parallelism=3",): ("ici_fsdp_parallelism=3", "base_emb_dim=256", "make 2"),
    ("ici_context_parallelism=2", "max_target_length=33"): ("max_target_length=33", "make 1"),
    ("data_sampling=bootstrap", "enable_data_shuffling=false"): ("enable_data_shuffling=true",),
    ("members=[{}]", "ensemble_data=independent", "enable_data_shuffling=false"): (
      "ensemble_data=independent",
      "enable_data_shuffling=true",
    ),
    ("ensemble_strategy=fused",): ("ensemble_strategy=fused", "members or sweep", "=auto"),
    ("ensemble_memory_gb=2",): ("ensemble_memory_gb=2.0", "members or sweep", "=0.0"),
    ("members=[{}]", "ensemble_strategy=fused", "ensemble_executor=ray"): (
      "ensemble_executor=ray",
      "ensemble_strategy=processes",
    ),
    ("members=[{}]", "ensemble_strategy=fused", "ensemble_num_workers=2"): (
      "ensemble_num_workers=2",
      "ensemble_strategy=processes",
    ),
    ("members=[{}]", "ensemble_strategy=switched", "num_processes=2"): (
      "ensemble_strategy=switched",
      "num_processes=1",
    ),
    ("members=[{}]", "ensemble_strategy=padded", "num_processes=2"): (
      "ensemble_strategy=padded",
      "ensemble_strategy=stacked or fused",
      "num_processes=1",
    ),
    ("quantization=int8", "sparse_matmul=false", "decoder_block=mixtral"): (
      "quantization=int8",
      "sparse_matmul=true",
    ),
    ("members=[{}]", "optimizer_memory_host_offload=true"): (
      "optimizer_memory_host_offload=true",
      "members=",
      "write false",
    ),
    ("members=[{}]", "asha_reduction_factor=1"): (
      "asha_reduction_factor=1",
      "asha_reduction_factor=2",
    ),
    ("members=[{}]", "asha_reduction_factor=2", "steps=100"): (
      "asha_min_steps=100 (default)",
      "asha_min_steps=25",
    ),
    ("local_checkpoint_directory=/dev/shm/x", "enable_checkpointing=false"): (
      "local_checkpoint_directory=/dev/shm/x",
      "enable_checkpointing=true",
    ),
    ("local_checkpoint_directory=/dev/shm/x", "local_checkpoint_period=100"): (
      "checkpoint_period=100 (default)",
      "local_checkpoint_period=10",
    ),
    ("local_checkpoint_directory=/dev/shm/x", "checkpoint_period=1"): (
      "a shared one is saved at every step; write local_checkpoint_directory=",
    ),
    ("local_checkpoint_replication=true",): ("local_checkpoint_directory=/dev/shm/maxlite",),
    ("metrics_host=0.0.0.0",): (
      "metrics_host=0.0.0.0",
      "metrics_port=0",
      "write metrics_port=9100",
    ),
    ("local_checkpoint_directory=/dev/shm/x", "members=[{}]"): (
      "an ensemble has no local checkpoints",
    ),
  }
  | BUFFER_MISTAKES
  | MEMBER_MISTAKES
  | TUNING_MISTAKES
  | INDEXER_MISTAKES
  | MTP_MISTAKES
  | ROLLOUT_MISTAKES
  | ROPE_MISTAKES
)
BAD_FILES = {
  "stepz: 3": ("bad.yml:1: stepz=3", "steps?"),
  "dtype: float32\nsteps: 3.5": ("bad.yml:2: steps=3.5", "a whole number", "steps=3"),
  "steps: 1\nsteps: 2": ("bad.yml:2: steps", "bad.yml:1", "remove one"),
  "steps:": ("bad.yml:1: steps", "no value", "remove the line"),
  "run_name: [a, b]": ("bad.yml:1: run_name=[a, b]", "text"),
  "model: {steps: 1}": ("bad.yml:1: model", "mapping", "keys are flat", "key: value"),
  "steps:\n  train: 1": ("bad.yml:1: steps={train: 1}", "keys are flat", "key: value"),
  "base_config: [a.yml]": ("bad.yml:1: base_config=[a.yml]", "base_config: FILE.yml"),
  "members:\n- name: a\n  name: b": ("bad.yml:1: members", "name twice", "remove one"),
  "members:\n- {head_dim: 8}\n- {heads: }": ("bad.yml:1: members", "heads has no value"),
  "members:\n- [a]: b": ("bad.yml:1: members", "[a] for a key", "key: value"),
  "members:\n- {head_dim: 8}\n- {head_dims: 4}": (
    "members[1] (",
    "bad.yml:3): head_dims=4",
    "head_dim?",
  ),
  "sweep:\n  grid:\n    stepz: [1, 2]": ("sweep.grid (", "bad.yml:2): stepz=", "steps?"),
  "- steps": ("bad.yml:1", "mapping", "key: value"),
  "dtype: float32\nsteps: ]": ("bad.yml:2", "bad YAML", "key: value"),
  "base_config: gone.yml": ("bad.yml:1: base_config", "gone.yml", "an existing YAML file"),
  "base_config: bad.yml": ("bad.yml:1: base_config=bad.yml", "cycle", "remove one"),
  "num_experts: 1": ("bad.yml:1: num_experts=1", "decoder_block=llama"),
}


def _line_of(capsys, argv) -> str:
  with pytest.raises(SystemExit) as stop:
    main_config(argv, "maxlite.train")
  assert stop.value.code == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert err.count("\n") == 1
  assert err.endswith("\n")
  return err


@pytest.mark.parametrize("argv", MISTAKES, ids=" ".join)
def test_command_line_errors_have_source_key_and_fix(argv, capsys):
  line = _line_of(capsys, argv)
  assert all(part in line for part in MISTAKES[argv]), line


@pytest.mark.parametrize("text", BAD_FILES)
def test_file_errors_have_line_key_and_fix(text, capsys, tmp_path):
  file = tmp_path / "bad.yml"
  file.write_text(text)
  line = _line_of(capsys, [str(file)])
  assert all(part in line for part in BAD_FILES[text]), line


LAUGHS = "".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
# Values that attack the parser -> what the line must contain.
EXTREMES = {
  "members: " + "[" * 20_000 + "]" * 20_000: "bad.yml:1: bad YAML, nested deeper than 32 levels",
  "sweep: " + "{a: " * 2000 + "1" + "}" * 2000: "nested deeper than 32 levels",
  "members: &a [*a]": "nested deeper than 32 levels",
  "sweep: &a {grid: *a}": "nested deeper than 32 levels",
  f"members:\n- &a0 x\n{LAUGHS}": "more than 100000 values",
  "steps: " + "9" * 5000: "9... (5006 characters) is not a whole number",
  "steps: 1" + "0" * 400: "... (407 characters) is above 2147483647",
  'base_output_directory: "a\\0b"': "has a NUL character; write another path",
  'dataset_path: ["a\\0b"]': "has a NUL character; write another path",
  'base_config: "a\\0b"': "is not a file name; write base_config: FILE.yml",
  "tokenizer_path: " + "a" * 256: "is too long (255 bytes per name, 4096 in all)",
  "base_output_directory: " + "/abc" * 1500: "is too long (255 bytes per name, 4096 in all)",
  "base_output_directory: ~nosuchuser/x": "there is no user nosuchuser",
  "run_name: " + "ä" * 150: "write run_name=NAME of up to 255 bytes",
  f"sweep: {{grid: {{head_dim: {[*range(150)]}, steps: {[*range(150)]}}}}}": "22500 members",
  "sweep: {draw: {head_dim: {choice: [8]}}, num_members: 1000000000}": "is above 4096",
  f"members: [{'{}, ' * 100}]\nsweep: {{grid: {{head_dim: {[*range(100)]}}}}}": "10000 members",
  "base_num_query_heads: 2147483647\nbase_num_kv_heads: 2147483646": "base_num_kv_heads=1",
}


@pytest.mark.parametrize("text", EXTREMES, ids=range(len(EXTREMES)))
def test_extreme_values_are_errors_in_bounded_time(text, capsys, tmp_path):
  file = tmp_path / "bad.yml"
  file.write_text(text)
  start = time.process_time()
  line = _line_of(capsys, [str(file)])
  assert time.process_time() - start < 2  # [s]
  assert EXTREMES[text] in line, line
  assert len(line) < 2000


def test_aliases_stand_for_the_values_they_name(tmp_path):
  file = tmp_path / "good.yml"
  file.write_text(
    "members:\n- {name: a, mlp_activations: &act [gelu]}\n"
    "- {name: b, mlp_activations: *act, head_dim: 8}\n"
  )
  assert [m["mlp_activations"] for m in load_config([str(file)]).ensemble.members] == [
    ("gelu",)
  ] * 2


@pytest.mark.slow
def test_nested_brackets_of_an_argument_are_an_error(capsys):
  assert "is not a list of {key: value}" in _line_of(capsys, ["members=" + "[" * 2000 + "]" * 2000])


def test_misspelt_file_gets_suggestion(capsys, tmp_path):
  (tmp_path / "tiny.yml").write_text("")
  assert "did you mean tiny.yml?" in _line_of(capsys, [str(tmp_path / "tny.yml")])


def test_the_template_that_is_offered_exists_outside_of_a_clone(capsys, tmp_path, monkeypatch):
  (tmp_path / "talks.jsonl").touch()
  monkeypatch.chdir(tmp_path)
  line = _line_of(capsys, ["dataset_type=chat", "dataset_path=talks.jsonl"])
  assert Path(line.split("write chat_template_path=")[1].strip()).is_file()


def test_binary_file_is_an_error(capsys, tmp_path):
  (tmp_path / "bad.yml").write_bytes(b"steps: \xff\x00")
  assert "UTF-8" in _line_of(capsys, [str(tmp_path / "bad.yml")])


SHARED_KEY = ("members=[{}, {vocab_size: 512}]",)
BACKEND = ("attention=tokamax", "dtype=float32")  # its entry says which types it supports


def test_paths_of_another_folder_are_answered_by_the_right_one(capsys, tmp_path, monkeypatch):
  base = str(CONFIGS / "base.yml")
  template = "chat_template_path=configs/chat/plain.jinja"
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "tokenizer.json").touch()
  monkeypatch.chdir(tmp_path)
  line = _line_of(capsys, [base, template])
  assert f"no such file in this folder; write chat_template_path={CONFIGS}/chat/plain.jinja" in line
  line = _line_of(capsys, [base, "dataset_type=chat", f"dataset_path={base}"])
  assert f"write chat_template_path={CONFIGS}/chat/plain.jinja" in line
  line = _line_of(capsys, [base, "tokenizer_path=model"])
  fix = "write tokenizer_type=huggingface tokenizer_path=model/tokenizer.json"
  assert f"is a folder; {fix}" in line


@pytest.mark.parametrize("argv", [*list(MISTAKES)[:4], SHARED_KEY, BACKEND], ids=" ".join)
def test_program_exits_with_2_within_a_second_without_jax(argv):
  command = [sys.executable, "-X", "importtime", "-m", "maxlite.train", *argv]
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  messages = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
  modules = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
  assert done.returncode == 2
  assert len(messages) == 1
  assert all(part in messages[0] for part in MISTAKES[argv])
  assert modules.isdisjoint({"jax", "flax", "numpy"})
  assert after.ru_utime - before.ru_utime < 1  # [s] of CPU time: the machine may be busy


def test_help_lists_every_key(capsys):
  with pytest.raises(SystemExit) as stop:
    main_config(["--help=all"], "maxlite.train")
  out, err = capsys.readouterr()
  assert stop.value.code == 0
  assert err == ""
  assert all(f"--{name}:" in out or f"--[no]{name}:" in out for name in KEYS)


@pytest.mark.parametrize(
  ("program", "argument", "own", "other"),
  [
    ("train", "--help", "--learning_rate:", "--serve_port:"),
    ("generate", "-h", "--decode_sampling_nucleus_p:", "--learning_rate:"),
    ("serve", "--help=", "--serve_port:", "--learning_rate:"),
    ("plan", "--help", "`estimate` plans from shapes", "--learning_rate:"),
    ("plan", "--help", "`phases` prints the schedule", "--learning_rate:"),
    ("convert", "--help", "--output_path:", "--learning_rate:"),
    ("train", "--helpfull", "--serve_port:", "usage:"),
    ("train", "--helpshort", "--learning_rate:", "--serve_port:"),
    ("train", "--version", "maxlite 0.", "--steps"),
    ("convert", "--version", "jax ", "--steps"),
    ("convert", "--help=steps", "--steps:", "--output_path:"),
    ("train", "--help=scan_layers", "--[no]scan_layers:", "--steps:"),
    ("train", "--help=moe", "--num_experts:", "--steps:"),
  ],
)
def test_help_of_a_command_lists_its_own_keys(program, argument, own, other, capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", [program, argument])
  try:
    code = importlib.import_module(f"maxlite.{program}").main()
  except SystemExit as stop:
    code = stop.code
  out, err = capsys.readouterr()
  assert (code, err) == (0, "")
  assert own in out
  assert other not in out
  if argument in ("--help", "-h", "--helpshort"):
    assert f"python -m maxlite.{program}" in out
    assert "--help=KEY" in out


def test_help_of_an_unknown_topic_is_an_error(capsys):
  line = _line_of(capsys, ["--help=stepz"])
  assert "--help=stepz is not a key or section; did you mean steps?" in line


def test_sections_of_the_help_hold_every_key():
  assert [key for keys in SECTIONS.values() for key in keys] == [*KEYS.values()]


def test_other_exceptions_propagate():
  with pytest.raises(ValueError, match="invalid literal"), exit_on_user_error("maxlite.train"):
    int("bug")


def test_user_error_is_one_line_and_exit_code_2(capsys):
  with pytest.raises(SystemExit) as stop, exit_on_user_error("maxlite.train"):
    raise UserError("steps=0 is below 1;\n  write steps=1")
  assert stop.value.code == 2
  assert capsys.readouterr().err == "maxlite.train: steps=0 is below 1; write steps=1\n"


@pytest.mark.parametrize(
  ("error", "place"),
  [
    (OSError(errno.ENOSPC, "No space left on device", "runs/a/config.yml"), "runs/a/config.yml"),
    (OSError(errno.ENOSPC, "No space left on device"), "a file cannot be written"),
  ],
)
def test_a_full_disk_exits_with_one_line(capsys, error, place):
  with pytest.raises(SystemExit, match="2"), exit_on_user_error("maxlite.train"):
    raise error
  expected = f"maxlite.train: {place}: No space left on device: free space, "
  assert capsys.readouterr().err.startswith(expected)


def test_errors_of_the_program_keep_their_traceback():
  with pytest.raises(FileNotFoundError), exit_on_user_error("maxlite.train"):
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", "a")


@pytest.mark.parametrize("name", ENTRIES)
def test_help_and_the_reference_list_the_keys_of_entries(capsys, name):
  topic = {"until": "phases"}.get(name, name)
  with pytest.raises(SystemExit, match="0"):
    main_config([f"--help={topic}"], "maxlite.train")
  text = capsys.readouterr().out.partition(f"\nKeys of {name}. ")[2]
  page = (ROOT / "docs" / "config.md").read_text("utf-8").partition(f"### Keys of `{name}`\n")[2]
  assert text
  for key in own_keys(ENTRIES[name]):
    assert f"\n  {key.name}: " in text
    assert f"| `{key.name}` |" in page.partition("\n## ")[0]
