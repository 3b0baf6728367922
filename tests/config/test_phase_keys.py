"""Parsing of phases, and the errors of wrong ones."""

import dataclasses

import pytest

from maxlite.config import load_config
from maxlite.config.phases import initial_phases_of, phases_of, without_data
from maxlite.errors import UserError

FIT = "{name: fit, train: [layers/.*], steps: 20, learning_rate: 1e-3}"
TUNE = "{name: tune, train: '.*norm.*', until: {metric: loss, max_steps: 9, patience: 3}}"

DRAFT = "{name: draft, train: [draft_head/.*], steps: 9, loss: match_head}"
WARM = "{name: warm, train: [x]}"


def shared(name):
  return f"{{name: shared, train: [layers/.*], steps: 1, share_optimizer_state: {name}}}"


def load(phases, **keys):
  words = [f"{key}={value}" for key, value in ({"learning_rate": 0.5} | keys).items()]
  return load_config([*words, f"phases=[{phases}]"], needs_data=False)


CHAT = "{name: chat, train: x, steps: 1, dataset_type: jsonl, dataset_path: [a.jsonl, b.jsonl]}"
SMALL = "{name: small, train: x, steps: 1, per_device_batch_size: 2}"


@pytest.mark.parametrize(
  ("eval_keys", "fraction"),
  [({}, 0.05), ({"eval_split": "tail"}, 0.0), ({"eval_dataset_path": "held.txt"}, 0.0)],
)
def test_phase_data_overrides_the_data_of_the_run(eval_keys, fraction):
  cfg = load(f"{FIT}, {CHAT}, {SMALL}", eval_fraction=0.05, **eval_keys)
  fit, chat, small = (phase.data for phase in phases_of(cfg))
  assert fit == cfg.data
  assert (chat.dataset_type, chat.dataset_path) == ("jsonl", ("a.jsonl", "b.jsonl"))
  # Not evaluated, but documents that the run holds out by content stay held out.
  assert (chat.eval_fraction, chat.eval_dataset_path) == (fraction, ())
  assert small == dataclasses.replace(cfg.data, per_device_batch_size=2.0)
  sized = load(f"{FIT}, {SMALL}", global_batch_size=24)
  assert [phase.data.global_batch_size for phase in phases_of(sized)] == [24, 0]


def test_data_of_a_phase_may_change(tmp_path):
  moved = CHAT.replace("a.jsonl", "c.jsonl")
  longer = CHAT.replace("steps: 1", "steps: 2")
  before, other, no_more = (load(phase).phasing.phases for phase in (CHAT, moved, longer))
  assert before != other
  assert without_data(before) == without_data(other) != without_data(no_more)


def test_phase_keys_override_those_of_the_run():
  turn = "{name: turn, train: x, steps: 1, optimizer: muon}"
  cfg = load(f"{FIT}, {TUNE}, {turn}", initial_phases="{fit: 7}", opt_type="lion")
  fit, tune, turn = phases_of(cfg)
  assert turn.optimizer.opt_type == "muon"
  assert (fit.name, fit.train, fit.loss, fit.steps) == ("fit", ("layers/.*",), "next_token", 20)
  assert (fit.optimizer.learning_rate, tune.optimizer.learning_rate) == (1e-3, 0.5)
  assert fit.optimizer.opt_type == tune.optimizer.opt_type == "lion"
  assert tune.train == (".*norm.*",)
  assert (tune.until.metric, tune.until.max_steps, tune.until.patience) == ("loss", 9, 3)
  assert initial_phases_of(cfg) == {"fit": 7}
  assert (fit.repeat_batch, fit.share_optimizer_state) == (1, None)


def test_an_initial_phase_needs_no_length():
  cfg = load(f"{WARM}, {FIT}, {shared('fit')}", initial_phases="{warm: 7}")
  warm, _, shares = phases_of(cfg)
  assert (warm.steps, warm.until) == (None, None)
  assert shares.share_optimizer_state == "fit"


