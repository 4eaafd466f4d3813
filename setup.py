"""Installs hetfl; see README.md."""

import pathlib
import shutil

import setuptools
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent


class BuildPy(build_py):
  """Puts the commands into wheels, for `hetfl COMMAND`."""

  def run(self):
    """Builds the package, then copies `experiments/` into it."""
    super().run()
    if not self.editable_mode:
      there = pathlib.Path(self.build_lib, "hetfl", "experiments")
      nothing = shutil.ignore_patterns("__pycache__")
      shutil.copytree(ROOT / "experiments", there, ignore=nothing)


setuptools.setup(
  name="hetfl",
  version="0.1.0",
  description="Heterogeneous federated learning by distillation, in JAX",
  long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  license_files=["LICENSE", "NOTICE"],
  # Makes an editable installation put this folder on the path. With a finder
  # instead, `import hetfl` beside a clone named hetfl would find the clone.
  package_dir={"": "."},
  cmdclass={"build_py": BuildPy},
  entry_points={"console_scripts": ["hetfl = hetfl_commands:main"]},
  py_modules=["hetfl_commands"],
  packages=setuptools.find_packages(include=["hetfl", "hetfl.*"]),
  package_data={"hetfl": ["py.typed"], "hetfl.data": ["digits.npz"]},
  python_requires=">=3.11",
  install_requires=[
    "absl-py>=2",
    "chex>=0.1.90",
    "fedjax>=0.0.17",
    "flax>=0.12.1",  # 0.12.0 does not import with JAX 0.10
    "importlib_resources",  # tensorflow-datasets needs but does not declare it
    "jax>=0.10",
    "matplotlib>=3.8",
    "msgpack>=1",
    "numpy>=2",
    "optax>=0.2.8",
    "pytest>=8",
    "scipy>=1.12",
    "tensorboardX>=2.6",
    "tensorflow-datasets>=4.9.8",
    "tqdm>=4.66",
  ],
  extras_require={
    "test": [
      "dp-accounting>=0.6",
      "hypothesis>=6",
      "mypy>=2.4",
      "optuna>=4",
      "pytest-xdist>=3",
      "ruff>=0.14",
      "scikit-learn>=1.4",
      "tokenizers>=0.20",
    ],
    "bench": ["torch"],
    "docs": [
      "mkdocs>=1.6,<2",
      "mkdocs-material>=9.6",
      "mkdocstrings[python]>=1",
      "ruff>=0.14",  # sets the signatures
    ],
    "examples": ["scikit-learn>=1.4"],
    "language": ["nltk>=3.9"],
    "privacy": ["dp-accounting>=0.6"],
    "tune": ["optuna>=4"],
    "tfds": ["tensorflow>=2.16", "array_record"],
    "cuda": ["jax[cuda13]>=0.10"],
    "cuda12": ["jax[cuda12]>=0.10"],  # for drivers older than 580
    "tpu": ["jax[tpu]>=0.10"],
  },
  classifiers=[
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
  ],
)
