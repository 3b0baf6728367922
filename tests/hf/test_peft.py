"""Exported adapters with their base model compute what the run does, also in peft."""

import json
from importlib.util import find_spec

import jax
import numpy as np
import pytest
from adapter_runs import CASES, FIXTURES, SHARED_TENSORS, make_run, overrides_of
from config_variants import register_mistral4
from conversion import converted
from safetensors.numpy import load_file
from support.slow_cases import fast_only, slow

import maxlite
from maxlite.config.model_families import MODELS
from maxlite.hf.families import FAMILIES

pytestmark = pytest.mark.usefixtures("fast_programs")


# Families in which peft would take adapters of other MLPs for those of routed experts.
SEPARATE_EXPERTS = {
  family
  for family, hf in FAMILIES.items()
  if MODELS[hf.decoder_block].is_moe and any("{expert}" in rule.theirs for rule in hf.block)
} - {"qwen2_moe", "qwen3_5_moe_text"}
FAST_CASES = ("llama", "gpt_oss with experts")


@pytest.fixture(scope="module", params=CASES)
def exported(request, tmp_path_factory):
  """(family, root) with the run `tuned`, exported to `adapter` and `merged`."""
  family, _, of_experts = request.param.partition(" with ")
  root = tmp_path_factory.mktemp(family)
  trained = "lora"
  if family in SEPARATE_EXPERTS:
    trained = "attention|moe/lora"
  if family in SHARED_TENSORS:
    trained = "moe/lora"
  make_run(root, family, "tuned", trained, of_experts=bool(of_experts))
  overrides = overrides_of(root, "tuned")
  command = ["to_peft", FIXTURES / family, *overrides, f"output_path={root}/adapter"]
  assert converted(command) == 0
  assert converted(["to_hf", *overrides, f"output_path={root}/merged"]) == 0
  return family, root


@pytest.mark.parametrize("exported", fast_only(CASES, *FAST_CASES), indirect=True)
def test_base_and_adapters_equal_the_merged_model(exported):
  family, root = exported
  config = json.loads((root / "adapter" / "adapter_config.json").read_text())
  adapters = load_file(root / "adapter" / "adapter_model.safetensors")
  base = load_file(FIXTURES / family / "model.safetensors")
  merged = load_file(root / "merged" / "model.safetensors")
  assert config["base_model_name_or_path"] == str(FIXTURES / family)
  changed = set()
  num_adapted = 0
  for name, a in adapters.items():
    if not name.endswith(".lora_A.weight"):
      continue
    b = adapters[name.replace(".lora_A.", ".lora_B.")]
    module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
    ends = tuple(f".{target}" for target in config["target_modules"])
    changes = {f"{module}.weight": b @ a * (config["lora_alpha"] / config["r"])}
    if module.endswith(("experts", "experts.base_layer")):
      changes = changes_of_experts(module, a, b, config, base)
    else:
      assert f".{module}".endswith(ends), module
      assert a.shape[0] == b.shape[1] == config["r"]
    num_adapted += 1
    for tensor, change in changes.items():
      np.testing.assert_allclose(merged[tensor], base[tensor] + change, atol=1e-6)
      changed.add(tensor)
  assert len(adapters) == 2 * num_adapted > 0
  for name in set(base) - changed:
    assert merged[name].tobytes() == base[name].tobytes(), name


def changes_of_experts(module, a, b, config, base):
  """Return {tensor of the base: its change} by an adapter of one tensor of all experts.

  `a` is (experts * rank, in) and `b` is (out, rank * experts), as peft.tuners.lora.layer has them.
  """
  parameter = "gate_up_proj" if module.endswith(".base_layer") else "down_proj"
  experts = module.removesuffix(".base_layer")
  (key,) = (key for key in config["target_parameters"] if key.endswith(parameter))
  assert f".{experts}.{parameter}".endswith(f".{key}")
  rank = config["rank_pattern"][key]
  num_experts = len(a) // rank
  a = a.reshape(num_experts, rank, -1)
  b = b.reshape(-1, rank, num_experts)
  change = np.einsum("ore,eri->eoi", b, a) * (config["alpha_pattern"][key] / rank)
  fused = f"{experts}.{parameter}"
  if fused in base:
    is_transposed = base[fused].shape != change.shape
    return {fused: change.swapaxes(1, 2) if is_transposed else change}
  if "granite" in config["base_model_name_or_path"]:
    names = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}
    return {f"{experts.removesuffix('experts')}{names[parameter]}": change}
  names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
  changes = {}
  for name, part in zip(names[parameter], np.split(change, len(names[parameter]), 1), strict=True):
    for expert in range(num_experts):
      changes[f"{experts}.{expert}.{name}.weight"] = part[expert]
  return changes