@pytest.mark.parametrize(
  ("phases", "keys", "says"),
  [
    ("{name: a, train: [x], steps: 0}", {}, "steps=0 is below 1; write steps=1"),
    ("{name: a, train: ['(x'], steps: 1}", {}, "'(x', which is not a regex: missing )"),
    ("{name: a, train: [x]}", {}, "needs either steps or until"),
    ("{train: [x], steps: 1}", {}, "has no name; write name: fit"),
    ("{name: a, steps: 1}", {}, "has no train"),
    ("{name: a, train: [], steps: 1}", {}, "is not a list of regexes"),
    ("{name: a, train: [x], steps: 1, lerning_rate: 1}", {}, "did you mean learning_rate?"),
    ("{name: a, train: [x], steps: 1, opt_type: lion}", {}, "did you mean optimizer?"),
    ("{name: a, train: [x], steps: 1, optimizer: lino}", {}, "did you mean lion?"),
    ("{name: a, train: [x], steps: 1, learning_rate: fast}", {}, "is not a finite number"),
    ("{name: a, train: [x], steps: 1, loss: next_tokn}", {}, "did you mean next_token?"),
    ("{name: a, train: [x], steps: 1, repeat_batch: 0}", {}, "repeat_batch=0 is below 1"),
    (f"{FIT}, {shared('fti')}", {}, "is not another phase with its own state; did you mean fit?"),
    (f"{FIT}, {shared('shared')}", {}, "share_optimizer_state=shared is not another phase"),
    (
      f"{FIT}, {shared('fit')[:-1]}, optimizer: lion}}",
      {},
      "share_optimizer_state=fit trains by adamw, and this phase by lion: write optimizer: adamw",
    ),
    ("{name: a, train: [x], steps: 1, until: {metric: loss}}", {}, "needs either steps or until"),
    (WARM, {}, "or, for a phase that runs only at the start, initial_phases={warm: 20}"),
    (WARM, {"initial_phases": "{warm: 3}"}, "all phases run only at the start; write steps: 20"),
    (f"{FIT}, {FIT}", {}, "name=fit is also the name of phases[0]"),
    (FIT, {"initial_phases": "{fti: 3}"}, "did you mean fit?"),
    (FIT, {"initial_phases": "{fit: 0}"}, "fit=0 is below 1; write fit=1"),
    ("", {"initial_phases": "{fit: 3}"}, "there are no phases"),
    ("{name: a, train: [x], until: {metric: loss}}", {}, "is not a complete condition"),
    (
      "{name: a, train: [x], until: {metric: loss, max_steps: 2, below: low}}",
      {},
      "is not a finite number",
    ),
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
    (CHAT.replace("jsonl,", "jsnl,"), {}, "did you mean jsonl?"),
    (f"{FIT}, {SMALL.replace('2', '0')}", {}, "phases[1]: per_device_batch_size=0.0: a step needs"),
    (
      "{name: a, train: x, steps: 1, dataset_type: text}",
      {"dataset_type": "synthetic", "vocab_size": 200},
      "phases[0]: vocab_size=200 with tokenizer_type=byte: bytes need 258 ids",
    ),
    (
      "{name: a, train: x, steps: 1, tokenizer_type: huggingface}",
      {},
      "applies to the whole run; write it once, outside of phases",
    ),
    (
      f"{FIT}, {SMALL}",
      {"phase_strategy": "switch"},
      "one program needs batches of one size, and phase fit has 8; write phase_strategy=",
    ),
    (
      f"{FIT}, {SMALL}",
      {"members": "[{learning_rate: 1}]"},
      "members[0]: phase small has its own data, but all members read the same batches",
    ),
    (
      FIT,
      {"members": "[{phases: [{name: a, train: x, steps: 0}]}]"},
      "steps=0 is below 1; write steps=1",
    ),
  ],
)
def test_mistakes(phases, keys, says):
  with pytest.raises(UserError) as error:
    load(phases, **keys)
  message = str(error.value)
  assert says in message
  assert "\n" not in message


def test_data_files_of_a_phase_must_exist(tmp_path):
  with pytest.raises(UserError, match=r"phases\[0\]: dataset_path=.* a.jsonl matches no file"):
    load_config([f"phases=[{CHAT}]"])
  files = [tmp_path / name for name in "ab"]
  for file in files:
    file.touch()
  phase = CHAT.replace("a.jsonl", str(files[0])).replace("b.jsonl", str(files[1]))
  assert phases_of(load_config([f"phases=[{phase}]"]))[0].data.dataset_path[0] == str(files[0])
