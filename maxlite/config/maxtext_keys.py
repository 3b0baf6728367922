"""MaxText's keys that maxlite lacks, by answer: another key, not needed, or not supported.

Only data: `maxtext_answers.py` builds error messages from it, and docs/from_maxtext.md its tables.
Each key is in one of the tables. `maxtext_same_keys.py` has the keys that both projects have.
"""

_SAVE = "remat_policy=custom remat_saved_names="
_ADAPTERS = "lora_rank=RANK, and load_parameters_path=RUN if a run of maxlite trained the adapters"
_ROWS = "dataset_type={rows}"
_LOCAL = "local_checkpoint_directory=/dev/shm/maxlite local_checkpoint_period=10"
_HUB = "dataset_path={hub}"
_RAMP = "batch_size_schedule=[[0, 8], [1000, 16]], rows per step from these steps on"
_EPOCHS = "steps=N; a run prints at its start how many steps an epoch has"
_HELD_OUT = "eval_dataset_path=FILES, or eval_fraction=0.05 of dataset_path"
_COLUMNS = (
  "text_column=NAME of a text, which held-out files share; docs/data.md has the columns of "
)
_COLUMNS += "dataset_type=chat and preference"
_TEACHER = "teacher_path=FOLDER loss_type=distill; the teacher's config is in its folder"
_RMS = "decoder_block=gemma2 or gemma3, which have these norms"