@pytest.mark.hf
@pytest.mark.skipif(
  not all(map(find_spec, ("torch", "transformers", "peft"))),
  reason="needs torch, transformers and peft: pip install -e .[hf]",
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses deprecated names of transformers
# peft compares its own patterns of experts' parameters with names of modules only.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
@pytest.mark.parametrize("exported", fast_only(CASES, *FAST_CASES), indirect=True)
def test_peft_computes_what_the_run_does(exported):
  import torch
  from peft import PeftModel
  from transformers import AutoConfig, AutoModelForCausalLM

  register_mistral4()
  family, root = exported
  tokens_BT = np.arange(24).reshape(2, 12).astype(np.int32) % 40
  model, params = maxlite.load(root / "tuned")
  expected = np.asarray(jax.jit(model.apply)(params, tokens_BT))
  # Some families are exported as another, whose name transformers needs.
  config = AutoConfig.from_pretrained(root / "merged")
  base = AutoModelForCausalLM.from_pretrained(FIXTURES / family, config=config).eval()
  whole = AutoModelForCausalLM.from_pretrained(root / "merged").eval()
  tokens = torch.from_numpy(tokens_BT).long()
  with torch.no_grad():
    without = base(tokens).logits.numpy()
    tuned = PeftModel.from_pretrained(base, root / "adapter")
    found = [m(tokens).logits.numpy() for m in (tuned, whole, tuned.merge_and_unload())]
  scale = np.abs(expected).max()
  assert np.abs(without - expected).max() > 0.05 * scale
  for logits in found:
    assert np.abs(logits - expected).max() < 1e-4 * scale


@pytest.mark.parametrize("exported", ["llama"], indirect=True)
@pytest.mark.parametrize(
  ("folder", "run", "message"),
  [
    (FIXTURES / "llama", "plain", "has no adapters (lora_rank=0): use to_hf"),
    (FIXTURES / "llama", "untrained", "was trained: train it first"),
    (FIXTURES / "mistral", "tuned", "config.json has"),
    ("{root}/merged", "tuned", "differ from those the adapters were trained on"),
    ("{root}/none", "tuned", "none is not a folder"),
  ],
)
def test_an_invalid_export_exits_with_one_line(exported, capsys, folder, run, message):
  _, root = exported
  if run == "plain":
    assert converted(["from_hf", FIXTURES / "llama", *overrides_of(root, "plain")]) == 0
  if run == "untrained":
    make_run(root, "llama", "untrained", trained="none")
  capsys.readouterr()
  assert_fails(capsys, str(folder).format(root=root), root, run, message)


def assert_fails(capsys, folder, root, run, message):
  command = ["to_peft", folder, *overrides_of(root, run), f"output_path={root}/out"]
  assert converted(command) == 2
  *progress, line = capsys.readouterr().err.splitlines()
  assert all(shown.startswith("converting") for shown in progress)  # on a slow machine
  assert message in line
  assert not (root / "out").exists()


_SHARED_PROJECTIONS = "attention/query|(mlp|shared_experts)/wi_0|mamba/value|short_conv/value"


@pytest.mark.parametrize("family", fast_only(SHARED_TENSORS, "phi3"))
@pytest.mark.parametrize("trained", ["lora", f"({_SHARED_PROJECTIONS})/lora"])
def test_adapters_of_projections_that_share_a_tensor_raise(tmp_path, capsys, family, trained):
  make_run(tmp_path, family, "tuned", trained)
  message = f"{SHARED_TENSORS[family]}, and peft has one adapter for all: use to_hf"
  assert_fails(capsys, FIXTURES / family, tmp_path, "tuned", message)


@pytest.mark.slow
def test_adapters_that_peft_would_apply_to_experts_raise(tmp_path, capsys):
  make_run(tmp_path, "deepseek_v3", "shared")
  message = "cannot load it: train adapters of attention and of routed experts alone"
  assert_fails(capsys, FIXTURES / "deepseek_v3", tmp_path, "shared", message)


@pytest.mark.parametrize("trained", ["wi_0", slow("wi_1"), slow("wo")])
def test_adapters_of_one_projection_of_all_experts_change_only_it(tmp_path, trained):
  make_run(tmp_path, "mistral4", "tuned", f"moe/lora_./{trained}", of_experts=True)
  overrides = overrides_of(tmp_path, "tuned")
  command = ["to_peft", FIXTURES / "mistral4", *overrides, f"output_path={tmp_path}/adapter"]
  assert converted(command) == 0
  config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
  adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
  parameter = "down_proj" if trained == "wo" else "gate_up_proj"
  assert config["target_parameters"] == [f"mlp.experts.{parameter}"]
  # peft wraps the module once, for this parameter.
  names = {name.partition(".mlp.")[2] for name in adapters}
  assert names == {"experts.lora_A.weight", "experts.lora_B.weight"}
  for name, matrix in adapters.items():
    if name.endswith("lora_B.weight") and trained != "wo":
      gate, up = np.split(matrix, 2)
      assert gate.any() == (trained == "wi_0")
      assert up.any() == (trained == "wi_1")


@pytest.mark.parametrize("trained", ["wi_0", slow("wi_1")])
def test_adapters_of_one_of_two_fused_projections_raise(tmp_path, capsys, trained):
  make_run(tmp_path, "mixtral", "tuned", f"moe/lora_./{trained}", of_experts=True)
  message = f"the routed experts' {trained} only with those of wi_"
  assert_fails(capsys, FIXTURES / "mixtral", tmp_path, "tuned", message)
