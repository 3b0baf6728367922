"""The audit of a config finds what is planted into its step, and nothing in those that are right.

The slow tests plant the bugs of tests/mutants/mutants.yml, and audit other families:

  tools/test.sh -m slow tests/auditing/test_audit.py
"""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from support.slow_cases import slow

from maxlite.auditing import audit_run
from maxlite.auditing.audit_run import audit_spec, run_audit
from maxlite.auditing.compare import explain
from maxlite.auditing.narrow_sums import narrow_sums
from maxlite.auditing.shrink import shrink, shrink_model
from maxlite.auditing.variants import AXES, Variant, variants_of
from maxlite.config import load_config
from maxlite.models.layer_stacks import layer_specs
from maxlite.training.spec import spec_of

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "docs/examples/mistaken_losses.py"
MODELS = ROOT / "configs/models"
PRESETS = sorted(path.stem for path in MODELS.glob("*.yml"))
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
  assert_clean(audit(*DENSE, variants=[on(2, fsdp=2, tensor=2)]))


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


# A preset of every family.
FAMILIES = {
  re.search(r"^decoder_block: *(\w+)", (MODELS / f"{preset}.yml").read_text(), re.M)[1]: preset
  for preset in PRESETS
}


@pytest.mark.parametrize(
  "preset", [each if each == "qwen3-8b" else slow(each) for each in FAMILIES.values()]
)
def test_no_family_sums_in_16_bit_types(preset):
  spec = spec_of(config_of(f"model_name={preset}", "dtype=bfloat16", "weight_dtype=bfloat16"))
  assert narrow_sums(shrink(spec).spec, spec.model) == ([], [])


def test_the_command_finds_and_names_a_forgotten_sum(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(audit_run, "variants_of", lambda *_args, **_options: [on(data=2)])
  file = tmp_path / "audit.json"
  cfg = config_of(*with_loss("forgotten_psum"), f"audit_json={file}")
  assert run_audit(cfg) == 1
  assert "DIFFERS" in capsys.readouterr().out
  written = json.loads(file.read_text())
  assert not written["clean"]
  assert written["variants"][0]["mesh"]["data"] == 2
  first = written["variants"][0]["differences"][0]
  assert first["column"] == "loss"
  assert "`data`" in first["explanation"]


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
  "sparse attention": ("model_name=deepseek3.2-tiny",),
  "state-space layers": ("model_name=granite4-h-tiny-7b",),
  "deepseek with multi-token prediction": ("model_name=deepseek2-tiny", "mtp_num_layers=1"),
  "muon and averages": (*DENSE, "opt_type=muon", "ema_decay=0.99"),
  "muon of latent attention": ("model_name=deepseek2-tiny", "opt_type=muon", "muon_split=heads"),
  "muon with muP": (*DENSE, "opt_type=muon", "parametrization=mup", "mup_base_emb_dim=16"),
  "spikes": (*DENSE, "skip_step_on_spikes=true"),
  "QK-clip": (*DENSE, "qk_clip_threshold=100"),
  "QK-clip of latent attention": ("model_name=deepseek2-tiny", "qk_clip_threshold=100"),
  "adafactor": (*DENSE, "opt_type=adafactor"),
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
  is_scanned = spec_of(config_of(*CLEAN[name])).model.scan_layers
  variants.append(Variant(scan=not is_scanned))
  assert_clean(audit(*CLEAN[name], variants=variants))


AUDIT_MUTANTS = runpy.run_path(str(ROOT / "tools/inspect/audit_mutants.py"))
AUDIT_RANDOM = runpy.run_path(str(ROOT / "tools/inspect/audit_random.py"))
BUGS = {each.name: each for each in AUDIT_MUTANTS["MUTANTS"]["read_mutants"]() if each.audit}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(name):
  assert AUDIT_MUTANTS["findings"](BUGS[name])


@pytest.mark.slow
def test_a_random_key_that_is_used_twice_is_found():
  bug = AUDIT_MUTANTS["MUTANTS"]["Mutant"](
    name="noise-of-one-key-twice",
    bug="two noises of a router are drawn from one key",
    at="maxlite/layers/moe/router.py::Router._jitter",
    find='return jax.random.uniform(self.make_rng("jitter"),',
    replace=(
      'key = self.make_rng("jitter")\n'
      "return jax.random.normal(key, dtype=x_BTD.dtype) * jax.random.uniform(key,"
    ),
    tests="",
    audit="base_num_decoder_layers=1 scan_layers=false router_jitter=0.1",
  )
  assert any("one random key" in line for line in AUDIT_MUTANTS["findings"](bug))


@pytest.mark.slow
@pytest.mark.parametrize("words", sorted({each.audit for each in BUGS.values()}))
def test_without_the_bug_nothing_is_found(words):
  assert AUDIT_MUTANTS["findings_of"](words) == []


def test_most_bugs_of_a_step_are_planted():
  assert len(BUGS) >= 50
  for bug in BUGS.values():
    AUDIT_MUTANTS["config_of"](bug.audit)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1012))
def test_random_configs_raise_no_alarm(seed):
  spec = spec_of(load_config(AUDIT_RANDOM["random_config"](seed)))
  result = audit_spec(spec, num_meshes=-1, seed=seed, num_variants=2)
  assert result.is_clean, [*map(str, result.differences), *result.mistakes]