# MaxText's key -> what to write. In braces: `value` is what the user wrote; `hub` the files of a
# dataset of the hub, and `rows` their dataset_type, by the other keys of the command.
OTHER_NAME: dict[str, str] = {
  # Runs, checkpoints, metrics
  "compile_xla_flags": "compiler_options={option: value}",
  "dump_hlo": "save_hlo=FOLDER for maxlite.plan",
  "dump_hlo_gcs_dir": "save_hlo=FOLDER for maxlite.plan",
  "dump_hlo_local_dir": "save_hlo={value} for maxlite.plan",
  "dump_step": "save_hlo=FOLDER for maxlite.plan",
  "enable_emergency_checkpoint": _LOCAL,
  "enable_jax_profiler": "profiler=xplane",
  "enable_multi_tier_checkpointing": _LOCAL,
  "enable_wandb": "wandb_project_name=NAME",
  "enable_lora": _ADAPTERS,
  "hf_lora_adapter_path": _ADAPTERS,
  "load_full_state_path": "base_output_directory=FOLDER run_name=NAME of that run, which resumes",
  "lora": "lora_rank=RANK lora_alpha=ALPHA, flat keys",
  "lora_input_adapters_path": _ADAPTERS,
  "lora_restore_path": _ADAPTERS,
  "lora_module_path": "phases=[{name: lora, train: ['.*attention/.*lora_.*'], steps: 100}]",
  "metrics_file": "base_output_directory=FOLDER; its runs have metrics.jsonl",
  "multi_tier_checkpointing_backup_interval_minutes": "checkpoint_period_minutes={value}",
  "replicator_backup_interval_minutes": "checkpoint_period_minutes={value}",
  "multi_tier_checkpointing_backup_interval_steps": "checkpoint_period={value}",
  "num_epoch": _EPOCHS,
  "reuse_example_batch": "dataset_type=synthetic",
  "skip_jax_distributed_system": "num_processes=1",
  "target_eval_loss": "early_stopping_patience=N, or a callback (docs/api.md)",
  "wandb_run_name": "run_name={value}",
  "checkpoint_dir": "base_output_directory=FOLDER; checkpoints are in a run's folder",
  "metrics_dir": "base_output_directory=FOLDER; metrics are in a run's folder",
  "tensorboard_dir": "base_output_directory=FOLDER; its runs have folders for TensorBoard",
  "prometheus_port": "metrics_port={value} for a run; maxlite.serve has /metrics at serve_port",
  # Mesh
  "dcn_autoregressive_parallelism": "dcn_tensor_parallelism={value}",
  "dcn_context_autoregressive_parallelism": "dcn_context_parallelism={value}",
  "dcn_diloco_parallelism": "dcn_ensemble_parallelism={value}",
  "custom_mesh_and_rule": "logical_axis_rules=[[logical axis, [mesh axes]], ...]",
  "dcn_fsdp_transpose_parallelism": "dcn_fsdp_parallelism={value} times its present degree",
  "dcn_sequence_parallelism": "dcn_context_parallelism={value}",
  "dcn_tensor_sequence_parallelism": "dcn_tensor_parallelism={value}",
  "ici_autoregressive_parallelism": "ici_tensor_parallelism={value}",
  "ici_context_autoregressive_parallelism": "ici_context_parallelism={value}",
  "ici_diloco_parallelism": "ici_ensemble_parallelism={value}",
  "ici_fsdp_transpose_parallelism": "ici_fsdp_parallelism={value} times its present degree",
  "ici_sequence_parallelism": "ici_context_parallelism={value}",
  "ici_tensor_sequence_parallelism": "ici_tensor_parallelism={value}",
  "shard_exp_on_fsdp": "logical_axis_rules=[[exp, [fsdp]]]",
  "internal_compile_num_devices": "compile_topology=v5p-64 or another for maxlite.plan",
  "num_slices": "compile_topology_num_slices={value} for maxlite.plan; a run detects it",
  "subslice_shape": "compile_topology=v5p-64 or another for maxlite.plan",
  # Model
  "attention_bias": "decoder_block=qwen2, whose queries, keys and values have biases",
  "attention_sink": "decoder_block=gpt_oss, whose attention has sinks",
  "attention_type": "sliding_window_size=N for local layers; decoder_block selects the others",
  "emb_dim": "base_emb_dim={value}",
  "global_rope_max_timescale": "rope_max_timescale={value}",
  "global_rope_proportion": "partial_rotary_factor={value} rope_type=proportional",
  "mlp_bias": "expert_bias={value}",
  "mlp_dim": "base_mlp_dim={value}",
  "moe_mlp_dim": "base_moe_mlp_dim={value}",
  "nope_layer_interval": (
    "decoder_block=smollm3 or exaone4, whose every fourth layer has no rotary embedding"
  ),
  "num_decoder_layers": "base_num_decoder_layers={value}",
  "num_kv_heads": "base_num_kv_heads={value}",
  "num_query_heads": "base_num_query_heads={value}",
  "rope_attention_scaling": "rope_type=yarn mscale=0, which scales the rotary embedding",
  "rope_linear_scaling_factor": "rope_type=linear rope_factor={value}",
  "rope_use_scale": "rope_type=llama3.1",
  "routed_score_func": "router=topk_softmax, group_limited_greedy or sigmoid_group_topk",
  "use_post_attn_norm": _RMS,
  "use_post_ffw_norm": _RMS,
  "use_qk_norm": "decoder_block=qwen3, qwen3_moe or olmoe, whose queries and keys are normalized",
  # What the backward pass keeps; here from MaxText's `device`, and see `VALUES` for the others
  "attention_out": _SAVE + "[attention_out]",
  "context": _SAVE + "[attention_out]",
  "key_proj": _SAVE + "[key_proj]",
  "kv_proj": _SAVE + "[key_proj, value_proj]",
  "kv_wa_proj": _SAVE + "[kv_latent]",
  "mla_kv": _SAVE + "[key_proj, value_proj]",
  "mla_q": _SAVE + "[query_proj]",
  "mlpwi": _SAVE + "[mlpwi]",
  "mlpwi_0": _SAVE + "[mlpwi]",
  "mlpwi_1": _SAVE + "[mlpwi]",
  "mlpwo": _SAVE + "[mlpwo]",
  "moe_mlpwi_0": _SAVE + "[moe_rows, mlpwi]",
  "moe_mlpwi_1": _SAVE + "[moe_rows, mlpwi]",
  "moe_mlpwo": _SAVE + "[moe_rows, mlpwo]",
  "out_proj": _SAVE + "[out_proj]",
  "qkv_proj": _SAVE + "[query_proj, key_proj, value_proj]",
  "query_proj": _SAVE + "[query_proj]",
  "query_wa_proj": _SAVE + "[query_latent]",
  "value_proj": _SAVE + "[value_proj]",
  # Tiles of the Megablox kernels: [rows, embed, mlp]
  "wi_tile_dlhs_batch_seq": "wi_tile_dlhs=[{value}, 1024, 1024]",
  "wi_tile_dlhs_embed_dim": "wi_tile_dlhs=[512, {value}, 1024]",
  "wi_tile_dlhs_mlp_dim": "wi_tile_dlhs=[512, 1024, {value}]",
  "wi_tile_drhs_batch_seq": "wi_tile_drhs=[{value}, 1024, 1024]",
  "wi_tile_drhs_embed_dim": "wi_tile_drhs=[512, {value}, 1024]",
  "wi_tile_drhs_mlp_dim": "wi_tile_drhs=[512, 1024, {value}]",
  "wi_tile_fwd_batch_seq": "wi_tile_fwd=[{value}, 1024, 1024]",
  "wi_tile_fwd_embed_dim": "wi_tile_fwd=[512, {value}, 1024]",
  "wi_tile_fwd_mlp_dim": "wi_tile_fwd=[512, 1024, {value}]",
  "wo_tile_dlhs_batch_seq": "wo_tile_dlhs=[{value}, 1024, 1024]",
  "wo_tile_dlhs_embed_dim": "wo_tile_dlhs=[512, {value}, 1024]",
  "wo_tile_dlhs_mlp_dim": "wo_tile_dlhs=[512, 1024, {value}]",
  "wo_tile_drhs_batch_seq": "wo_tile_drhs=[{value}, 1024, 1024]",
  "wo_tile_drhs_embed_dim": "wo_tile_drhs=[512, {value}, 1024]",
  "wo_tile_drhs_mlp_dim": "wo_tile_drhs=[512, 1024, {value}]",
  "wo_tile_fwd_batch_seq": "wo_tile_fwd=[{value}, 1024, 1024]",
  "wo_tile_fwd_embed_dim": "wo_tile_fwd=[512, {value}, 1024]",
  "wo_tile_fwd_mlp_dim": "wo_tile_fwd=[512, 1024, {value}]",
  "num_vocab_tiling": "logits_chunk_tokens=N, the tokens per device with logits at once",
  # Data
  "batch_size": "global_batch_size={value}",
  "global_batch_size_to_load": "global_batch_size={value}",
  "global_batch_size_to_train_on": "global_batch_size={value}",
  "chat_template": "chat_template_path=FILE with this Jinja2 template",
  "dataset_name": "dataset_path=FILES dataset_type=parquet (or text, jsonl, arrow, array_record)",
  "default_prompt": "dataset_type=chat with a prompt in each line",
  "enable_rampup_batch_size": _RAMP,
  "eval_data_columns": _COLUMNS,
  "eval_dataset_name": _HELD_OUT,
  "global_rampup_samples": _RAMP,
  "grain_eval_files": "eval_dataset_path={value}",
  "grain_file_type": "dataset_type={value}",
  "grain_num_threads": "grain_prefetch_buffer_size=N; Grain reads with its number of threads",
  "grain_packing_type": "packing_strategy={value}",
  "grain_per_worker_buffer_size": "grain_prefetch_buffer_size=N, over all workers",
  "grain_train_files": "dataset_path={value}",
  "grain_train_mixture_config_path": "dataset_mixture=[{name: N, path: [FILES], weight: W}, ...]",
  "hf_data_dir": _HUB,
  "hf_eval_files": "eval_dataset_path={value}",
  "hf_eval_split": "eval_dataset_path={eval_hub}",
  "hf_name": _HUB,
  "hf_path": _HUB,
  "hf_subset": _HUB,
  "hf_train_files": "dataset_path={value}",
  "max_corpus_chars": "eval_fraction and steps; all of dataset_path is tokenized once",
  "per_device_batch_size_increment": _RAMP,
  "per_device_batch_size_start": _RAMP,
  "sft_train_on_completion_only": "dataset_type=chat, which trains on answers only",
  "system_prompt": "dataset_type=chat, whose conversations may begin with a system message",
  "train_data_columns": _COLUMNS,
  "train_micro_batch_size": "gradient_accumulation_steps=N, the micro-batches of a step",
  "train_split": _HUB,
  "use_sft": _ROWS,
  # Optimizer and losses
  "adamw_mask": "adam_weight_decay=W, which norms and biases are free of",
  "distill_student_weights_share_map": "teacher_path=FOLDER loss_type=distill",
  "enable_diloco": "diloco_sync_period=N",
  "dpo": "loss_type=dpo, and dpo_beta and dpo_label_smoothing as flat keys",
  "use_dpo": "loss_type=dpo dataset_type=preference",
  "muon_weight_decay": "adam_weight_decay={value}",
  "student_overrides": "keys of the student as usual, and teacher_path=FOLDER loss_type=distill",
  "student_params_to_update": "phases=[{name: part, train: [REGEX], steps: N}]",
  "teacher_overrides": _TEACHER,
  "trainable_parameters_mask": "phases=[{name: part, train: [REGEX], steps: N}]",
  "algo": "loss_type=dpo",
  # Generation
  "stop_strings": "stop={value}",
  "decode_sampling_strategy": "decode_sampling_temperature, decode_sampling_top_k and "
  "decode_sampling_nucleus_p, which combine",
  "max_prefill_predict_length": "max_target_length=N, of the prompt and its completion",
}

