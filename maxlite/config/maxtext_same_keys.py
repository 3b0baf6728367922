"""MaxText's keys that maxlite has under the same name, with their defaults, and MaxText's values.

Only data: see `maxtext_keys.py`.
"""

# Key -> its default in MaxText (src/maxtext/configs/base.yml).
SAME_NAME: dict[str, str] = {
  "run_name": "",
  "base_output_directory": "",
  "model_name": "default",
  "steps": "150001",
  "init_weights_seed": "0",
  "jax_cache_dir": "~/jax_cache",
  "jax_distributed_initialization_timeout": "300",
  "ici_data_parallelism": "1",
  "ici_fsdp_parallelism": "-1",
  "ici_context_parallelism": "1",
  "ici_expert_parallelism": "1",
  "ici_tensor_parallelism": "1",
  "dcn_data_parallelism": "-1",
  "dcn_fsdp_parallelism": "1",
  "dcn_context_parallelism": "1",
  "dcn_expert_parallelism": "1",
  "dcn_tensor_parallelism": "1",
  "logical_axis_rules": "a table",
  "sharding_tolerance": "0.02",
  "optimizer_memory_host_offload": "false",
  "decoder_block": "llama2",
  "vocab_size": "32000",
  "inhomogeneous_layer_cycle_interval": "1",
  "gdn_conv_kernel_dim": "4",
  "gdn_key_head_dim": "128",
  "gdn_value_head_dim": "128",
  "gdn_num_key_heads": "16",
  "gdn_num_value_heads": "32",
  "gdn_chunk_size": "64",
  "global_head_dim": "0",
  "global_num_kv_heads": "0",
  "share_kv_projections": "false",
  "num_kv_shared_layers": "0",
  "use_double_wide_mlp": "false",
  "hidden_size_per_layer_input": "0",
  "base_emb_dim": "2048",
  "base_num_decoder_layers": "16",
  "mtp_num_layers": "0",
  "base_num_query_heads": "16",
  "base_num_kv_heads": "16",
  "head_dim": "128",
  "base_mlp_dim": "7168",
  "mlp_activations": "[silu, linear]",
  "logits_via_embedding": "false",
  "normalization_layer_epsilon": "1e-05",
  "scan_layers": "true",
  "dtype": "bfloat16",
  "weight_dtype": "float32",
  "quantization": "",
  "attention": "autoselected",
  "context_parallel_strategy": "all_gather",
  "sliding_window_size": "0",
  "attn_logits_soft_cap": "0.0",
  "final_logits_soft_cap": "0.0",
  "remat_policy": "full",
  "lora_rank": "0",
  "lora_alpha": "0.0",
  "rope_max_timescale": "10000",
  "partial_rotary_factor": "1.0",
  "rope_type": "default",
  "local_rope_max_timescale": "-1",
  "rope_factor": "40",
  "original_max_position_embeddings": "4096",
  "beta_fast": "32",
  "rope_truncate": "true",
  "mscale": "1.0",
  "q_lora_rank": "0",
  "kv_lora_rank": "512",
  "qk_nope_head_dim": "128",
  "qk_rope_head_dim": "64",
  "v_head_dim": "128",
  "num_experts": "1",
  "num_experts_per_tok": "1",
  "base_moe_mlp_dim": "-1",
  "shared_experts": "0",
  "first_num_dense_layers": "0",
  "interleave_moe_layer_step": "1",
  "mlp_activations_limit": "-1.0",
  "norm_topk_prob": "false",
  "routed_scaling_factor": "1.0",
  "n_routing_groups": "-1",
  "topk_routing_group": "-1",
  "routed_bias": "false",
  "routed_bias_update_rate": "0.0",
  "float32_gate_logits": "false",
  "use_random_routing": "false",
  "load_balance_loss_weight": "0.0",
  "sparse_matmul": "true",
  "capacity_factor": "-1.0",
  "use_ring_of_experts": "false",
  "ragged_buffer_factor": "-1.0",
  "megablox": "true",
  "dataset_type": "tfds",
  "dataset_path": "",
  "eval_split": "validation",
  "tokenizer_type": "sentencepiece",
  "tokenizer_path": "",
  "chat_template_path": "",
  "add_bos": "true",
  "packing": "true",
  "max_target_length": "2048",
  "per_device_batch_size": "12.0",
  "enable_data_shuffling": "true",
  "data_shuffle_seed": "0",
  "grain_worker_count": "1",
  "grain_prefetch_buffer_size": "500",
  "opt_type": "adamw",
  "learning_rate": "3e-05",
  "lr_schedule_type": "cosine",
  "learning_rate_schedule_steps": "-1",
  "warmup_steps_fraction": "0.1",
  "learning_rate_final_fraction": "0.1",
  "wsd_decay_steps_fraction": "0.1",
  "adam_b1": "0.9",
  "adam_b2": "0.95",
  "adam_eps": "1e-08",
  "adam_weight_decay": "0.1",
  "muon_beta": "0.95",
  "gradient_clipping_threshold": "1.0",
  "gradient_accumulation_steps": "1",
  "distill_alpha": "0.5",
  "distill_temperature": "1.0",
  "dpo_beta": "0.1",
  "dpo_label_smoothing": "0.0",
  "z_loss_multiplier": "0.0",
  "mtp_loss_scaling_factor": "0.1",
  "diloco_sync_period": "36",
  "diloco_outer_lr": "0.3",
  "diloco_outer_momentum": "0.9",
  "enable_checkpointing": "true",
  "checkpoint_period": "10000",
  "async_checkpointing": "true",
  "max_num_checkpoints_to_keep": "none",
  "load_parameters_path": "",
  "local_checkpoint_directory": "",
  "local_checkpoint_period": "0",
  "log_period": "100",
  "enable_tensorboard": "true",
  "wandb_project_name": "maxtext",
  "eval_interval": "-1",
  "eval_steps": "-1",
  "profiler": "",
  "skip_first_n_steps_for_profiler": "1",
  "profiler_steps": "5",
  "prompt": "I love to",
  "use_chat_template": "false",
  "decode_sampling_temperature": "1.0",
  "decode_sampling_top_k": "0",
  "decode_sampling_nucleus_p": "-1",
  "compile_topology": "",
  "compile_topology_num_slices": "-1",
}

