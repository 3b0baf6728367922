"""The command-line programs, each in a separate process, on one device."""

import json
import math
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny import build

from maxlite.config import load_config, save_resolved

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "configs/base.yml"
TINY = [
  "base_emb_dim=16",
  "base_num_decoder_layers=1",
  "base_num_query_heads=4",
  "base_num_kv_heads=2",
  "head_dim=4",
  "num_experts=4",
  "base_moe_mlp_dim=16",
  "sparse_matmul=false",  # compiles faster
  "max_target_length=32",
  "per_device_batch_size=4",
  "sharding_tolerance=1",
  "jax_cache_dir=",
]
# Shortens compilation, as in conftest.py.
XLA_FLAGS = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
ENVIRONMENT = {
  "PYTHONPATH": str(ROOT),
  "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  "XLA_FLAGS": XLA_FLAGS,
}
TEST_VARIABLES = ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")


def open_process(command, **environment):
  """Start Python with these arguments."""
  inherited = {name: value for name, value in os.environ.items() if name not in TEST_VARIABLES}
  return subprocess.Popen(
    [sys.executable, *map(str, command)],
    cwd=ROOT,
    env=inherited | ENVIRONMENT | environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process):
  """(exit code, stdout, stderr without reports of long waits)."""
  out, err = process.communicate()
  return process.returncode, out, re.sub(r".+ \.\.\. \d+ s\n", "", err)


def maxlite(program, argv):
  return open_process(["-m", f"maxlite.{program}", *argv])


@pytest.fixture(scope="module")
def run_keys(tmp_path_factory):
  """Arguments with the run's folder and data; `trained` trains it."""
  folder = tmp_path_factory.mktemp("entry")
  text = "".join(f"def f{n}(x):\n  return x + {n}\n\n" for n in range(400))
  (folder / "data.txt").write_text(text)
  return [f"base_output_directory={folder}", "run_name=tiny", f"dataset_path={folder}/data.txt"]


@pytest.fixture(scope="module")
def trained(run_keys):
  """(run folder, stdout of training)."""
  argv = ["eval_split=tail", "eval_steps=2", "log_period=1", "steps=4"]
  code, out, err = finish(maxlite("train", [BASE, *TINY, *run_keys, *argv]))
  assert (code, err) == (0, "")
  return Path(run_keys[0].partition("=")[2]) / "tiny", out


@pytest.mark.smoke
def test_train_prints_progress_and_writes_the_run_folder(trained):
  folder, out = trained
  for step in range(1, 4):
    assert re.search(rf"^step {step}/4  loss +\d\.\d{{4}}  lr ", out, re.MULTILINE)
  assert re.search(r"^eval 4/4  loss +\d\.\d{4}  bits/byte \d\.\d{4}$", out, re.MULTILINE)
  assert re.search(r"^model: mixtral, [\d,]+ parameters, [\d,]+ active", out, re.MULTILINE)
  assert "  base_emb_dim=16 (default 256)\n" in out
  expected = {"config.yml", "metrics.jsonl", "curves.png", "checkpoints", "tensorboard"}
  expected |= {"expert_load.jsonl", "expert_load.png", "run_id", "starts.jsonl", ".lock"}
  assert {path.name for path in folder.iterdir()} == expected
  for plot in folder.glob("*.png"):
    assert plot.stat().st_size > 10_000


@pytest.fixture
def other_config(run_keys, tmp_path):
  """Arguments that name the run, and a file with keys of another model."""
  other = tmp_path / "other.yml"
  other.write_text("base_emb_dim: 32\nmax_target_length: 64\neval_steps: 1\n")
  return [BASE, other, *run_keys[:2], "jax_cache_dir="]


@pytest.mark.slow
def test_evaluate_uses_the_config_of_the_run(trained, other_config):
  folder, _ = trained
  last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
  names = ("eval_loss", "eval_bits_per_byte", "eval_tokens")
  figures = "  ".join(f"{name} {last[name]:.6g}" for name in names)
  code, text, err = finish(maxlite("evaluate", other_config))
  assert (code, err) == (0, "")
  *of_data, losses = text.splitlines()
  assert losses == f"{folder} step 4  {figures}"
  assert all(line.startswith("data: ") for line in of_data)


@pytest.mark.slow
@pytest.mark.usefixtures("trained")
def test_generate_uses_the_config_of_the_run(other_config):
  prompt = ["prompt=def f", "decode_sampling_temperature=0"]  # as many tokens as fit
  code, text, err = finish(maxlite("generate", other_config + prompt))
  assert code == 0
  assert re.fullmatch(r"prefill 6 tokens, .* tok/s; decode \d+ tokens, .* tok/s; .*\n", err)
  assert text.startswith("def f")
  assert len(text) > len("def f\n")