# Why MaxText's keys are not needed -> the keys.
NOT_NEEDED: dict[str, str] = {
  "models are Flax Linen modules": "enable_nnx pure_nnx pure_nnx_decoder",
  "keys of a command override the preset of model_name": "override_model_config",
  "each row replaces the row of that name": "override_logical_axis_rules",
  "a run prints the keys that differ from defaults, and config.yml has all": "log_config",
  "tools/inspect/shardings.py prints the sharding of every parameter": "debug_sharding",
  "the platform is detected": "hardware",
  "sizes are those of the base_ keys, and MaxText scales them by powers of 2 up to 4096": (
    "global_parameter_scale"
  ),
  "the last step is always saved": "save_checkpoint_on_completion",
  "SIGTERM saves a checkpoint that all processes agree on": "enable_autocheckpoint",
  "a checkpoint is restored onto any mesh": """
    enable_single_replica_ckpt_restoring expansion_factor_real_data grain_use_elastic_iterator
    mtc_data_parallelism
  """,
  "maxlite.convert reads and writes Hugging Face folders": """
    checkpoint_conversion_fn convert_checkpoint_if_possible force_unroll source_checkpoint_layout
  """,
  "Orbax writes one format": """
    checkpoint_storage_concurrent_gb checkpoint_storage_target_data_file_size_bytes
    checkpoint_storage_use_ocdbt checkpoint_storage_use_zarr3 enable_orbax_v1
  """,
  "gradients are accumulated in float32 or the weights' type, if that is wider": "grad_dtype",
  "gradient_accumulation_steps does not change the result": "use_tunix_gradient_accumulation",
  "logits, scores and softmax are float32": """
    cast_logits_to_fp32 float32_logits float32_qk_product float32_weight_sum logits_dot_in_fp32
  """,
  "XLA fuses these operations": "fused_mlp fused_qkv merge_gating_gmm",
  "decoder_block sets it": "qk_norm_with_scale use_qk_norm_in_gdn v_norm_with_scale",
  "yarn keeps slow frequencies below one rotation, as in all published models": "beta_slow",
  "rope_factor and original_max_position_embeddings set it": "max_position_embeddings",
  "timescales begin at 1": "rope_min_timescale",
  "weights have one layout of rotated channels, to which from_hf converts": """
    rope_interleave rope_pairwise
  """,
  "padding is masked": "enable_padding_causal_mask",
  "attention=auto selects the kernel by platform, and its blocks by shape": """
    cost_estimate_flops_bwd cost_estimate_flops_fwd dq_reduction_steps force_q_layout
    local_sa_block_kv local_sa_block_kv_compute local_sa_block_kv_dkv
    local_sa_block_kv_dkv_compute local_sa_block_kv_dq local_sa_block_q local_sa_block_q_dkv
    local_sa_block_q_dq local_sa_fuse_reciprocal local_sa_k_layout local_sa_q_layout
    local_sa_use_base2_exp local_sa_use_fused_bwd_kernel local_sa_v_layout
    local_use_splash_scheduler mla_qk_head_chunk_size ring_scan_unroll sa_block_kv
    sa_block_kv_compute sa_block_kv_dkv sa_block_kv_dkv_compute sa_block_kv_dq sa_block_q
    sa_block_q_dkv sa_block_q_dq sa_bwd_dkv_megacore sa_fuse_reciprocal sa_k_layout sa_q_layout
    sa_use_base2_exp sa_use_fused_bwd_kernel sa_v_layout use_jax_splash use_max_logit_estimate
    use_sliced_mla_proj use_splash_scheduler use_tokamax_splash
  """,
  "grouped_matmul=auto selects the kernel by platform": """
    moe_dispatch_no_expert_sharding padded_base_moe_mlp_dim prefuse_moe_weights
    ragged_gather_cost_estimate_bytes_accessed ragged_gather_cost_estimate_flops
    ragged_gather_fallback ragged_gather_reduce_cost_estimate_bytes_accessed
    ragged_gather_reduce_cost_estimate_flops ragged_gather_reduce_fallback
    ragged_sort_use_single_sparsecore use_custom_sort_vjp use_gather_mosaic_kernel use_gmm_v2
    use_ragged_sort use_tokamax_gmm
  """,
  "experts have the width of the model": "moe_expert_input_dim",
  "the mesh axes are fixed, and an axis of one device costs nothing": """
    context_sharding data_sharding input_data_sharding_logical_axes mesh_axes
    remove_size_one_mesh_axis_from_type ulysses_context_sharding
  """,
  "logical_axis_rules also shard the evaluation": """
    custom_mesh_and_rule_for_eval logical_axis_rules_for_eval
  """,
  "JAX arranges the devices": "allow_split_physical_axes custom_mesh optimize_mesh_for_tpu_v6e",
  "XLA partitions with Shardy": "shard_mode shardy",
  "shard_map checks varying axes": "check_vma",
  "layers are stacked on the first axis": "param_scan_axis",
  "ring attention always balances causal work": """
    context_parallel_load_balance context_parallel_reorder_strategy
  """,
  "maxlite.plan compiles for hardware that is absent": "internal_compile",
  "all data are tokenized once, into a cache": "tokenize_eval_data tokenize_train_data",
  "every document ends with eos": "add_eos",
  "documents longer than a row continue in the next one": "use_truncation",
  "a row holds any number of documents": "max_segments_per_seq",
  "dataset_path may be on the hub, with the token of HF_TOKEN or of `hf auth login`": """
    hf_access_token
  """,
  "evaluation uses the batches of the training": """
    eval_batch_size eval_per_device_batch_size
  """,
  "the last batch is padded, and padding has no loss": """
    generate_padding_batch_eval generate_padding_batch_train
  """,
  "shuffling covers the whole epoch": "grain_shuffle_buffer_size",
  "one Grain pipeline reads for training and evaluation": """
    grain_data_source_max_workers grain_index_storage_option grain_num_threads_eval
    grain_per_worker_buffer_size_eval grain_prefetch_buffer_size_eval grain_ram_budget_mb
    grain_worker_count_eval
  """,
  "evaluation begins with the first multiple of eval_interval": "eval_start_step",
  "a step that is not finite is skipped, and max_skipped_steps in a row stop": """
    abort_on_inf_loss abort_on_nan_loss
  """,
  "steps are dispatched ahead until a value is logged": "max_inflight_computations",
  "updates of Muon have a consistent RMS of 0.2": "muon_consistent_rms",
  "embeddings are looked up": "use_iota_embed",
  "the prompt is computed at once": "model_call_mode prefill_chunk_size use_chunked_prefill",
  "the key/value cache has one layout": """
    ar_cache_axis_order compute_axis_order mla_naive_kvcache prefill_cache_axis_order reshape_q
    stack_prefill_result_cache
  """,
  "maxlite.serve compiles its programs before it answers": "enable_model_warmup",
  "each process writes its trace into the run folder": """
    profile_cleanly upload_all_profiler_results
  """,
  "the run folder has config.yml and metrics.jsonl, also on gs://": """
    gcs_metrics save_config_to_gcs
  """,
  "goodput is always measured and printed": """
    enable_goodput_recording enable_pathways_goodput goodput_upload_interval_seconds
    monitor_goodput monitor_step_time_deviation step_deviation_interval_seconds
  """,
  "processes watch each other": "heartbeat_reporting_interval_in_seconds",
  "jax_cache_dir keeps compiled programs": "compiled_trainstep_file",
  "maxlite.plan prints its estimate": "write_estimator_result",
}

