"""`maxlite.convert` and `maxlite.load`: import, load, upcycle and export."""

import functools
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from conversion import converted
from safetensors.numpy import load_file, save_file
from support.slow_cases import slow
from support.tiny import build

import maxlite
from maxlite import convert
from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.chunked_array import ChunkedArray
from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.parameters import StoredParameters, write_parameters
from maxlite.config import load_config, read_saved, save_resolved
from maxlite.config.schema import CheckpointConfig
from maxlite.hf.conversion import read_merged
from maxlite.hf.hf_checkpoint import params_from_hf
from maxlite.hf.load_model import program_of_model
from maxlite.training.model_weights import read_parameters

pytestmark = pytest.mark.usefixtures("fast_programs")
FIXTURES = Path(__file__).resolve().parent / "hf_fixtures"
TOKENS_BT = np.arange(24).reshape(2, 12).astype(np.int32)
# Optimized for compile time, not run time.
FAST = {"compiler_options": {"xla_backend_optimization_level": 0}}
SYNTHETIC = {"dataset_type": "synthetic"}  # tiny vocabularies have no byte tokens


def imported(source, root, name):
  """Import a Hugging Face folder as a run, and return the exit code."""
  return converted(
    ["from_hf", source, f"run_name={name}", f"base_output_directory={root}"], **SYNTHETIC
  )


def exported(root, name, output):
  """Export a run to a folder, and return the exit code."""
  keys = [f"run_name={name}", f"base_output_directory={root}", f"output_path={output}"]
  return converted(["to_hf", *keys], **SYNTHETIC)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """A folder with the runs `mixtral` and `llama`, imported from fixtures."""
  folder = tmp_path_factory.mktemp("runs")
  for name in ("mixtral", "llama"):
    assert imported(FIXTURES / name, folder, name) == 0
  return folder


def logits_of(folder, **options):
  model, params = maxlite.load(folder, **options)
  return np.asarray(jax.jit(model.apply, **FAST)(params, TOKENS_BT))


def test_import_and_export_are_bitwise_inverse(root):
  out = root / "out"
  assert exported(root, "mixtral", out) == 0
  got = load_file(out / "model.safetensors")
  want = load_file(FIXTURES / "mixtral" / "model.safetensors")
  assert got.keys() == want.keys()
  for name, array in want.items():
    assert got[name].tobytes() == array.tobytes()
  ours = json.loads((out / "config.json").read_text())
  theirs = json.loads((FIXTURES / "mixtral" / "config.json").read_text())
  assert ours == theirs


def loaded_leaves(folder):
  """{path: array} of the parameters that `maxlite.load` returns."""
  _, params = maxlite.load(folder)
  return leaves_by_path(params)


def test_load_accepts_either_folder(root):
  from_run = loaded_leaves(root / "mixtral")
  for path, leaf in loaded_leaves(FIXTURES / "mixtral").items():
    np.testing.assert_array_equal(from_run[path], leaf)


