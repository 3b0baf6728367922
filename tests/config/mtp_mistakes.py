"""Mistakes in the keys of multi-token prediction, for test_mistakes.py."""

MTP_MISTAKES = {
  ("mtp_loss_scaling_factor=0.3",): ("mtp_num_layers=0 (default)", "write mtp_num_layers=1"),
  (
    "mtp_num_layers=1",
    "num_draft_heads=1",
    "phases=[{name: heads, train: [draft_head/.*], loss: match_head, steps: 1}]",
  ): ("both would propose", "write num_draft_heads=0"),
  ("mtp_num_layers=8", "max_target_length=8"): ("rows are shorter", "write mtp_num_layers=1"),
  ("mtp_num_layers=1", "loss_type=dpo"): ("the rejected answers", "write mtp_num_layers=0"),
}