# Why MaxText's keys are not supported, and what there is instead -> the keys.
NOT_SUPPORTED: dict[str, str] = {
  "there is no pipeline parallelism; use the axes fsdp, tensor, context and expert": """
    dcn_pipeline_parallelism ici_pipeline_parallelism num_layers_per_pipeline_stage
    num_pipeline_microbatches num_pipeline_repeats pipeline_delay_activation_forwarding
    pipeline_fsdp_ag_once pipeline_fsdp_ag_per_repeat pipeline_parallel_layers
    scan_layers_per_stage scan_pipeline_iterations scan_pipeline_repeats
    set_remat_policy_on_layers_per_stage set_remat_policy_on_pipeline_iterations
  """,
  "models have no dropout": "dropout_rate enable_dropout",
  "parameters, gradients and optimizer state have one sharding; use ici_fsdp_parallelism": """
    dense_fsdp_use_two_stage_all_gather moe_fsdp_use_two_stage_all_gather
    shard_optimizer_over_data sharding_strategy use_2d_fsdp_sharding vocab_tiling_ag_once
  """,
  "ring and ulysses do not combine; use one in context_parallel_strategy": """
    dcn_context_usp_ulysses_parallelism ici_context_usp_ulysses_parallelism
  """,
  "models read text only": """
    activation_dropout_for_audio activation_function_for_audio attention_dropout_for_audio
    attention_for_vit audio_path audio_placeholder conv_chunksize_for_audio conv_stride_for_vit
    d_model_for_audio deepstack_visual_indexes_for_vit downsample_hidden_size_for_audio dtype_mm
    encoder_attention_heads_for_audio encoder_ffn_dim_for_audio encoder_layers_for_audio
    eval_image_column freeze_audio_encoder_params freeze_vision_encoder_params hidden_size_for_vit
    image_path image_placeholder image_size_for_vit intermediate_size_for_vit
    max_num_images_per_example max_sample_len_for_audio max_source_positions_for_audio
    max_timescale_for_audio mrope_section n_window_for_audio n_window_infer_for_audio
    num_attention_heads_for_vit num_channels_for_vit num_conv_layers_for_audio
    num_hidden_layers_for_vit num_mel_bins_for_audio num_position_embeddings_for_vit
    out_hidden_size_for_vit output_dim_for_audio patch_size_for_vit pixel_shuffle_ratio_for_vit
    posemb_type_for_vit position_id_per_seconds projector_dropout_for_vit
    projector_input_dim_for_vit projector_output_dim_for_vit remat_policy_for_vit
    rope_theta_for_vit scale_embedding_for_audio spatial_merge_size_for_vit
    temporal_patch_size_for_vit tile_size_for_vit train_image_column use_audio use_audio_in_video
    use_mrope use_multimodal video_max_grid_h video_max_grid_t video_max_grid_w video_path
    video_placeholder vision_connector_activation vision_connector_hidden_size
    vision_connector_num_layers vision_connector_use_bias vision_encoder_block
    vision_output_dim_for_vit vision_output_length vision_projector_type
  """,
  "there is no RL; loss_type=dpo trains on preferences": """
    chips_per_vm dataset_processor_path debug enable_tunix_perf_metrics epsilon_high eval_corr_lst
    eval_make_lst eval_mode eval_sampling_strategy generation_configs grpo_beta grpo_epsilon
    inference_devices_per_replica inference_replicas inference_rollouts load_checkpoint_only_once
    loss_agg_mode loss_algo math_verify_num_procs math_verify_timeout max_concurrency num_batches
    num_eval_passes num_generations num_iterations num_samplers_slices num_test_batches
    num_trainer_slices off_policy_steps penalty_incorrect_answer penalty_incorrect_format
    reasoning_end_token reasoning_start_token reasoning_start_token_in_prompt reshard_chunk_size
    reward_exact_answer reward_exact_format_match reward_functions reward_functions_path
    reward_partial_format_match reward_ratio_guess_to_answer_high reward_ratio_guess_to_answer_low
    reward_white_space_format_match rl rollout_data_parallelism rollout_expert_parallelism
    rollout_micro_batch_size rollout_tensor_parallelism sampler_devices_fraction
    solution_end_token solution_start_token test_batch_start_index train_fraction
    trainer_devices_fraction use_agentic_rollout use_grpo use_pathways_reshard
  """,
  "vLLM is not used; maxlite.generate and maxlite.serve compute the model": """
    async_scheduling debug_converter enable_dp_attention enable_expert_parallel gcs_debug_path
    hbm_utilization_vllm kv_cache_buffer log_weight_sync_time max_num_batched_tokens max_num_seqs
    swap_space_vllm_gb use_standalone_converter use_weight_converter vllm vllm_additional_config
    vllm_hf_config_path vllm_hf_overrides vllm_load_format weight_sync_debug
  """,
  "there is no ORPO; loss_type=dpo trains on preferences": "orpo_lambda",
  "max_target_length bounds a prompt and its answer together": "max_prompt_length",
  "adapters are not quantized": "lora_tile_size lora_weight_qtype",
  "evaluation reports the acceptance of every layer of multi-token prediction": """
    mtp_eval_target_module
  """,
  "no family has this layer; docs/models.md lists the families": """
    attention_output_dim causal_block_size chunk_attn_window_size compress_ratios
    compressed_rope_max_timescale enable_mhc_lite engram engram_head_dim engram_kernel_size
    engram_layers engram_max_ngram_size engram_num_heads engram_seed engram_vocab_bases
    first_num_hash_layers indexer_approx_top_k_recall
    indexer_cutoff_threshold indexer_head_dim indexer_loss_scaling_factor indexer_mask_exact_topk
    indexer_n_heads indexer_sparse_training indexer_topk indexer_use_approx_top_k
    mhc_expansion_rate mhc_pallas_kernel_bwd_block_size
    mhc_pallas_kernel_fwd_block_size moba moba_chunk_size moba_topk
    o_groups o_lora_rank sinkhorn_iterations temperature_tuning trainable_position_size
    use_indexer use_mhc_pallas_kernel use_untrainable_positional_embedding
  """,
  "local layers rotate all channels, and partial_rotary_factor those of the others": (
    "local_rope_proportion"
  ),
  "it is that of the embedding, vocab_size": "vocab_size_per_layer_input",
  "the initial scale is that of the family": "dense_init_scale",
  "decoder_block decides whether logits of tied embeddings are scaled": (
    "normalize_embedding_logits"
  ),
  "activations have the type dtype": "activations_in_float32",
  "matmuls have JAX's default precision": "matmul_precision",
  "quantization=int8 or fp8 scales by the largest value, in the forward pass only": """
    act_quantization_calibration_method bwd_quantization_calibration_method
    checkpoint_is_quantized constant_bound_config experimental_sa_quant_k_fp8
    experimental_sa_quant_q_fp8 fuse_expert_scales quant_cfg_path quantization_local_shard_count
    replicate_quant_scale save_quantized_params_path use_manual_quantization use_qwix_quantization
    weight_quantization_calibration_method
  """,
  "weights are dense": """
    weight_sparsity_m weight_sparsity_n weight_sparsity_start_step weight_sparsity_update_step
  """,
  "Transformer Engine is not used": "te_comm_gemm_overlap",
  "the key/value cache has the type dtype": "kv_quant_axis kv_quant_dtype quantize_kvcache",
  "attention is not clipped after a step": "qk_clip_threshold use_qk_clip",
  "a step is not cut into parts to overlap communication; XLA overlaps it": """
    batch_split_factor moe_chunk_barrier num_moe_emb_chunks num_moe_token_chunks
    use_batch_split_schedule
  """,
  "remat_saved_names does not name this activation": "decoder_layer_input",
  "remat_policy=offload moves all saved activations to the host": "tensors_to_offload",
  "parameters stay on the device; optimizer_memory_host_offload moves the optimizer state": """
    parameter_memory_host_offload
  """,
  "there is no checkpoint of step 0; a rerun with the same seeds gives the same weights": """
    save_checkpoint_on_start
  """,
  "a checkpoint is saved every checkpoint_period steps": """
    enable_continuous_checkpointing use_replicator_service
  """,
  "old checkpoints are removed at once; checkpoint_keep_period keeps some": """
    checkpoint_todelete_full_path checkpoint_todelete_subdir
  """,
  "Pathways is not supported; each host runs the command": """
    colocated_python_checkpointing colocated_python_data_input enable_single_controller
    use_pathways
  """,
  "the number of hosts is fixed during a run; a restart may have another": """
    elastic_backup_kind elastic_enabled elastic_max_retries elastic_min_slice_count
    elastic_timeout_seconds
  """,
  "all parameters are averaged at once": """
    communication_overlapping_alpha enable_streaming_diloco num_communication_overlapping_steps
    num_diloco_fragments use_sequential_layers
  """,
  "limit the network with the tools of the system": """
    dcn_bandwidth_burst dcn_bandwidth_interface dcn_bandwidth_latency dcn_bandwidth_limit
  """,
  "token files of Megatron are not read; dataset_type=parquet and others read text": """
    blend_cache_dir blend_index_dir eod_mask_loss megatron_eval_files megatron_mmap_mode
    megatron_train_files mmap_eod_id mmap_npy_split mmap_split_sentences
    packing_max_segments_per_sample reset_attention_mask
  """,
  "token files of OLMo are not read; dataset_type=array_record and others read text": """
    olmo_apply_ngram_filter olmo_index_path olmo_path_remap_from olmo_path_remap_to
  """,
  "conversations are rendered by chat templates": """
    data_template_path formatting_func_kwargs formatting_func_path
  """,
  "the objective is the next token": """
    block_diffusion_canvas_policy block_diffusion_logit_alignment block_diffusion_mask_id
    block_diffusion_min_noise training_objective
  """,
  "distill_alpha and distill_temperature are constant": """
    distill_alpha_end distill_alpha_schedule distill_temperature_end distill_temperature_schedule
  """,
  "loss_type=distill compares predictions, not features of layers": """
    distill_beta distill_beta_end distill_beta_schedule distill_feature_loss_type
    distill_layer_indices
  """,
  "a student starts from load_parameters_path, or from new weights": """
    attn_module_name distill_weights_copy_map learn_to_init_mode lti_layer_indices
    lti_use_general_linear_map
  """,
  "the teacher at teacher_path computes its predictions during the run": "offline_data_dir",
  "steps with a large loss are trained; gradient_clipping_threshold bounds their gradients": """
    skip_step_interval skip_step_on_spikes skip_step_scaling_factor
  """,
  "AdamW adds epsilon outside of the root": "adam_eps_root",
  "the moments of AdamW have the type of the weights, weight_dtype": "mu_dtype",
  "the decay of wsd is linear": "wsd_decay_style",
  "loads of experts are in expert_load.jsonl; other metrics of layers are not recorded": """
    log_moe_bias_norms record_internal_nn_metrics
  """,
  "maxlite.generate and maxlite.serve compute the prompt and its completion on one mesh": """
    enable_llm_inference_pool generate_slice inference_server load_from_prefill_dir
    prefill_cache_dir prefill_slice
  """,
  "the key/value cache holds one prompt per row": """
    enable_prefix_caching multi_sampling prefix_caching_dram_byte prefix_caching_hbm_byte
    ragged_block_size use_ragged_attention
  """,
  "log probabilities are not returned": "return_log_prob",
  "there is no benchmark command for inference; see docs/performance.md": """
    autoregressive_decode_assert inference_benchmark_test inference_metadata_file
    inference_microbenchmark_log_file_path inference_microbenchmark_loop_iters
    inference_microbenchmark_num_samples inference_microbenchmark_prefill_lengths
    inference_microbenchmark_stages
  """,
  "set it for JAX, in JAX_DEBUG_LOG_MODULES": "jax_debug_log_modules",
  "a step that is not finite is skipped and reported; there are no other checks": "max_checkify",
  "set it for XLA, in XLA_FLAGS": """
    dump_hlo_delete_local_after dump_hlo_local_module_name dump_hlo_module_name
    dump_hlo_upload_all dump_hlo_xla_flags dump_jaxpr dump_jaxpr_delete_local_after
    dump_jaxpr_gcs_dir dump_jaxpr_local_dir
  """,
  "profiler=xplane writes one trace of profiler_steps steps": """
    enable_tpu_profiling_options hide_profiler_step_metric jax_profiler_port
    profile_periodically_period profile_power_events tpu_num_chips_to_profile_per_task
    tpu_num_sparse_core_tiles_to_trace tpu_num_sparse_cores_to_trace
    xprof_e2e_enable_fw_power_level_event xprof_e2e_enable_fw_thermal_event
    xprof_e2e_enable_fw_throttle_event xprof_tpu_power_trace_level
  """,
  "metrics go to metrics.jsonl, TensorBoard and Weights & Biases": """
    enable_checkpoint_cloud_logger enable_gcp_goodput_metrics enable_gcp_step_deviation_metrics
    managed_mldiagnostics managed_mldiagnostics_on_demand_profiling managed_mldiagnostics_region
    managed_mldiagnostics_run_group managed_mldiagnostics_storage_path
    report_heartbeat_metric_for_gcp_monitoring report_performance_metric_for_gcp_monitoring
    use_vertex_tensorboard vertex_tensorboard_project vertex_tensorboard_region
  """,
}

# Keys of NOT_NEEDED that decide what is computed -> their one value; another is not supported.
ONE_VALUE: dict[str, str] = {
  "add_eos": "true",
  "beta_slow": "1",
  "cast_logits_to_fp32": "true",
  "context_parallel_load_balance": "true",
  "enable_padding_causal_mask": "true",
  "float32_logits": "true",
  "float32_qk_product": "true",
  "float32_weight_sum": "true",
  "global_parameter_scale": "1",
  "logits_dot_in_fp32": "true",
  "max_segments_per_seq": "-1",
  "moe_expert_input_dim": "-1",
  "muon_consistent_rms": "0.2",
  "rope_min_timescale": "1",
  "tokenize_eval_data": "true",
  "tokenize_train_data": "true",
  "use_truncation": "false",
}

# Sections of MaxText's post-training configs, whose keys are written `section.key`.
SECTIONS = "cluster dataset dpo evaluation lora reward rl special_tokens student_overrides vllm"
# Of which all keys have the section's answer.
WHOLE_SECTIONS = ("generation_configs", "teacher_overrides")

# Dotted keys of MaxText that do not mean what their last part means.
DOTTED: dict[str, str] = {
  "teacher_overrides.load_parameters_path": "teacher_path={value} loss_type=distill",
}