@pytest.mark.slow
def test_load_onto_a_mesh(root):
  model, params = maxlite.load(FIXTURES / "llama", mesh={"fsdp": 2, "tensor": 2})
  assert len(leaves_by_path(params)["layers/mlp/wo/kernel"].sharding.device_set) == 4
  expected = load_file(FIXTURES / "llama" / "expected.safetensors")
  two_rows = {name: array[:2] for name, array in expected.items()}
  apply = jax.jit(model.apply, **FAST)
  got_BTV = apply(
    params,
    two_rows["tokens_BT"],
    segment_ids=two_rows["segment_BT"],
    positions=two_rows["position_BT"],
  )
  np.testing.assert_allclose(got_BTV, two_rows["logits_BTV"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_loaded_models_support_packing_and_gradients(root):
  model, params = maxlite.load(root / "llama")
  segment_BT = np.tile(np.repeat([1, 2], 6), (2, 1)).astype(np.int32)
  position_BT = np.tile(np.arange(6), (2, 2)).astype(np.int32)

  @functools.partial(jax.jit, **FAST)
  def outputs(params):
    def total(params):
      return jnp.sum(model.apply(params, TOKENS_BT) ** 2)

    in_row = model.apply(
      {"params": params}, TOKENS_BT, segment_ids=segment_BT, positions=position_BT
    )
    alone = model.apply(params, TOKENS_BT[:, 6:])
    return in_row, alone, jax.grad(total)(params)

  in_row, alone, gradients = outputs(params)
  np.testing.assert_allclose(in_row[:, 6:], alone, atol=1e-5)
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))
  _, half = maxlite.load(root / "llama", dtype="bfloat16")
  assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
  ("path", "options", "message"),
  [
    ("nowhere", {}, "not a run folder"),
    ("llama", {"dtype": "float16"}, "choose one of float32, bfloat16"),
    ("llama", {"mesh": {"model": 2}}, "mesh has the axes model"),
    ("llama", {"mesh": {"fsdp": 64}}, "needs 64 devices"),
  ],
)
def test_invalid_arguments_of_load_raise(root, path, options, message):
  with pytest.raises(ValueError, match=message):
    maxlite.load(root / path, **options)


def test_training_starts_from_imported_weights_with_a_new_optimizer_state(root):
  folder = root / "llama"
  cfg = load_config(
    ["run_name=llama", f"base_output_directory={root}", "base_emb_dim=16", "dataset_type=synthetic"]
  )
  assert cfg.model.decoder_block == "llama"  # by model.yml
  assert cfg.model.vocab_size == 40
  program = program_of_model(cfg.model)
  checkpoints = Checkpoints(cfg.checkpoint, folder / "checkpoints", print)
  restored, data_state, step = checkpoints.restore(program.abstract_state)
  want = jax.tree.map(np.array, restored["params"])
  state = program.init(0, restored["params"])
  assert (data_state, step, int(state.step)) == (None, 0, 0)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), want)
  assert jax.tree.structure(state) == jax.tree.structure(program.abstract_state)
  moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
  assert moments
  assert not any(leaf.any() for leaf in moments)


def test_a_run_reports_how_the_model_differs_whose_weights_it_starts_from(root, capsys):
  keys = ("dataset_type=synthetic", "remat_policy=full", f"load_parameters_path={root}/llama")

  def reported(changed):
    cfg = load_config((*keys, changed), defaults=read_saved(root / "llama" / "config.yml"))
    read_parameters(cfg, build(cfg, jax.devices()[:1]))
    return capsys.readouterr().err

  assert reported("lora_rank=2") == ""
  assert reported("rope_max_timescale=5").endswith("rope_max_timescale=5.0\n")


@pytest.mark.parametrize("dense", ["llama", slow("qwen3")])
def test_an_upcycled_model_computes_the_same_function(root, dense):
  mixture = f"mixture_of_{dense}"
  if not (root / dense).exists():
    assert imported(FIXTURES / dense, root, dense) == 0
  flags = [
    f"--run_name={dense}",
    f"--base_output_directory={root}",
    f"--output_path={mixture}",
    "--num_experts=4",
    "--prompt=see a.yml",
  ]
  assert converted(["upcycle", *flags], **SYNTHETIC) == 0
  assert read_saved(root / mixture / "config.yml")["prompt"] == "see a.yml"
  np.testing.assert_allclose(logits_of(root / mixture), logits_of(root / dense), atol=1e-5)
  assert exported(root, mixture, root / f"{mixture}_out") == 0
  router = np.asarray(loaded_leaves(root / mixture)["layers/moe/router/kernel"])
  assert router.shape == (2, 16, 4)
  assert np.std(router) == pytest.approx(0.25, rel=0.3)