# What such a key means here, where that differs from MaxText.
OTHER_MEANING: dict[str, str] = {
  "add_bos": "auto: what the tokenizer's files say",
  "adam_weight_decay": "norms and biases do not decay, and every optimizer reads it",
  "chat_template_path": "a Jinja2 file",
  "dataset_path": "files, folders or globs, also on s3://, gs:// and hf://, of any dataset_type",
  "decode_sampling_nucleus_p": "1 is off",
  "decode_sampling_top_k": "combines with decode_sampling_nucleus_p and the temperature",
  "eval_split": "how documents are held out of dataset_path",
  "first_num_dense_layers": "of any MoE family",
  "grain_prefetch_buffer_size": "counts batches",
  "grain_worker_count": "0 reads in threads of this process",
  "inhomogeneous_layer_cycle_interval": "of attention, or of global attention in gemma4",
  "jax_cache_dir": "empty is off",
  "load_parameters_path": "a run folder or a Hugging Face folder",
  "local_checkpoint_directory": "switches local checkpoints on",
  "logical_axis_rules": "rows that replace those of the table, by the name of the logical axis",
  "lora_rank": "switches adapters on; a phase trains only them",
  "max_num_checkpoints_to_keep": "at least 1",
  "model_name": "a preset; all keys of a command override it",
  "mscale": "0 scales the rotated channels, as gpt-oss does",
  "packing": "of conversations; text is always packed",
  "per_device_batch_size": "rows per step; gradient_accumulation_steps divides them",
  "prompt": "tokenized as documents are, with or without bos",
  "remat_policy": "docs/config.md lists the policies",
  "sliding_window_size": "of every layer, or of the local layers of a family that has them",
  "use_chat_template": "of maxlite.generate; dataset_type=chat trains on conversations",
  "vocab_size": "at least that of the tokenizer",
  "wandb_project_name": "switches Weights & Biases on",
}

# Columns of rows that have a dataset_type of their own.
_COLUMNS = {
  "messages": "dataset_type=chat, which reads the column messages",
  "prompt,completion": "dataset_type=chat, which reads the columns prompt and completion",
  "chosen,rejected": "dataset_type=preference, which reads the columns chosen and rejected",
}


def _scale(log2_scale: int) -> str:
  """The sizes of MaxText's `get_individual_scales` for a global_parameter_scale of 2 to a power."""
  layers, rest = divmod(log2_scale, 3)
  heads = 2 ** (layers + (rest > 0))
  width = 2 ** (layers + (rest > 1))
  return (
    f"base_num_query_heads, base_num_kv_heads, base_mlp_dim and base_moe_mlp_dim times {heads}, "
    f"base_emb_dim times {width}, base_num_decoder_layers times {2**layers}"
  )


