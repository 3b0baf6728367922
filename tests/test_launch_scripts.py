"""The launch scripts, checked by the parsers and programs that consume them."""

import os
import re
import shutil
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
  "SECRET": "big-token",
  "CPUS": "100",
  "MEMORY": "400Gi",
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


def kubernetes_objects():
  """By kind, what gke_jobset.yaml defines for some values of its variables."""
  text = (LAUNCH / "gke_jobset.yaml").read_text()
  for name, value in JOBSET.items():
    text = text.replace(f"${{{name}}}", value)
  assert "${" not in text
  return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_the_jobset_is_valid_for_kubernetes():
  models = pytest.importorskip("kubeflow_trainer_api.models", reason="no kubeflow-trainer-api")
  written = kubernetes_objects()["JobSet"]
  read = models.JobsetV1alpha2JobSet.from_dict(written)
  assert read.to_dict() == written  # an unknown field would be missing


def test_pods_are_not_root_and_get_the_token_from_a_secret():
  (job,) = kubernetes_objects()["JobSet"]["spec"]["replicatedJobs"]
  pod = job["template"]["spec"]["template"]["spec"]
  user = pod["securityContext"]
  assert user["runAsNonRoot"] is True
  assert user["runAsUser"] == user["runAsGroup"] == user["fsGroup"] == 1000
  assert user["seccompProfile"] == {"type": "RuntimeDefault"}
  (container,) = pod["containers"]
  limits = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
  assert container["securityContext"] == limits
  assert container["env"] == [
    {
      "name": "MAXLITE_COORDINATOR_TOKEN",
      "valueFrom": {"secretKeyRef": {"name": "big-token", "key": "token"}},
    }
  ]
  resources = container["resources"]
  assert resources["requests"] == {"cpu": 100, "memory": "400Gi"}
  assert resources["limits"] == {"memory": "400Gi", "google.com/tpu": 4}
  assert re.search(r"^USER 1000$", (LAUNCH / "Dockerfile").read_text(), re.MULTILINE)


def test_only_pods_of_the_run_may_connect_to_its_pods():
  objects = kubernetes_objects()
  assert objects.keys() == {"NetworkPolicy", "JobSet"}
  name = objects["JobSet"]["metadata"]["name"]
  pods = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}
  assert objects["NetworkPolicy"]["spec"] == {
    "podSelector": pods,
    "policyTypes": ["Ingress"],
    "ingress": [{"from": [{"podSelector": pods}]}],
  }


def test_the_command_of_a_pod_raises_the_soft_limit_and_starts_the_run(tmp_path):
  (job,) = kubernetes_objects()["JobSet"]["spec"]["replicatedJobs"]
  (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
  fake_program(tmp_path, "python", 'echo "$@"')
  environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
  result = subprocess.run(
    container["command"], env=environment, check=True, capture_output=True, text=True
  )
  keys = "jax_cache_dir=/runs/.jax configs/base.yml run_name=big base_output_directory=/runs"
  assert result.stdout == f"-m maxlite.train {keys}\n"
  assert result.stderr == ""


def test_all_workers_of_a_tpu_get_the_arguments_unchanged(tmp_path):
  arguments = ["configs/base.yml", "run_name=a b"]
  script = [LAUNCH / "tpu_vm.sh", "--dry-run", "t1", "us-east5-a"]
  copy, install, train = lines_of([*script, *arguments])
  assert re.match(r"gcloud compute tpus tpu-vm scp \S+/maxlite.tar.gz \S+/maxlite.token t1:", copy)
  assert "pip" in install
  to_gcloud = lines_of(["bash", "-c", f"gcloud() {{ printf '%s\\n' \"$@\"; }}; {train}"])
  assert {"--zone=us-east5-a", "--worker=all", "t1"} <= set(to_gcloud)
  (command,) = (argument for argument in to_gcloud if argument.startswith("--command="))
  setup, on_worker = command.split(" && exec tools/launch/restart.sh 20 .venv/bin/python")
  # The secret is read from a file on the worker, and is on no command line.
  (tmp_path / "maxlite").mkdir()
  (tmp_path / "maxlite.token").write_text("0123\n")
  show_token = f"{setup.removeprefix('--command=')} && bash -c 'echo $MAXLITE_COORDINATOR_TOKEN'"
  shown = subprocess.run(["bash", "-c", show_token], cwd=tmp_path, check=True, capture_output=True)
  assert shown.stdout == b"0123\n"
  assert not (tmp_path / "maxlite.token").exists()
  assert not re.search("[0-9a-f]{32}", "".join([copy, install, train]))
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