@pytest.mark.slow
def test_adapters_are_merged_on_upcycling(root, capsys):
  overrides = ("run_name=adapted", f"base_output_directory={root}")
  keys = (*overrides, "dataset_type=synthetic", "lora_rank=2", "ema_decay=0.9")
  cfg = load_config(keys, defaults=read_saved(root / "llama" / "config.yml"))
  rng = np.random.default_rng(0)
  leaves = leaves_by_path(program_of_model(cfg.model).abstract_state.params)

  def draw(leaf):
    return rng.normal(size=leaf.shape, scale=0.3).astype(np.float32)

  arrays = {path: chunked(draw(leaf)) for path, leaf in leaves.items()}
  (root / "adapted").mkdir()
  save_resolved(cfg, root / "adapted" / "config.yml")
  write_parameters(root / "adapted" / "checkpoints" / "0", arrays)
  target = ("output_path=mixture_of_adapted", "num_experts=4")
  assert converted(["upcycle", *overrides, *target], **SYNTHETIC) == 0
  logits = logits_of(root / "mixture_of_adapted")
  expected = logits_of(root / "adapted")
  np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())
  assert exported(root, "adapted", root / "adapted_out") == 0
  assert "not their moving averages" in capsys.readouterr().out


def test_adapters_are_merged_on_export(tmp_path):
  draw = np.random.default_rng(0).normal
  kernel_NDHC = draw(size=(2, 6, 3, 4)).astype(np.float32)
  a_NDR = draw(size=(2, 6, 2)).astype(np.float32)
  b_NRHC = draw(size=(2, 2, 3, 4)).astype(np.float32)
  arrays = {
    "q/kernel": chunked(kernel_NDHC),
    "q/lora_a/kernel": chunked(a_NDR),
    "q/lora_b/kernel": chunked(b_NRHC),
  }
  write_parameters(tmp_path / "0", arrays)
  checkpoints = Checkpoints(CheckpointConfig(), tmp_path, print)
  stored = StoredParameters(*checkpoints.stored())
  second_layer = (slice(1, 2), slice(0, 6), slice(0, 3), slice(0, 4))
  (got_DHC,) = read_merged(stored, "q/kernel", second_layer, lora_alpha=3.0)
  change_DHC = 1.5 * np.einsum("dr,rhc->dhc", a_NDR[1], b_NRHC[1])
  np.testing.assert_allclose(got_DHC, kernel_NDHC[1] + change_DHC, rtol=1e-5)


def chunked(array):
  index = tuple(slice(0, size) for size in array.shape)
  return ChunkedArray(array.shape, array.dtype, array.shape, lambda: iter([(index, array)]))


def truncated(folder):
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-100])


def renamed(folder):
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes().replace(b"q_proj", b"z_proj", 1))


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (truncated, "not a complete safetensors file"),
    (renamed, "lacks 1 tensors"),
    (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    (lambda folder: (folder / "model.safetensors").unlink(), "has neither"),
  ],
)
def test_damage_exits_with_one_line_and_creates_nothing(tmp_path, capsys, damage, message):
  folder = tmp_path / "hf"
  shutil.copytree(FIXTURES / "llama", folder)
  damage(folder)
  assert imported(folder, tmp_path / "runs", "new") == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("maxlite.convert: ")
  assert message in line
  assert not list((tmp_path / "runs").rglob("*"))


def test_a_failed_import_leaves_nothing(tmp_path, monkeypatch, capsys):
  folder = tmp_path / "hf"
  shutil.copytree(FIXTURES / "llama", folder)

  # Truncate after the headers were validated, before the weights are read.
  def truncate_after(*arguments):
    params = params_from_hf(*arguments)
    truncated(folder)
    return params

  monkeypatch.setattr("maxlite.hf.conversion.params_from_hf", truncate_after)
  assert imported(folder, tmp_path / "runs", "new") == 2
  assert "bytes early" in capsys.readouterr().err
  assert not list((tmp_path / "runs").rglob("*"))


