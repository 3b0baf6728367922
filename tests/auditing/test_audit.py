"""The audit of a config finds what is planted into its step, and nothing in those that are right.

The slow tests plant the bugs of tests/mutants/mutants.yml, and audit other families:

  tools/test.sh -m slow tests/auditing/test_audit.py
"""

import ast
import importlib
import json
import runpy
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from support.slow_cases import slow

from maxlite.auditing import audit_run
from maxlite.auditing.audit_run import audit_spec, run_audit
from maxlite.auditing.compare import explain
from maxlite.auditing.shrink import shrink_model
from maxlite.auditing.variants import AXES, Variant, variants_of
from maxlite.config import load_config
from maxlite.config.layer_stacks import layer_specs
from maxlite.training.spec import spec_of

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "docs/examples/mistaken_losses.py"
PRESETS = sorted(path.stem for path in (ROOT / "configs/models").glob("*.yml"))
DENSE = ("decoder_block=llama", "base_num_decoder_layers=1", "scan_layers=false")


def on(accumulation=1, **degrees):
  return Variant(tuple(degrees.get(axis, 1) for axis in AXES), accumulation=accumulation)


def config_of(*words):
  return load_config(["dataset_type=synthetic", "jax_cache_dir=", *words])


def audit(*words, variants):
  return audit_spec(spec_of(config_of(*words)), num_meshes=0, variants=variants)


def with_loss(name):
  return (*DENSE, f"plugins={PLUGIN}", f"loss_type={name}")


def assert_clean(result):
  assert result.is_clean, [*map(str, result.differences), *result.mistakes]
  assert all(row.comparison is not None for row in result.outcomes), result.outcomes


def test_a_dense_model_is_equal_on_meshes_and_with_micro_batches():
  assert_clean(audit(*DENSE, variants=[on(fsdp=2, tensor=2), on(3)]))


def test_a_forgotten_sum_is_found_and_named():
  result = audit(*with_loss("forgotten_psum"), variants=[on(data=2)])
  assert not result.is_clean
  first = result.differences[0]
  assert first.column == "loss"
  assert "`data`" in first.explanation


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mistake", "expected"),
  [
    ("psum_too_many", "`fsdp`"),
    ("local_mean", "a mean of the shards' means"),
    ("shared_key", "random numbers per shard"),
  ],
)
def test_mistakes_of_plugins_name_the_axis(mistake, expected):
  result = audit(*with_loss(mistake), variants=[on(fsdp=2)])
  assert not result.is_clean
  assert any(expected in str(each) for each in result.differences), result.differences


@pytest.mark.slow
def test_a_correct_plugin_is_equal():
  assert_clean(audit(*with_loss("correct"), variants=[on(data=2), on(context=2), on(tensor=2)]))


def test_a_parameter_that_no_gradient_reaches_is_named():
  result = audit(*with_loss("frozen_by_accident"), variants=[])
  assert len(result.mistakes) == 1
  assert "no gradient reaches" in result.mistakes[0]
  assert "unembed" in result.mistakes[0] or "lm_head" in result.mistakes[0], result.mistakes


def test_a_name_to_save_that_no_activation_has_is_named():
  words = ("remat_policy=custom", "remat_saved_names=[query_proj,moe_route]")
  result = audit(*DENSE, *words, variants=[])
  (mistake,) = result.mistakes
  assert "moe_route" in mistake
  assert "query_proj" in mistake.partition("write some of")[2]