_SCALES = {str(2**log2_scale): _scale(log2_scale) for log2_scale in range(1, 13)}
_FAMILIES = "no such family; docs/models.md lists the families"
_PRESETS = (
  "no such preset; maxlite.convert from_hf imports folders of the families in docs/models.md"
)

# Key -> {MaxText's value: what to write}.
VALUES: dict[str, dict[str, str]] = {
  "attention": {
    "autoselected": "attention=auto",
    "cudnn_flash_jax": "attention=cudnn",
    "cudnn_flash_te": "attention=cudnn",
    "flash": "attention=auto, which selects splash on TPU and a flash kernel on GPU",
  },
  "base_moe_mlp_dim": {"-1": "base_moe_mlp_dim=N, the width of one expert"},
  "compile_topology_num_slices": {"-1": "compile_topology_num_slices=1"},
  "dataset_type": {
    "grain": "dataset_type=array_record, parquet or arrow, and dataset_path=FILES",
    "hf": "dataset_type={rows} dataset_path={hub}",
    "tfds": "dataset_type=array_record dataset_path=FOLDER/*.array_record*, written by TFDS with "
    "file_format=array_record",
    "c4_mlperf": "dataset_type=array_record dataset_path=FOLDER/*.array_record*",
  },
  "decode_sampling_nucleus_p": {"-1": "decode_sampling_nucleus_p=1"},
  "decode_sampling_strategy": {
    "greedy": "decode_sampling_temperature=0",
    "weighted": "decode_sampling_temperature=1",
    "nucleus": "decode_sampling_nucleus_p=0.95",
    "topk": "decode_sampling_top_k=40",
    "composite": "decode_sampling_top_k=40 decode_sampling_nucleus_p=0.95",
  },
  "decoder_block": {
    "default": "decoder_block=llama",
    "gemma4_small": "decoder_block=gemma4",
    "llama2": "decoder_block=llama",
    "mistral": "decoder_block=llama, and sliding_window_size=N if the model has a window",
  },
  "eval_split": {
    "test": "eval_dataset_path=FILES of that split, or omit it to hold out eval_fraction",
    "train": "eval_dataset_path=FILES of that split, or omit it to hold out eval_fraction",
    "validation": "eval_dataset_path=FILES of that split, or omit it to hold out eval_fraction",
  },
  "eval_data_columns": _COLUMNS,
  "global_parameter_scale": _SCALES,
  "grain_file_type": {"arrayrecord": "dataset_type=array_record"},
  "grain_packing_type": {
    "concat_then_split": "packing_strategy=concatenate",
    "first_fit": "packing_strategy=best_fit",
  },
  "local_checkpoint_period": {"0": "local_checkpoint_directory= for none"},
  "local_rope_max_timescale": {"-1": "local_rope_max_timescale=0"},
  "max_num_checkpoints_to_keep": {"None": "max_num_checkpoints_to_keep=N; N=1000000 keeps all"},
  "mlp_activations_limit": {"-1": "mlp_activations_limit=0"},
  "model_name": {
    "default": "model_name= for no preset; decoder_block=llama is dense",
    "llama3.1-8b-Instruct": "model_name=llama3.1-8b, whose layers are the same",
    "llama3.1-70b-Instruct": "model_name=llama3.1-70b, whose layers are the same",
    "llama3.3-70b": "model_name=llama3.1-70b, whose layers are the same",
    "olmo3-7b-pt": "model_name=olmo3-7b, whose layers are the same",
    "qwen3-8b-base": "model_name=qwen3-8b, whose layers are the same",
    "qwen3-30b-a3b-base": "model_name=qwen3-30b-a3b, whose layers are the same",
  },
  "n_routing_groups": {"-1": "n_routing_groups=1"},
  "opt_type": {"adam_pax": "opt_type=adamw"},
  "profiler": {"nsys": "profiler=xplane, or run the command under nsys profile"},
  "quantization": {
    "fp8_full": "quantization=fp8",
    "fp8_gpu": "quantization=fp8",
    "fp8_e4m3": "quantization=fp8",
    "fp8_nanoo": "quantization=fp8",
    "nanoo_fp8": "quantization=fp8",
    "te_fp8_currentscaling": "quantization=fp8",
    "te_fp8_delayedscaling": "quantization=fp8",
  },
  "remat_policy": {
    "minimal_offloaded": "remat_policy=offload",
    "minimal_with_context": "remat_policy=minimal",
    "minimal_flash": "remat_policy=minimal",
    "qkv_proj_offloaded": "remat_policy=custom remat_saved_names=[query_proj, key_proj, "
    "value_proj], which keeps them on the device, or remat_policy=offload",
    "save_dot_except_mlp": "remat_policy=custom "
    "remat_saved_names=[query_proj, key_proj, value_proj, out_proj]",
    "save_dot_except_mlpwi": "remat_policy=custom "
    "remat_saved_names=[query_proj, key_proj, value_proj, out_proj, mlpwo]",
    "save_dot_with_context_except_mlp": "remat_policy=custom "
    "remat_saved_names=[query_proj, key_proj, value_proj, attention_out, out_proj]",
    "save_out_proj": "remat_policy=custom remat_saved_names=[out_proj]",
    "save_qkv_proj": "remat_policy=custom remat_saved_names=[query_proj, key_proj, value_proj]",
  },
  "routed_score_func": {
    "sigmoid": "router=sigmoid_group_topk",
    "softmax": "router=topk_softmax, or router=group_limited_greedy with n_routing_groups",
  },
  "train_data_columns": _COLUMNS,
  "tokenizer_type": {"tiktoken": "tokenizer_type=huggingface tokenizer_path=FOLDER/tokenizer.json"},
  "topk_routing_group": {"-1": "topk_routing_group=1"},
}

