"""A writer to Weights & Biases, for `wandb_project`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlite.config.errors import UserError
from maxlite.metrics.step_row import Row


class WandbWriter:
  """Writes rows, text and images to a run of Weights & Biases; a resumed run continues it.

  Mode and account are those of the library: `wandb login`, or WANDB_MODE=offline.
  """

  def __init__(self, directory: Path, config: Mapping[str, Any], **names: Any):
    """Open the run with `names` (project, name, id); UserError if wandb is missing or fails."""
    try:
      import wandb
    except ImportError:
      raise UserError("wandb_project needs wandb: pip install 'maxlite[wandb]'") from None
    self._image = wandb.Image
    names |= {"resume": "allow", "settings": wandb.Settings(silent=True)}
    try:
      # create_new: members of an ensemble are runs at the same time.
      self._run = wandb.init(dir=directory, config=dict(config), reinit="create_new", **names)
    except wandb.errors.Error as error:
      line, fix = " ".join(str(error).split()), "run `wandb login`, or set WANDB_MODE=offline"
      raise UserError(f"wandb_project={names['project']}: {line}; {fix}") from None

  def write(self, row: Row) -> None:
    self._run.log({name: x for name, x in row.items() if name != "step"}, step=int(row["step"]))

  def write_text(self, name: str, text: str, step: int) -> None:
    self._run.log({name: text}, step=step)

  def write_image(self, path: Path, step: int) -> None:
    self._run.log({path.stem: self._image(str(path))}, step=step)

  def flush(self) -> None:
    """Do nothing: a separate process of wandb writes all that it has received."""

  def close(self) -> None:
    self._run.finish()
