"""A ladder's members cost their budgets, and its report says where the minima are."""

import contextlib
import json

import pytest
from support.ensemble_runs import ONE_EACH, TINY, rows_of
from support.tiny import KEYS
from support.tiny_run import Output, keys_in

from maxlite.config import load_config
from maxlite.config.ladder import budget_name, ladder_of, width_settings
from maxlite.config.raw_values import FrozenMapping
from maxlite.ensemble.run.ladder import next_cells
from maxlite.ensemble.run_members import train_members_of
from maxlite.errors import UserError
from maxlite.evaluation.isoflop import Cell, fit_ladder
from maxlite.training.program import build_program, flops_per_step
from maxlite.training.spec import spec_of

BUDGET = 1.5e9
WIDTHS = (8, 16, 24, 32)
MUP = {"parametrization": "mup", "mup_base_emb_dim": 16, "learning_rate_schedule_steps": -1}

OWN = {"run_name": "ens", "eval_interval": 0, "log_period": 100}


def config(folder, budgets=f"{{{BUDGET}: {list(WIDTHS)}}}", **keys):
  keys = KEYS | keys_in(folder, **(TINY | MUP | ONE_EACH | OWN | keys))
  arguments = [f"{name}={value}" for name, value in keys.items()]
  return load_config([*arguments, f"ladder={{budgets: {budgets}, seeds: 1}}"], needs_data=False)


def train(cfg):
  output = Output()
  with contextlib.redirect_stdout(output):
    assert train_members_of(cfg) == 0
  return output.getvalue()


@pytest.mark.slow
def test_members_cost_their_budget(root):
  """By the FLOPs that solo runs of the members report."""
  folder = root / "ladder"
  output = train(config(folder))
  assert "ladder: 4 cells x 1 seeds, 6e+09 FLOPs" in output
  content = json.loads((folder / "ens/ladder.json").read_text())
  [budget] = content["budgets"]
  assert [cell["width"] for cell in budget["cells"]] == list(WIDTHS)
  for cell in budget["cells"]:
    name = f"1.5e9_w{cell['width']}_s0"
    saved = str(folder / "ens/members" / name / "config.yml")
    member = load_config([saved, "trust_plugins=true"], needs_data=False)
    width = cell["width"]
    model = member.model
    assert (model.base_emb_dim, model.base_mlp_dim) == (width, 2 * width)
    assert (model.base_num_query_heads, model.base_num_kv_heads) == (width // 4, width // 8)
    last = rows_of(folder, name)[-1]
    assert last["step"] == member.run.steps
    assert cell["losses"] == [last["eval_loss"]]
    [flops] = flops_per_step(build_program(spec_of(member)))
    assert abs(flops * member.run.steps / BUDGET - 1) < 0.01
    assert cell["num_tokens"] == member.run.steps * 16 * 16
  assert (folder / "ens/ladder.png").stat().st_size > 10_000
  text = (folder / "ens/ladder.md").read_text()
  assert "| FLOPs |" in text
  assert "Over seeds" not in output  # cells of one ladder are not seeds of one configuration
  assert "Ladder, by final held-out loss" in train(config(folder))  # which only fits again


def test_a_budget_needs_steps(root):
  with pytest.raises(UserError, match=r"ladder.budgets: width \d+ takes \d+ steps of 16 x 16"):
    train(config(root / "small", "{1e8: [8, 16, 24, 32]}"))


def advice(cfg, best):
  """What follows if the losses of all budgets are lowest at the width `best`."""
  ladder = ladder_of(cfg.ensemble.ladder)
  cells = []
  for rung in ladder.rungs:
    for width in rung.widths:
      loss = 3 + (width / best + best / width) / 10
      cells.append(Cell(rung.budget, width, 100 * width, 1e6, (loss,)))
  return next_cells(cfg.model, ladder, fit_ladder(cells), (16, 16))


def test_the_next_cells_continue_beyond_the_edge(root):
  """The command that is printed is a ladder, with wider or narrower members."""
  cfg = config(root / "next", "{1e10: [16, 24, 32, 48]}")  # a width of 104 has too few steps
  assert advice(cfg, 26) == ""
  command, longer = advice(cfg, 80).split("'")[:2]
  assert command == "next cells: the same command with "
  assert longer == "ladder={budgets: {1e10: [16, 24, 32, 48, 72]}, seeds: 1}"
  mup = [f"{key}={value}" for key, value in MUP.items()]
  assert ladder_of(load_config([longer, *mup, "base_emb_dim=32"]).ensemble.ladder).seeds == 1
  assert "1e10: [8, 16, 24, 32, 48]" in advice(cfg, 10)  # none is narrower than 8
  at_the_end = config(root / "next", "{1e10: [8, 16, 24, 32]}")
  assert advice(at_the_end, 4).startswith("no cell beyond the edge fits: write a smaller base")


def test_heads_of_all_kinds_grow_with_the_width():
  words = ["dataset_type=synthetic", "decoder_block=bamba", "attention_layers=[1]"]
  model = load_config([*words, "base_emb_dim=64", "mamba_num_heads=16"]).model
  wider = width_settings(model, 128)
  assert wider["mamba_num_heads"] == 32
  assert wider["base_num_query_heads"] == 2 * model.base_num_query_heads


def test_names_of_budgets():
  names = [budget_name(budget) for budget in (1e12, 3.2e13, 12345e10)]
  assert names == ["1e12", "3.2e13", "1.234e14"]
  rungs = ladder_of(FrozenMapping([("budgets", FrozenMapping([("1e3", ("4", "1", "3", "2"))]))]))
  assert rungs.rungs[0].widths == (1, 2, 3, 4)
