"""An imported adapter with its base model computes what peft computes."""

import json
import shutil
from importlib.util import find_spec

import jax
import numpy as np
import pytest
from adapter_runs import CASES, RANK, SHARED_TENSORS, make_run, overrides_of
from config_variants import register_mistral4
from conversion import converted
from hf_measure import FIXTURES
from safetensors.numpy import load_file, save_file
from support.slow_cases import fast_only, slow

import maxlite
from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.config import read_saved

pytestmark = pytest.mark.usefixtures("fast_programs")
TOKENS_BT = np.arange(24).reshape(2, 12).astype(np.int32) % 40
needs_peft = pytest.mark.skipif(
  not all(map(find_spec, ("torch", "transformers", "peft"))),
  reason="needs torch, transformers and peft: pip install -e .[hf]",
)
# Modules by the names that they have in transformers.
DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# (model_type, keys of LoraConfig)
ADAPTERS = [
  ("llama", {"target_modules": DENSE}),
  ("qwen2", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
  (
    "llama",
    {
      "target_modules": DENSE,
      "rank_pattern": {"q_proj": 4, r"layers\.1\.mlp\.up_proj": 1},
      "alpha_pattern": {"o_proj": 7},
    },
  ),
  ("llama", {"target_modules": DENSE, "layers_to_transform": [1]}),
  ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
  ("gemma2", {"target_modules": DENSE}),
  ("glm", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj"]}),
  ("deepseek_v3", {"target_modules": LATENT}),
  ("qwen3_next", {"target_modules": ["q_proj", "k_proj", "o_proj", "in_proj_qkvz", "out_proj"]}),
  ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
  ("mixtral", {"target_modules": [], "target_parameters": EXPERTS[1:]}),
  ("gpt_oss", {"target_modules": ["v_proj"], "target_parameters": EXPERTS}),
]

FAST_ADAPTERS = (ADAPTERS[2], ADAPTERS[9])


def random_like(tensors):
  """Values for the tensors of an adapter, whose second matrices are zero in a new one."""
  draw = np.random.default_rng(0)
  return {
    name: draw.normal(size=x.shape, scale=0.3).astype(np.float32) for name, x in tensors.items()
  }


def peft_adapter(model_type, folder, **keys):
  """Write an adapter of peft for a fixture, and return the logits that peft computes with it."""
  import peft
  import torch
  from transformers import AutoModelForCausalLM

  register_mistral4()
  cfg = peft.LoraConfig(r=2, lora_alpha=3, task_type="CAUSAL_LM", **keys)

  def base():
    return AutoModelForCausalLM.from_pretrained(FIXTURES / model_type).eval()

  peft.get_peft_model(base(), cfg).save_pretrained(folder)
  file = folder / "adapter_model.safetensors"
  save_file(random_like(load_file(file)), file)
  tuned = peft.PeftModel.from_pretrained(base(), folder)
  with torch.no_grad():
    return tuned(torch.from_numpy(TOKENS_BT).long(), use_cache=False).logits.numpy()


def import_adapter(root, adapter, base, name="tuned"):
  return converted(["from_peft", adapter, base, *overrides_of(root, name)])


def logits_of(folder):
  model, params = maxlite.load(folder)
  return np.asarray(jax.jit(model.apply)(params, TOKENS_BT))


@pytest.mark.hf
@needs_peft
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
  ("model_type", "keys"),
  [each if each in FAST_ADAPTERS else slow(*each) for each in ADAPTERS],
)
def test_an_imported_adapter_computes_what_peft_computes(tmp_path, model_type, keys):
  theirs = peft_adapter(model_type, tmp_path / "adapter", **keys)
  assert import_adapter(tmp_path, tmp_path / "adapter", FIXTURES / model_type) == 0
  ours = logits_of(tmp_path / "tuned")
  scale = np.abs(theirs).max()
  assert np.abs(ours - theirs).max() < 1e-5 * scale
  without = logits_of(FIXTURES / model_type)
  assert np.abs(without - theirs).max() > 0.02 * scale


def exported_adapter(root, case):
  """Create the run `tuned` with random adapters, and export them; returns the base model."""
  model_type, _, of_experts = case.partition(" with ")
  make_run(root, model_type, "tuned", "attention|moe/lora", of_experts=bool(of_experts))
  base = FIXTURES / model_type
  command = ["to_peft", base, *overrides_of(root, "tuned"), f"output_path={root}/adapter"]
  assert converted(command) == 0
  return base


ROUND_TRIPS = [case for case in CASES if case.partition(" ")[0] not in SHARED_TENSORS]


@pytest.mark.parametrize("case", fast_only(ROUND_TRIPS, "llama", "gpt_oss with experts"))
def test_an_exported_adapter_is_imported_exactly(tmp_path, case):
  base = exported_adapter(tmp_path, case)
  assert import_adapter(tmp_path, tmp_path / "adapter", base, "again") == 0
  first = products_of(tmp_path / "tuned")
  again = products_of(tmp_path / "again")
  assert first.keys() == again.keys()
  for path, product in first.items():
    np.testing.assert_allclose(again[path], product, atol=1e-6, err_msg=path)


def products_of(folder):
  """{path: lora_a @ lora_b, over the rank} of a run, scaled as its outputs are."""
  cfg = read_saved(folder / "config.yml")
  _, params = maxlite.load(folder)
  leaves = leaves_by_path(params)
  products = {}
  for path, leaf in leaves.items():
    if "/lora_a/" in path:
      a = np.asarray(leaf)
      b = np.asarray(leaves[path.replace("/lora_a/", "/lora_b/")])
      if "layers" not in path:  # such as the projection to embeddings of every layer
        a, b = a[None], b[None]
      equation = "nir,nro->nio"
      if "/moe/lora_a/" in path:  # also stacked by experts
        equation = "neir,nero->neio"
      else:
        a = a.reshape(len(a), -1, a.shape[-1])
        b = b.reshape(len(b), a.shape[-1], -1)
      products[path] = np.einsum(equation, a, b) * cfg["lora_alpha"] / cfg["lora_rank"]
  return products


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
  """The folder of an adapter of attention, exported from a run of the Llama fixture."""
  root = tmp_path_factory.mktemp("exported")
  exported_adapter(root, "llama")
  return root / "adapter"


def changed(adapter, folder, config=(), rename=lambda name: name, **others):
  """A copy of `adapter` with other keys and other names of tensors."""
  shutil.copytree(adapter, folder)
  file = folder / "adapter_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | dict(config) | others))
  tensors = load_file(folder / "adapter_model.safetensors")
  renamed = {rename(name): tensor for name, tensor in tensors.items()}
  save_file(renamed, folder / "adapter_model.safetensors")
  return folder


@pytest.mark.parametrize(
  ("change", "base", "message"),
  [
    ({"peft_type": "IA3"}, "llama", "peft_type='IA3': only LORA is read"),
    ({"use_dora": True}, "llama", "use_dora=True, which maxlite does not support: merge"),
    ({"modules_to_save": ["lm_head"]}, "llama", "modules_to_save="),
    ({"bias": "all"}, "llama", "bias='all'"),
    ({"init_lora_weights": "pissa"}, "llama", "init_lora_weights='pissa'"),
    ({"from_the_future": 0.5}, "llama", "from_the_future=0.5"),
    ({"r": 3}, "llama", "imply [3, 16]: one of them is"),
    ({"r": 0}, "llama", "r=0"),
    ({}, "mistral4", "adapters that maxlite does not have for model_type 'mistral4'"),
    ({"rename": lambda name: name.replace("o_proj", "z_proj")}, "llama", "z_proj.lora_A.weight"),
    ({"rename": lambda name: name.replace("lora_B", "lora_C")}, "llama", "lora_C.weight"),
  ],
)
def test_an_adapter_that_maxlite_cannot_compute_is_refused(
  tmp_path, capsys, adapter, change, base, message
):
  folder = changed(adapter, tmp_path / "adapter", **change)
  assert import_adapter(tmp_path, folder, FIXTURES / base) == 2
  *_, line = capsys.readouterr().err.splitlines()
  assert message in line
  assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((), "from_peft ADAPTER is missing; name the folder with adapter_config.json"),
    (("{adapter}",), "from_peft FOLDER is missing; name the folder with config.json"),
    ((FIXTURES / "llama", FIXTURES / "llama"), "has no adapter_config.json with"),
    (("{adapter}", "{adapter}"), "has no config.json"),
    (("{adapter}", FIXTURES / "llama", "lora_rank=4"), "adapter_config.json has 2: use that"),
  ],
)
def test_an_invalid_command_exits_with_one_line(tmp_path, capsys, adapter, arguments, message):
  given = [str(argument).format(adapter=adapter) for argument in arguments]
  assert converted(["from_peft", *given, *overrides_of(tmp_path, "tuned")]) == 2
  *_, line = capsys.readouterr().err.splitlines()
  assert message in line


