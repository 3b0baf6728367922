"""The launch scripts, checked by the parsers and programs that consume them."""

import os
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


def lines_of(command):
  result = subprocess.run(command, check=True, capture_output=True, text=True)
  return result.stdout.splitlines()


@pytest.mark.parametrize("name", ["slurm.sbatch", "tpu_vm.sh", "restart.sh"])
def test_shell_scripts_pass_shellcheck(name):
  command = ["bash", "-n"]
  if shutil.which("shellcheck"):
    command = ["shellcheck"]
  lines_of([*command, LAUNCH / name])


def test_the_jobset_is_valid_for_kubernetes():
  models = pytest.importorskip("kubeflow_trainer_api.models", reason="no kubeflow-trainer-api")
  template = string.Template((LAUNCH / "gke_jobset.yaml").read_text())
  written = yaml.safe_load(template.substitute(JOBSET))
  read = models.JobsetV1alpha2JobSet.from_dict(written)
  assert read.to_dict() == written  # an unknown field would be missing


def test_all_workers_of_a_tpu_get_the_arguments_unchanged():
  arguments = ["configs/base.yml", "run_name=a b"]
  script = [LAUNCH / "tpu_vm.sh", "--dry-run", "t1", "us-east5-a"]
  copy, install, train = lines_of([*script, *arguments])
  assert copy.startswith("gcloud compute tpus tpu-vm scp ")
  assert "pip" in install
  to_gcloud = lines_of(["bash", "-c", f"gcloud() {{ printf '%s\\n' \"$@\"; }}; {train}"])
  assert {"--zone=us-east5-a", "--worker=all", "t1"} <= set(to_gcloud)
  (command,) = (argument for argument in to_gcloud if argument.startswith("--command="))
  setup, on_worker = command.split(" && exec tools/launch/restart.sh 20 .venv/bin/python")
  exports = "export MAXLITE_COORDINATOR_TOKEN=[0-9a-f]{32}"
  assert re.fullmatch(f"--command=cd maxlite && {exports}", setup)
  printed = lines_of(["bash", "-c", f"printf '%s\\n' {on_worker}"])
  assert printed == ["-m", "maxlite.train", *arguments]


def test_a_tpu_script_warns_of_files_that_workers_do_not_get(tmp_path):
  (tmp_path / "mine.yml").write_text("steps: 5\n")
  repository = tmp_path / "clone"
  (repository / "tools/launch").mkdir(parents=True)
  shutil.copy(LAUNCH / "tpu_vm.sh", repository / "tools/launch")
  (repository / "base.yml").touch()
  git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
  for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "Add all"]):
    lines_of(git + command)
  script = [
    repository / "tools/launch/tpu_vm.sh",
    "--dry-run",
    "t1",
    "zone",
    "base.yml",
    "lr=a.yml",
  ]

  def warnings(*more):
    result = subprocess.run([*script, *more], check=True, capture_output=True, text=True)
    return result.stderr.splitlines()

  assert warnings() == []
  (repository / "new.yml").touch()
  changes, outside, new = warnings(f"{tmp_path}/mine.yml", "new.yml")
  assert changes == "warning: uncommitted changes are not copied to the workers; commit them"
  assert outside.startswith(f"warning: {tmp_path}/mine.yml is not in the last commit")
  assert new.startswith("warning: new.yml is not in the last commit")


def fake_program(folder, name, script):
  path = folder / name
  path.write_text(f"#!/usr/bin/env bash\n{script}\n")
  path.chmod(0o755)


@pytest.mark.parametrize(
  ("code", "restarted"), [(0, False), (2, False), (126, False), (127, False), (75, True), (1, True)]
)
def test_only_failures_that_may_pass_are_restarted(tmp_path, code, restarted):
  fake_program(tmp_path, "srun", f'echo "$@" >> {tmp_path}/srun.log; exit {code}')
  fake_program(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/scontrol.log')
  environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
  environment["RESTART_SECONDS"] = "0"
  job = ["bash", LAUNCH / "slurm.sbatch", "steps=5"]
  result = subprocess.run(job, env=environment, check=False, capture_output=True)
  assert (tmp_path / "scontrol.log").exists() == restarted
  assert restarted or result.returncode == code
  started = (tmp_path / "srun.log").read_text()
  assert started == "--label --wait=60 --cpu-bind=none python -m maxlite.train steps=5\n"
  again = [LAUNCH / "restart.sh", "2", tmp_path / "srun"]
  result = subprocess.run(again, env=environment, check=False, capture_output=True)
  assert result.returncode == code
  num_starts = 1
  if restarted:
    num_starts = 3
  assert (tmp_path / "srun.log").read_text().count("\n") == 1 + num_starts


def test_a_restarted_command_gets_signals_and_is_not_restarted(tmp_path):
  program = f"trap 'echo stopped > {tmp_path}/log; exit 143' TERM; echo; sleep 30 & wait"
  command = [LAUNCH / "restart.sh", "5", "bash", "-c", program]
  with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    process.terminate()
    assert process.wait(10) == 143
  assert (tmp_path / "log").read_text() == "stopped\n"


def test_the_image_installs_what_setup_declares():
  text = (LAUNCH / "Dockerfile").read_text()
  copied = re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
  root = LAUNCH.parents[1]
  for path in " ".join(copied).split():
    assert (root / path).exists()
  assert '--editable ".[${EXTRAS}]"' in text
  assert "ARG EXTRAS=tpu" in text
  assert '"tpu": [' in (root / "setup.py").read_text()


def test_too_few_arguments_print_the_usage():
  result = subprocess.run([LAUNCH / "tpu_vm.sh", "t1"], capture_output=True, text=True, check=False)
  assert result.returncode == 2
  assert "tools/launch/tpu_vm.sh [--dry-run] NAME ZONE" in result.stderr
