"""Audit random configs of all families and features: a right step must raise no alarm.

  python tools/inspect/audit_random.py [--number 20] [--seed 0] [--variants 2]

Each seed is one config: a family and random features that its rules allow, whose step is compared
on a few random variants; the checks of the reference all run. Prints a line per config, and what
the audit says. The exit code is 1 if it says anything.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted(path.stem for path in (ROOT / "configs/models").glob("*.yml"))
PAIRS = (
  "dataset_type=preference",
  "chat_template_path=configs/chat/plain.jinja",
  "dataset_path=configs/chat/preferences.jsonl",
)
PROMPTS = (
  "dataset_type=prompts",
  "dataset_path=configs/rl/sort_prompts.jsonl",
  "global_batch_size=16",
  "num_generations=8",
  "reward_functions=[equal_answer]",
  "max_target_length=14",
  "max_prefill_predict_length=7",
  "max_completion_length=8",
)
NORMS_THEN_ALL = "phases=[{name: a, train: [.*norm.*], steps: 1}, {name: b, train: [.*], steps: 2}]"
TWICE_ON_A_BATCH = "phases=[{name: a, train: [.*kernel], steps: 1, repeat_batch: 2}]"
LION_THEN_EMBEDDINGS = (
  "phases=[{name: a, train: [.*], steps: 1, optimizer: lion}, "
  "{name: b, train: [.*embed.*], steps: 2, gradient_accumulation_steps: 2}]"
)
DRAFT_HEADS = (
  "phases=[{name: a, train: [.*], steps: 1, loss: next_token_and_draft}, "
  "{name: b, train: [.*draft.*], steps: 2, loss: match_head}]"
)
# Parameters over the axes of rows.
VOCAB_OVER_ROWS = "[[vocab, [tensor, fsdp]], [embed, [context, expert]]]"
HIDDEN_OVER_ROWS = "[[mlp, [tensor, fsdp]], [embed, [context, expert]], [embed_no_exp, [context]]]"
# Features, each with alternatives; what the rules of a config refuse is left out.
FEATURES: tuple[tuple[tuple[str, ...], ...], ...] = (
  (("scan_layers=false",), ("scan_layers=true",)),
  (
    ("remat_policy=none",),
    ("remat_policy=full",),
    ("remat_policy=custom", "remat_saved_names=[out_proj,mlpwi]"),
  ),
  (("opt_type=lion",), ("opt_type=muon",), ("opt_type=adafactor",)),
  (("ema_decay=0.9",),),
  (("gradient_clipping_threshold=0",), ("gradient_clipping_threshold=0.1",)),
  (("adam_weight_decay=0",), ("adam_weight_decay=0.5",)),
  (("lr_schedule_type=wsd",), ("lr_schedule_type=constant", "warmup_steps_fraction=0")),
  (("z_loss_multiplier=1e-3",),),
  (
    ("load_balance_loss_weight=0.01",),
    ("load_balance_loss_weight=0.01", "load_balance_loss_scope=sequence"),
    ("load_balance_loss_weight=0",),
  ),
  (("router_z_loss_weight=0.01",),),
  (("router_jitter=0.1",), ("use_random_routing=true",)),
  (
    ("router=sigmoid_group_topk", "routed_bias=true"),
    ("router=topk_softmax",),
    ("routed_bias=true",),
  ),
  (
    ("sparse_matmul=false", "capacity_factor=1.0"),
    ("sparse_matmul=false",),
    ("use_ring_of_experts=true",),
    ("ragged_buffer_factor=1.0",),
    ("ragged_buffer_factor=1.0", "ragged_overflow=drop"),
  ),
  (("mtp_num_layers=1",), ("mtp_num_layers=2", "mtp_loss_scaling_factor=0.3")),
  (("lora_rank=4",), ("lora_rank=4", "lora_experts=true")),
  (
    (NORMS_THEN_ALL,),
    (TWICE_ON_A_BATCH,),
    (LION_THEN_EMBEDDINGS,),
    ("num_draft_heads=2", DRAFT_HEADS),
    ("lora_rank=4", "phases=[{name: a, train: ['.*lora_.*'], steps: 1}]"),
  ),
  (
    ("loss_type=distill", "teacher_path=X"),
    ("loss_type=distill", "teacher_path=X", "distill_top_k=64", "distill_temperature=2"),
    (*PAIRS, "loss_type=dpo", "reference_path=X"),
    (*PROMPTS, "loss_type=grpo", "loss_aggregation=sequence"),
    (*PROMPTS, "loss_type=grpo", "grpo_beta=0.1", "reference_path=X"),
    (*PROMPTS, "loss_type=grpo", "importance_sampling_level=sequence", "grpo_epsilon_high=0.4"),
    (*PROMPTS, "loss_type=on_policy_distill", "teacher_path=X"),
  ),
  (("quantization=int8",), ("quantization=fp8",)),
  (("parametrization=mup", "mup_base_emb_dim=32"),),
  (("dtype=bfloat16", "weight_dtype=bfloat16"),),
  (("diloco_sync_period=2",),),
  (("context_parallel_strategy=ring",), ("context_parallel_strategy=ulysses",)),
  (("logits_via_embedding=true",),),
  (("final_logits_soft_cap=30",), ("attn_logits_soft_cap=50",)),
  (("sliding_window_size=8",),),
  (("optimizer_memory_host_offload=true",),),
  ((f"logical_axis_rules={VOCAB_OVER_ROWS}",), (f"logical_axis_rules={HIDDEN_OVER_ROWS}",)),
)
CHANCE = 0.22  # of a feature


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--number", type=int, default=20, help="configs to audit")
  parser.add_argument("--seed", type=int, default=0, help="of the first config")
  parser.add_argument("--variants", type=int, default=2, help="variants of each config")
  options = parser.parse_args()
  from maxlite.audit import ENVIRONMENT

  os.environ.update(ENVIRONMENT)  # before JAX is imported
  import jax

  from maxlite.auditing.audit_run import audit_spec
  from maxlite.config import load_config
  from maxlite.errors import UserError
  from maxlite.kernels.xla_cpu import add_threads_for_collectives
  from maxlite.training.spec import spec_of

  add_threads_for_collectives()
  num_wrong = 0
  for seed in range(options.seed, options.seed + options.number):
    words = random_config(seed)
    start = time.perf_counter()
    spec = spec_of(load_config(words))
    try:
      result = audit_spec(spec, num_meshes=-1, seed=seed, num_variants=options.variants)
    except UserError as error:
      print(f"{seed:4} refused: {' '.join(words[2:])}: {error}", flush=True)
      continue
    jax.clear_caches()
    seconds = time.perf_counter() - start
    verdict = "ok" if result.is_clean else "WRONG"
    names = "; ".join(str(row.variant) for row in result.outcomes if row.comparison)
    print(f"{seed:4} {seconds:4.0f} s {verdict}: {' '.join(words[2:])}: {names}", flush=True)
    for line in [*map(str, result.differences), *result.mistakes][:8]:
      print(f"     {line}", flush=True)
    num_wrong += not result.is_clean
  print(f"{options.number - num_wrong} of {options.number} configs are equal on all variants")
  return int(num_wrong > 0)


def random_config(seed: int) -> list[str]:
  """The words of a config that its rules allow."""
  from maxlite.config import load_config
  from maxlite.errors import UserError

  draw = np.random.default_rng(seed)
  words = ["dataset_type=synthetic", "jax_cache_dir="]
  family = str(draw.choice(PRESETS))
  words += [f"model_name={family}"]
  for number in draw.permutation(len(FEATURES)):
    if draw.random() > CHANCE:
      continue
    alternatives = FEATURES[number]
    more = [*words, *alternatives[draw.integers(len(alternatives))]]
    try:
      load_config(more)
    except UserError:
      continue
    words = more
  return words


if __name__ == "__main__":
  sys.exit(main())
