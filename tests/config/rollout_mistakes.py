"""Mistakes in the keys of rollouts, for test_mistakes.py."""

ROLLOUTS = ("loss_type=grpo", "dataset_type=prompts", "dataset_path=prompts.jsonl")

ROLLOUT_MISTAKES = {
  ("rollout_routes=replay",): ("rollout_routes=replay", "write loss_type=grpo"),
  (*ROLLOUTS, "rollout_routes=replay", "decoder_block=llama"): (
    "has no experts",
    "write rollout_routes=live",
  ),
}