@pytest.mark.parametrize(
  "program", ["train", "evaluate", "generate", "serve", "plan", "audit", "convert"]
)
def test_help_and_errors_do_not_import_jax(program):
  argv = ["-X", "importtime", "-m", f"maxlite.{program}"]
  argument = BASE
  if program == "convert":
    argument = "to_hf"
  help_process = open_process([*argv, "--help=all"])
  error_process = open_process([*argv, argument, "stepz=3"])
  code, out, imports = finish(help_process)
  assert code == 0
  assert "--learning_rate" in out
  assert not re.search(r"\| +jax$", imports, re.MULTILINE)
  code, out, imports = finish(error_process)
  errors = [line for line in imports.splitlines() if not line.startswith("import time:")]
  assert (code, out, len(errors)) == (2, "", 1)
  assert errors[0].startswith(f"maxlite.{program}: command line: ")
  assert "stepz" in errors[0]
  assert "steps" in errors[0]
  assert not re.search(r"\| +jax$", imports, re.MULTILINE)


@pytest.mark.parametrize("program", ["train", "generate", "convert"])
def test_an_interrupt_during_imports_is_one_line(program, tmp_path):
  """Here JAX is a module that gets the signal, which its import converts to an ImportError."""
  (tmp_path / "jax.py").write_text(
    "import os, signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job ignores it
    "try:\n  os.kill(os.getpid(), signal.SIGINT)\n  signal.pause()\n"
    "except KeyboardInterrupt as error:\n  raise ImportError('initialization failed') from error\n"
  )
  keys = [f"base_output_directory={tmp_path}", "run_name=run"]
  save_resolved(load_config(keys), tmp_path / "run" / "config.yml")
  (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
  (tmp_path / "config.json").write_text("{}")
  command = ["-m", f"maxlite.{program}"]
  if program == "convert":
    command += ["from_hf", tmp_path]
  path = os.pathsep.join([str(tmp_path), str(ROOT)])
  _, out, err = finish(open_process(command + keys, PYTHONPATH=path))
  assert out == ""
  assert err == f"maxlite.{program}: interrupted\n"


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
  """Arguments of a run that has a config, but no checkpoint."""
  folder = tmp_path_factory.mktemp("untrained")
  cfg = load_config([f"base_output_directory={folder}", "run_name=run"])
  save_resolved(cfg, folder / "run" / "config.yml")
  return [f"base_output_directory={folder}", "run_name=run"]


@pytest.mark.parametrize(
  ("program", "argument", "message"),
  [
    ("evaluate", "run_name=none", "there is no run "),
    ("generate", "num_experts=4", "was made with num_experts=8"),
    ("serve", "serve_port=0", "there is no checkpoint in "),
    ("train", "num_experts=4", "was made with num_experts=8"),
    ("convert", "output_path=x", "there is no checkpoint in "),
    ("plan", "compile_topology=v9-8", "compile_topology=v9-8 is unknown; write one of v4-N"),
  ],
)
def test_mistakes_in_a_run_folder_do_not_import_jax(untrained, program, argument, message):
  command = ["-X", "importtime", "-m", f"maxlite.{program}"]
  if program == "convert":
    command.append("to_hf")
  code, out, imports = finish(open_process([*command, *untrained, argument]))
  (line,) = [line for line in imports.splitlines() if not line.startswith("import time:")]
  assert (code, out) == (2, "")
  assert line.startswith(f"maxlite.{program}: ")
  assert message in line
  assert not re.search(r"\| +jax$", imports, re.MULTILINE)


def test_an_output_folder_that_is_a_file_is_found_without_jax(tmp_path):
  (tmp_path / "file").touch()
  argv = ["-X", "importtime", "-m", "maxlite.train", f"base_output_directory={tmp_path}/file/runs"]
  code, out, imports = finish(open_process(argv))
  (line,) = [line for line in imports.splitlines() if not line.startswith("import time:")]
  assert (code, out) == (2, "")
  assert f"{tmp_path}/file is a file): choose another base_output_directory" in line
  assert not re.search(r"\| +jax$", imports, re.MULTILINE)


def test_a_missing_folder_to_import_is_found_without_jax():
  argv = ["-X", "importtime", "-m", "maxlite.convert", "from_hf", "OWNER/NAME", "run_name=x"]
  code, out, imports = finish(open_process(argv))
  (line,) = [line for line in imports.splitlines() if not line.startswith("import time:")]
  assert (code, out) == (2, "")
  assert (
    "OWNER/NAME is not a folder: to import a model of the Hugging Face Hub, write hf://" in line
  )
  assert not re.search(r"\| +jax$", imports, re.MULTILINE)


def test_a_port_in_use_is_found_without_jax(tmp_path):
  keys = [f"base_output_directory={tmp_path}", "run_name=run"]
  save_resolved(load_config(keys), tmp_path / "run" / "config.yml")
  (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
  command = ["-X", "importtime", "-m", "maxlite.serve"]
  with socket.create_server(("127.0.0.1", 0)) as other:
    port = f"serve_port={other.getsockname()[1]}"
    code, _, imports = finish(open_process([*command, *keys, port]))
  assert code == 2
  assert f"{port}: Address already in use: choose another serve_port" in imports
  assert not re.search(r"\| +jax$", imports, re.MULTILINE)


@pytest.fixture
def shardings(monkeypatch, capsys):
  """A function from arguments to the columns of the lines that the tool prints."""
  tool = ROOT / "tools/inspect/shardings.py"

  def run(argv):
    monkeypatch.setattr(sys, "argv", [str(tool), *argv])
    with pytest.raises(SystemExit, match="0"):
      runpy.run_path(str(tool), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines]

  return run


@pytest.mark.smoke
def test_shardings_prints_every_parameter_once(shardings):
  argv = [str(BASE), *TINY, "ici_tensor_parallelism=2"]
  placements = build(load_config(argv)).parameters
  lines = shardings(argv)
  mesh = "ensemble=1 x data=1 x fsdp=4 x context=1 x expert=1 x tensor=2"
  assert lines[0][0] == f"8 devices: {mesh}"
  rows = {line[0]: line for line in lines[2:-1]}
  assert len(rows) == len(placements) > 10
  for placement in placements:
    _, names, spec, shape, num_bytes = rows[placement.path]
    assert names.split() == list(placement.names)
    assert spec == str(placement.spec)
    assert shape.split() == [str(size) for size in placement.shape]
    assert num_bytes == f"{placement.bytes_per_device:,}"
  assert lines[-1][1] == f"{sum(p.num_bytes for p in placements):,} bytes in total"


@pytest.mark.slow
def test_killed_run_resumes_to_identical_results(run_keys, tmp_path):
  argv = [f"jax_cache_dir={tmp_path}", "steps=40", "checkpoint_period=5", "log_period=1"]
  argv += ["eval_split=tail", "eval_interval=10", "eval_steps=2", "router_jitter=0.1", run_keys[2]]
  tool = open_process(["tools/inspect/kill_test.py", "--kills", "3", BASE, *TINY, *argv])
  code, out, err = finish(tool)
  assert code == 0, out + err
  assert "killed 3 times" in out, out + err
  assert "losses equal: True" in out, out + err


@pytest.mark.smoke
def test_shardings_stacks_the_parameters_of_members_of_one_model(shardings):
  sweep = "sweep={grid: {init_weights_seed: [0, 1, 2, 3]}}"
  rows = shardings([str(BASE), *TINY, "ici_ensemble_parallelism=2", sweep])
  _, names, spec, shape, num_bytes = next(row for row in rows if row[0] == "unembed/kernel")
  assert names == "ensemble embed vocab"
  assert spec.startswith("P('ensemble', ")
  num_members, *sizes = map(int, shape.split())
  assert num_members == 4
  assert int(num_bytes.replace(",", "")) == 4 * 4 * math.prod(sizes) // 8


def test_the_package_lists_its_commands():
  code, out, err = finish(open_process(["-m", "maxlite"]))
  assert (code, err) == (0, "")
  main = re.compile(r"^if __name__ == .__main__.:$", re.MULTILINE)
  package = ROOT / "maxlite"
  commands = set()
  for path in (*package.glob("*.py"), *package.glob("*/__main__.py")):
    if main.search(path.read_text()):
      name = path.stem
      if path.parent != package:
        name = path.parent.name
      commands.add(name)
  assert set(re.findall(r"python -m maxlite\.(\w+)  ", out)) == commands - {"__main__"}
  code, out, err = finish(open_process(["-m", "maxlite", "train", "steps=5"]))
  assert (code, out, err) == (2, "", "maxlite: write a dot: python -m maxlite.train steps=5\n")
