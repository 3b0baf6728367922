"""The rules of population-based training and of searches."""

from maxlite.config.rules import Rules, Values


def population(v: Values) -> Rules:
  text = "only stacked members are exchanged on their devices; write ensemble_strategy=stacked"
  is_other = v.ensemble_strategy not in ("auto", "stacked")
  yield v.pbt_period and is_other, "pbt_period ensemble_strategy", text
  text = "the population keeps its size; write asha_reduction_factor=0 or pbt_period=0"
  yield v.pbt_period and v.asha_reduction_factor, "pbt_period asha_reduction_factor", text
  text = f"no exchange before the last step; write pbt_period={max(v.steps // 4, 1)}"
  yield v.pbt_period >= v.steps, "pbt_period steps", text
  text = "a member saved later than others resumes where they do; write 2 or more"
  keys, one_kept = "max_num_checkpoints_to_keep pbt_period", v.max_num_checkpoints_to_keep == 1
  yield v.pbt_period and one_kept and v.enable_checkpointing, keys, text
  text = "nothing changes them; write pbt_period=100, or pbt_hyperparameters={}"
  is_unused = v.ensemble_key and v.pbt_hyperparameters and not v.pbt_period
  yield is_unused, "pbt_hyperparameters pbt_period", text
  text = "each phase has its optimizer; write pbt_hyperparameters={}"
  yield v.pbt_hyperparameters and v.phases, "pbt_hyperparameters phases", text


def search(v: Values) -> Rules:
  for key in ("members", "sweep"):
    text = f"a search proposes the members; write search={{}}, or no {key}"
    yield v.search and vars(v)[key], f"search {key}", text
  for key in ("pbt_period", "asha_reduction_factor"):
    text = f"compares members of one start, not of several rounds; write {key}=0"
    yield v.search and vars(v)[key], f"{key} search", text
  text = "later rounds need the members of earlier ones; write enable_checkpointing=true"
  yield v.search and not v.enable_checkpointing, "search enable_checkpointing", text