def test_weights_that_are_not_finite_are_reported(tmp_path, capsys):
  folder = shutil.copytree(FIXTURES / "llama", tmp_path / "model=1")
  weights = load_file(folder / "model.safetensors")
  name = "model.norm.weight"
  weights[name][:2] = np.nan, np.inf
  save_file(weights, folder / "model.safetensors")
  assert imported(folder, tmp_path / "runs", "new") == 0
  assert "2 weights are NaN or infinite, in final_norm/scale" in capsys.readouterr().out


def test_a_damaged_tokenizer_is_not_imported(tmp_path, monkeypatch, capsys):
  folder = shutil.copytree(FIXTURES / "llama", tmp_path / "model")
  (folder / "tokenizer.json").write_text("{")
  overrides = ("run_name=new", f"base_output_directory={tmp_path}/runs", "dataset_type=text")
  monkeypatch.setattr(sys, "argv", ["convert", "from_hf", str(folder), *overrides])
  with pytest.raises(SystemExit, match="2"):
    convert.main()
  assert "is not a tokenizer.json" in capsys.readouterr().err
  assert not list((tmp_path / "runs").rglob("*"))


@pytest.mark.parametrize(
  ("args", "message"),
  [
    ((), "write one of from_hf, from_peft, to_hf, to_peft, upcycle"),
    (("from_hf",), "from_hf FOLDER is missing"),
    (("to_peft", "run_name=llama"), "to_peft FOLDER is missing"),
    (("from_hf", FIXTURES / "llama", "run_name=llama"), "already exists"),
    (("from_hf", FIXTURES / "llama", "run_name=new", "base_emb_dim=8"), "has 16"),
    (
      ("from_hf", FIXTURES / "llama", "run_name=new", "vocab_size=39"),
      "has 40: use that or more",
    ),
    (("to_hf", "run_name=llama"), "output_path is missing"),
    (("to_hf", "run_name=none", "output_path=x"), "there is no run"),
    (("to_hf", "run_name=llama", f"output_path={FIXTURES}"), "already exists"),
    (("upcycle", "run_name=mixtral", "output_path=new"), "cannot be upcycled"),
    (("upcycle", "run_name=llama", "output_path=new", "head_dim=8"), "keeps head_dim=4"),
    (("to_hf", "configs/base.yml", "run_name=llama"), "output_path is missing"),
    (("from_hf", "a=b"), "from_hf FOLDER is missing"),
    (
      ("from_hf", "Qwen/Qwen3-0.6B", "run_name=new"),
      "write hf://Qwen/Qwen3-0.6B, or name the folder of a download",
    ),
  ],
)
def test_an_invalid_command_exits_with_one_line(root, capsys, args, message):
  assert converted([*args, f"base_output_directory={root}"], **SYNTHETIC) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line
  assert not (root / "new").exists()


@pytest.mark.parametrize(
  ("template", "warning", "note"),
  [
    ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", "", ""),
    ("{% for m in messages %}{{ m.content }} {% endfor %}", "generated answers do not end", ""),
    ("{% for m %}", "", "conversations cannot be rendered, since the chat template of "),
  ],
  ids=["end token", "no end token", "no template"],
)
def test_import_notes_chat_templates(tmp_path, capsys, caplog, template, warning, note):
  folder = tmp_path / "hf"
  shutil.copytree(FIXTURES / "llama", folder)
  vocabulary = {"<s>": 0, "</s>": 1, "?": 2, "1": 3, "7": 4, "2": 5, "9": 6, " ": 7}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  tokenizer.save(str(folder / "tokenizer.json"))
  names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
  (folder / "tokenizer_config.json").write_text(json.dumps(names))
  keys = [f"base_output_directory={tmp_path}", "run_name=a"]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", ["convert", "from_hf", str(folder), *keys])
    assert convert.main() == 0
  assert caplog.text.count("puts no special token") == bool(warning)
  assert warning in caplog.text
  line = capsys.readouterr().out
  assert line.count("conversations cannot") == bool(note)
  assert note in line