def test_padding_of_smaller_ranks_is_not_trained(tmp_path, adapter):
  pattern = {"rank_pattern": {"v_proj": RANK + 1}}
  folder = changed(adapter, tmp_path / "adapter", **pattern)
  file = folder / "adapter_model.safetensors"
  tensors = load_file(file)
  for name, tensor in tensors.items():
    if "v_proj" in name:
      shape = np.array(tensor.shape)
      shape[0 if "lora_A" in name else 1] += 1
      tensors[name] = np.resize(tensor, shape)
  save_file(tensors, file)
  assert import_adapter(tmp_path, folder, FIXTURES / "llama") == 0
  model, params = maxlite.load(tmp_path / "tuned")

  def loss(params):
    return (model.apply(params, TOKENS_BT) ** 2).mean()

  gradients = leaves_by_path(jax.jit(jax.grad(loss))(params))
  for path, gradient in gradients.items():
    if "/lora_a/" in path:
      in_peft = {"value": RANK + 1}.get(path.split("/")[-3], RANK * ("attention" in path))
      assert np.any(gradient[..., :in_peft]) == (in_peft > 0), path
      assert not np.any(gradient[..., in_peft:]), path
    elif "/lora_b/" in path:
      gradient_RO = gradient[:, RANK:] if "value" not in path else gradient[:, RANK + 1 :]
      assert not np.any(gradient_RO), path
