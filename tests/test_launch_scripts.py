"""The launch scripts, checked by the parsers and programs that consume them."""

import re
import shutil
import string
import subprocess
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).resolve().parents[1] / "tools" / "launch"
JOBSET = {
  "NAME": "big",
  "IMAGE": "registry/maxlite",
  "SLICES": "2",
  "HOSTS": "8",
  "CHIPS": "4",
  "ACCELERATOR": "tpu-v5p-slice",
  "TOPOLOGY": "2x4x4",
  "RESTARTS": "20",
  "CLAIM": "runs",
  "TOKEN": "0123456789abcdef",
  "COMMAND": "configs/base.yml run_name=big",
}


def lines_of(*command):
  return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("name", ["slurm.sbatch", "tpu_vm.sh"])
def test_shell_scripts_pass_shellcheck(name):
  checker = shutil.which("shellcheck")
  lines_of(*([checker] if checker else ["bash", "-n"]), LAUNCH / name)


def test_the_jobset_is_valid_for_kubernetes():
  models = pytest.importorskip("kubeflow_trainer_api.models", reason="no kubeflow-trainer-api")
  template = string.Template((LAUNCH / "gke_jobset.yaml").read_text())
  written = yaml.safe_load(template.substitute(JOBSET))
  read = models.JobsetV1alpha2JobSet.from_dict(written)
  assert read.to_dict() == written  # an unknown field would be missing


def test_all_workers_of_a_tpu_get_the_arguments_unchanged():
  arguments = ["configs/base.yml", "run_name=a b"]
  commands = lines_of(LAUNCH / "tpu_vm.sh", "--dry-run", "t1", "us-east5-a", *arguments)
  copy, install, train = commands
  assert copy.startswith("gcloud compute tpus tpu-vm scp ")
  assert "pip" in install
  to_gcloud = lines_of("bash", "-c", f"gcloud() {{ printf '%s\\n' \"$@\"; }}; {train}")
  assert {"--zone=us-east5-a", "--worker=all", "t1"} <= set(to_gcloud)
  (command,) = (argument for argument in to_gcloud if argument.startswith("--command="))
  setup, on_worker = command.split(" && exec .venv/bin/python")
  assert re.fullmatch(
    "--command=cd maxlite && export MAXLITE_COORDINATOR_TOKEN=[0-9a-f]{32}", setup
  )
  assert lines_of("bash", "-c", f"printf '%s\\n' {on_worker}") == [
    "-m",
    "maxlite.train",
    *arguments,
  ]


def test_too_few_arguments_print_the_usage():
  result = subprocess.run([LAUNCH / "tpu_vm.sh", "t1"], capture_output=True, text=True, check=False)
  assert result.returncode == 2
  assert "tools/launch/tpu_vm.sh [--dry-run] NAME ZONE" in result.stderr
