"""Phases as they are written, and what is wrong with those that do not work."""

import pytest

from maxlite.config import ConfigError, load_config
from maxlite.config.phases import phases_of, warmup_of

FIT = "{name: fit, train: [layers/.*], steps: 20, learning_rate: 1e-3}"
TUNE = "{name: tune, train: '.*norm.*', until: {metric: loss, max_steps: 9, patience: 3}}"

DRAFT = "{name: draft, train: [draft_head/.*], steps: 9, loss: match_head}"


def load(phases, **keys):
  words = [f"{key}={value}" for key, value in ({"learning_rate": 0.5} | keys).items()]
  return load_config([*words, f"phases=[{phases}]"], needs_data=False)


def test_a_phase_has_its_own_keys_and_else_the_run_s():
  turn = "{name: turn, train: x, steps: 1, optimizer: muon}"
  cfg = load(f"{FIT}, {TUNE}, {turn}", phase_warmup="{fit: 7}", opt_type="lion")
  fit, tune, turn = phases_of(cfg)
  assert turn.optimizer.opt_type == "muon"
  assert (fit.name, fit.train, fit.loss, fit.steps) == ("fit", ("layers/.*",), "next_token", 20)
  assert (fit.optimizer.learning_rate, tune.optimizer.learning_rate) == (1e-3, 0.5)
  assert fit.optimizer.opt_type == tune.optimizer.opt_type == "lion"
  assert tune.train == (".*norm.*",)
  assert (tune.until.metric, tune.until.max_steps, tune.until.patience) == ("loss", 9, 3)
  assert warmup_of(cfg) == {"fit": 7}


@pytest.mark.parametrize(
  ("phases", "keys", "says"),
  [
    ("{name: a, train: [x], steps: 0}", {}, "steps=0 is no number of steps from 1"),
    ("{name: a, train: [x]}", {}, "needs steps or until"),
    ("{train: [x], steps: 1}", {}, "has no name; write name: fit"),
    ("{name: a, steps: 1}", {}, "has no train"),
    ("{name: a, train: [], steps: 1}", {}, "is no list of regexes"),
    ("{name: a, train: [x], steps: 1, lerning_rate: 1}", {}, "did you mean learning_rate?"),
    ("{name: a, train: [x], steps: 1, opt_type: lion}", {}, "did you mean optimizer?"),
    ("{name: a, train: [x], steps: 1, optimizer: lino}", {}, "did you mean lion?"),
    ("{name: a, train: [x], steps: 1, learning_rate: fast}", {}, "is not a finite number"),
    ("{name: a, train: [x], steps: 1, loss: next_tokn}", {}, "did you mean next_token?"),
    (f"{FIT}, {FIT}", {}, "name=fit is also that of phases[0]"),
    (FIT, {"phase_warmup": "{fti: 3}"}, "did you mean fit?"),
    (FIT, {"phase_warmup": "{fit: 0}"}, "fit=0 is no number of steps from 1"),
    ("", {"phase_warmup": "{fit: 3}"}, "there are no phases"),
    ("{name: a, train: [x], until: {metric: loss}}", {}, "is no whole condition"),
    ("{name: a, train: [x], until: {metric: loss, max_steps: 2, below: low}}", {}, "is no number"),
    (DRAFT, {}, "is a loss of draft heads, and num_draft_heads=0; write num_draft_heads=3"),
    (FIT, {"num_draft_heads": 2}, "no phase trains them; write phases with loss: match_head"),
    (DRAFT, {"num_draft_heads": 9, "max_target_length": 8}, "write num_draft_heads=3"),
    (
      DRAFT,
      {"num_draft_heads": 1, "ici_tensor_parallelism": 4, "base_emb_dim": 34},
      "4 shards do not divide 34",
    ),
    (
      FIT,
      {"members": "[{learning_rate: 1}]", "phase_strategy": "separate"},
      "a member's phases are one program; write phase_strategy=auto or switch",
    ),
    (
      FIT,
      {"members": "[{phases: [{name: a, train: x, steps: 0}]}]"},
      "steps=0 is no number of steps from 1",
    ),
  ],
)
def test_mistakes(phases, keys, says):
  with pytest.raises(ConfigError) as error:
    load(phases, **keys)
  message = str(error.value)
  assert says in message
  assert "\n" not in message