# Key -> {why MaxText's values are not supported: the values}.
UNSUPPORTED_VALUES: dict[str, dict[str, str]] = {
  "attention": {
    "serving uses the backends of training; write attention=auto": """
      paged vllm_batched_rpa vllm_rpa
    """
  },
  "context_parallel_strategy": {"ring and ulysses do not combine; write one of them": "usp"},
  "algo": {"there is no ORPO; write loss_type=dpo": "orpo"},
  "dataset_type": {
    "token files of Megatron are not read; write dataset_type=array_record or parquet": (
      "megatron_mmap"
    ),
    "token files of OLMo are not read; write dataset_type=array_record or parquet": "olmo_grain",
  },
  "decoder_block": {
    _FAMILIES: """
      deepseek4 envy gpt3 llama4 qwen3_custom_moe simple simple_mlp
    """
  },
  "dtype": {"types of 16 bits have the range of float32; write dtype=bfloat16": "float16"},
  "grain_file_type": {
    "token files of Megatron are not read; write dataset_type=array_record or parquet": (
      "mmap mmap_npy"
    ),
    "write dataset_type=array_record, parquet, arrow, jsonl or text": "tfrecord",
  },
  "model_name": {
    _PRESETS: """
      deepseek-custom deepseek3-671b-2dfsdp deepseek3-671b-batchsplit deepseek3-test
      deepseek3-tiny deepseek3.2-671b deepseek4-284b deepseek4-tiny envy-switch-base
      envy-switch-large envy-switch-xxl envy-test gemma2-27b gemma3-12b
      gemma3-27b gpt3-175b gpt3-22b gpt3-52k gpt3-6b
      llama2-13b llama2-70b llama3-70b
      llama4-17b-128e llama4-17b-16e mixtral-8x22b
      qwen2.5-1.5b qwen2.5-14b qwen3-1.7b qwen3-1.7b-base qwen3-14b qwen3-14b-base
      qwen3-32b qwen3-4b qwen3-4b-base qwen3-4b-thinking-2507
      qwen3-480b-a35b qwen3-custom-30b-a3b qwen3-omni-30b-a3b
      qwen3-vl-2b qwen3-vl-30b-a3b qwen3-vl-4b
    """
  },
  "opt_type": {"write opt_type=adamw, lion, adafactor or muon": "sgd"},
  "quantization": {
    "write quantization=int8 or fp8": """
      fp4 fp8_e5m2 int4 intmp te_mxfp8 te_nvfp4 te_nvfp4_no_rht
    """
  },
  "remat_policy": {
    "quantized operands are not saved; write remat_policy=minimal": """
      minimal_with_context_and_quantization minimal_with_quantization
    """
  },
  "sft_train_on_completion_only": {
    "conversations are trained on their answers; for all tokens, write dataset_type=jsonl": "false"
  },
  "weight_dtype": {"write weight_dtype=bfloat16 or float32": "float16"},
}
