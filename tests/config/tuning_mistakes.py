"""Mistakes in the keys of population-based training, for test_mistakes.py."""

TUNING_MISTAKES = {
  ("pbt_hyperparameters={head_dim: [2]}",): ("head_dim=[2] cannot change", "learning_rate"),
  ("pbt_hyperparameters={learning_rte: [2]}",): ("cannot change", "learning_rate?"),
  ("pbt_hyperparameters={learning_rate: 2}",): ("learning_rate=2 has no factors", "[0.8, 1.25]"),
  ("pbt_hyperparameters={learning_rate: [x]}",): ("learning_rate=x is not a finite number",),
  ("pbt_hyperparameters={learning_rate: [-2]}",): ("learning_rate=-2", "below 0"),
  ("pbt_hyperparameters={adam_b1: [2]}",): ("adam_b1=[2] may reach 1", "{uniform: [0.8, 0.99]}"),
  ("pbt_hyperparameters={muon_beta: {uniform: [0, 1]}}",): ("not read by opt_type=adamw",),
  ("pbt_hyperparameters={adam_b1: {uniform: [0, 2]}}",): ("adam_b1=2", "above 1"),
  ("pbt_hyperparameters={learning_rate: [2]}", "members=[{}]"): ("write pbt_period=100",),
  ("pbt_hyperparameters={learning_rate: [2]}", "phases=[{name: a, train: x, steps: 1}]"): (
    "each phase has",
    "write pbt_hyperparameters={}",
  ),
  ("phases=[{name: a, train: x, steps: 1, pbt_hyperparameters: {}}]",): ("the whole run",),
  ("pbt_period=10",): ("pbt_period=10", "members or sweep", "pbt_period=0"),
  ("pbt_period=10", "members=[{}]", "ensemble_strategy=fused"): ("ensemble_strategy=stacked",),
  ("pbt_period=10", "members=[{}]", "asha_reduction_factor=2"): ("asha_reduction_factor=0",),
  ("pbt_period=10", "members=[{}]", "steps=10"): ("pbt_period=10 with steps=10", "pbt_period=2"),
  ("pbt_period=10", "members=[{}]", "max_num_checkpoints_to_keep=1"): ("write 2 or more",),
  ("pbt_fraction=0.6", "members=[{}]", "pbt_period=10"): ("pbt_fraction=0.6", "above 0.5"),
}