def test_the_command_returns_one_and_writes_json(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(audit_run, "variants_of", lambda *_args, **_options: [on(data=2)])
  file = tmp_path / "audit.json"
  cfg = config_of(*with_loss("forgotten_psum"), f"audit_json={file}")
  assert run_audit(cfg) == 1
  assert "DIFFERS" in capsys.readouterr().out
  written = json.loads(file.read_text())
  assert not written["clean"]
  assert written["variants"][0]["mesh"]["data"] == 2
  assert written["variants"][0]["differences"]


@pytest.mark.parametrize(
  ("variant", "factor", "expected"),
  [
    (on(tensor=2), 2.0, "twice the value, too large by `tensor`=2: a sum over `tensor` too many?"),
    (on(expert=4), 0.25, "too small by `expert`=4"),
    (on(expert=4), 2.0, "the square root of `expert`=4"),
    (on(data=2, fsdp=4), 8.0, "`data` x `fsdp`=8"),
    (on(3), 1 / 3, "3 micro-batches"),
    (on(), 1 / 16, "the 16 positions"),
    (on(data=2), 0.0, "zero instead"),
  ],
)
def test_factors_are_recognised(variant, factor, expected):
  want = np.random.default_rng(0).normal(size=(3, 4))
  assert expected in explain(variant, factor * want, want)


def kinds(model):
  """What distinguishes the layers of a model, besides sizes."""
  found = set()
  for layer in layer_specs(model):
    window = getattr(layer.mixer, "window", 0) > 0
    rope = layer.mixer.rope and (layer.mixer.rope.name, layer.mixer.rope.rotates)
    reads = getattr(layer.mixer, "reads", ""), layer.mixer.writes
    found.add((type(layer.mixer), type(layer.feed_forward), window, rope, reads))
  return found


@pytest.mark.parametrize("preset", PRESETS)
def test_the_tiny_model_has_the_layers_of_the_preset(preset):
  model = config_of(f"model_name={preset}").model
  tiny = shrink_model(model)
  assert kinds(tiny) == kinds(model)
  assert tiny.base_num_decoder_layers <= max(8, model.family.global_layer_every)
  assert tiny.base_num_query_heads <= 24


def test_the_first_mesh_of_several_axes_has_the_axes_of_the_config():
  cfg = config_of("ici_expert_parallelism=4", "ici_fsdp_parallelism=2")
  spec = spec_of(cfg)
  variants = variants_of(spec, spec.mesh, 3, 0, is_random=False)
  of_all_devices = [variant for variant in variants if variant.num_devices == 8]
  assert len(of_all_devices) == 3
  assert set(of_all_devices[0].mesh) == {"expert", "fsdp"}


# Families, and features beside them; each with a mesh of several axes.
CLEAN = {
  "gemma3": ("decoder_block=gemma3", "base_num_decoder_layers=6", "sliding_window_size=64"),
  "gpt-oss": ("model_name=gpt-oss-20b",),
  "qwen3-next": ("model_name=qwen3-next-80b-a3b",),
  "deepseek with multi-token prediction": ("model_name=deepseek2-tiny", "mtp_num_layers=1"),
  "muon and averages": (*DENSE, "opt_type=muon", "ema_decay=0.99"),
  "adapters in phases": (
    *DENSE,
    "lora_rank=4",
    "phases=[{name: a, train: [.*lora_.*], steps: 1}, {name: b, train: [.*norm.*], steps: 2}]",
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_no_false_alarm(name):
  variants = [on(fsdp=2, tensor=2), on(context=2), on(3)]
  if "decoder_block=llama" not in CLEAN[name]:
    variants.append(on(expert=2))
  assert_clean(audit(*CLEAN[name], variants=variants))


# A bug of mutants.yml, a config that uses what it breaks, and where it is seen.
MIXTURE = ("base_num_decoder_layers=1", "scan_layers=false")
RING = "use_ring_of_experts=true"
MUTANTS = {
  "dispatch-gradient-not-reversed": (MIXTURE, on(expert=2)),
  "expert-gradients-of-one-shard-only": (MIXTURE, on(fsdp=2)),
  "expert-gradients-scaled-by-the-shards": (MIXTURE, on(fsdp=2)),
  "router-gradient-lost-in-dispatch": (MIXTURE, on(expert=2)),
  "balance-loss-of-micro-batches": (MIXTURE, on(3)),
  "gradients-inflated-by-accumulation": (DENSE, on(3)),
  "vocabulary-shards-never-meet": (DENSE, on(tensor=2)),
  "slices-keep-their-own-gradients": (DENSE, on(2, data=2)),
  "embeddings-of-other-shards-added": (DENSE, on(2, data=2, tensor=2)),
  "gradient-norm-omits-experts": (("base_num_decoder_layers=1",), on(data=2)),
  "gathered-keys-of-another-chunk": (DENSE, on(context=2)),
}


def plant(name, monkeypatch):
  """Change the code of a function of the product as mutants.yml says, until the test ends."""
  module = runpy.run_path(str(ROOT / "tools/inspect/mutants.py"))
  entries = yaml.safe_load((ROOT / "tests/mutants/mutants.yml").read_text())
  entry = next(each for each in entries if each["name"] == name)
  mutant = module["Mutant"](**entry)
  source = mutant.planted((ROOT / mutant.file).read_text())
  code = compile(ast.parse(source), mutant.file, "exec")
  target = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
  for part in mutant.at.partition("::")[2].split("."):
    code = next(
      each for each in code.co_consts if isinstance(each, types.CodeType) and each.co_name == part
    )
    target = getattr(target, part)
    while hasattr(target, "__wrapped__"):
      target = target.__wrapped__
    if isinstance(target, types.FunctionType):
      break  # functions inside of it are constants of its code
  monkeypatch.setattr(target, "__code__", code)


@pytest.mark.parametrize(
  "name", [name if name == "vocabulary-shards-never-meet" else slow(name) for name in MUTANTS]
)
def test_planted_bugs_are_found(name, monkeypatch):
  words, variant = MUTANTS[name]
  plant(name, monkeypatch)
  jax.clear_caches()
  result = audit(*words, variants=[variant])
  monkeypatch.undo()
  jax.clear_caches()
  assert result.differences, name
