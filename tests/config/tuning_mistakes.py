"""Mistakes in the keys of population-based training and searches, for test_mistakes.py."""

COUNTS = "sampler: tpe, rounds: 2, num_members: 3"
MUP = ("parametrization=mup", "mup_base_emb_dim=256")
LADDER = "ladder={budgets: {1e15: [128, 256, 384, 512]}}"
SPACE = "space: {learning_rate: {uniform: [0.1, 1]}}"
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
  ("members=[{}]", "ensemble_strategy=processes", "enable_checkpointing=false"): (
    "ensemble_strategy=processes",
    "enable_checkpointing=true",
  ),
  ("members=[{}]", "ensemble_strategy=submesh", "num_processes=2", "asha_reduction_factor=2"): (
    "asha_reduction_factor=2",
    "ensemble_strategy=stacked or fused",
  ),
  ("pbt_period=10", "members=[{}]", "asha_reduction_factor=2"): ("asha_reduction_factor=0",),
  ("pbt_period=10", "members=[{}]", "steps=10"): ("pbt_period=10 with steps=10", "pbt_period=2"),
  ("pbt_period=10", "members=[{}]", "max_num_checkpoints_to_keep=1"): ("write 2 or more",),
  ("pbt_fraction=0.6", "members=[{}]", "pbt_period=10"): ("pbt_fraction=0.6", "above 0.5"),
  ("search={sampler: tpe}",): ("search: has no rounds", "rounds: 4"),
  (f"search={{{COUNTS}, space: {{}}}}",): ("space={} has no keys",),
  (f"search={{{COUNTS}, space: {{steps: {{uniform: [1, 2]}}}}}}",): (
    "search.space: steps=",
    "shared",
  ),
  (f"search={{{COUNTS}, space: {{head_dm: {{uniform: [1, 2]}}}}}}",): ("head_dm=", "head_dim?"),
  (f"search={{{COUNTS}, space: {{head_dim: [1, 2]}}}}",): ("head_dim=[1, 2] is not a rule",),
  (f"search={{{COUNTS}, space: {{head_dim: {{choice: [8, x]}}}}}}",): (
    "search.space",
    "head_dim=x",
  ),
  (f"search={{{COUNTS}, {SPACE}, sed: 1}}",): ("search: sed=1", "did you mean seed?"),
  (f"search={{{COUNTS.replace('tpe', 'tpu')}, {SPACE}}}",): ("sampler=tpu", "tpe?"),
  (f"search={{{COUNTS.replace('2', '0')}, {SPACE}}}",): ("rounds=0", "below 1"),
  (f"search={{{COUNTS.replace('3', '4096')}, {SPACE}}}",): ("8192 members are more than 4096",),
  (f"search={{{COUNTS}, {SPACE}}}", "members=[{}]"): ("search proposes the members", "no members"),
  (f"search={{{COUNTS}, {SPACE}}}", "pbt_period=10"): ("pbt_period=10 with search", "pbt_period=0"),
  (f"search={{{COUNTS}, {SPACE}}}", "enable_checkpointing=false"): ("enable_checkpointing=true",),
  (LADDER,): ("ladder=", "with parametrization=standard", "mup_base_emb_dim=256"),
  (LADDER, *MUP, "sweep={seeds: 2}"): ("a ladder has its own members", "no sweep"),
  (LADDER, *MUP, "pbt_period=10"): ("pbt_period=10 with ladder", "write pbt_period=0"),
  (LADDER, *MUP, "phases=[{name: a, train: x, steps: 1}]"): ("ladder", "phases=[]"),
  (f"{LADDER[:-1]}, seds: 2}}", *MUP): ("ladder: seds=2", "did you mean seeds?"),
  ("ladder={seeds: 2}", *MUP): ("ladder: has no budgets", "{budgets: {1e12:"),
  ("ladder={budgets: {}}", *MUP): ("budgets={} has no budgets",),
  ("ladder={budgets: {x: [128, 256, 384, 512]}}", *MUP): ("budget=x is not a finite number",),
  (LADDER.replace("[128, ", "["), *MUP): ("ladder.budgets: 1e15=", "fewer than 4 widths"),
  (LADDER.replace("128", "512"), *MUP): ("ladder.budgets: 1e15=", "a width twice"),
  (LADDER.replace("128", "x"), *MUP): ("ladder.budgets: 1e15=", "a list of whole numbers"),
  (LADDER.replace("128", "100"), *MUP): ("width 100", "is not a multiple of 64; write 64"),
  (LADDER.replace("}}", ", 10e14: [128, 256, 384, 512]}}"), *MUP): ("10e14 is there twice",),
  (f"{LADDER[:-1]}, seeds: 4096}}", *MUP): ("16384 members are more than 4096",),
}
