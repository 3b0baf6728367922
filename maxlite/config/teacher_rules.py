"""The rules between the keys of a teacher, in the form of rules.py."""

from maxlite.config.raw_values import show
from maxlite.config.registry import TAUGHT_LOSSES
from maxlite.config.rules import Rules, Values
from maxlite.config.schema import DEFAULTS

TEACHER_KEYS = tuple(key for key in DEFAULTS if key.startswith(("teacher_", "distill_")))


def teacher_rules(v: Values) -> Rules:
  """The rules of loss `distill`."""
  losses = [phase.get("loss", v.loss_type) for phase in v.phases] or [v.loss_type]
  is_taught, key = any(loss in TAUGHT_LOSSES for loss in losses), "loss_type"
  text = "needs a teacher; write teacher_path=FOLDER of a run, an ensemble or of Hugging Face"
  keys = "phases teacher_path" if v.phases else f"{key} teacher_path"
  yield is_taught and not v.teacher_path, keys, text
  for name in TEACHER_KEYS:
    text = f"is only read by loss distill; write {key}=distill, or {name}={show(DEFAULTS[name])}"
    yield not is_taught and vars(v)[name] != DEFAULTS[name], f"{name} {key}", text
  text = f"members have no teacher; train students as solo runs, or write {key}=next_token"
  yield is_taught and v.ensemble_key, f"{key} {v.ensemble_key}", text
  text = "logits are divided by it; write distill_temperature=1"
  yield v.distill_temperature == 0, "distill_temperature", text
  text = f"there are fewer tokens; write distill_top_k={v.vocab_size} or less, or 0 for all"
  yield v.distill_top_k > v.vocab_size, "distill_top_k vocab_size", text
