"""The callback `completions`: completes prompts with the parameters of every checkpoint."""

import json
import textwrap

import jax

from maxlite.config.errors import UserError
from maxlite.inference.generation import complete, read_prompts
from maxlite.training.callbacks import Callback, CallbackContext
from maxlite.training.state import TrainState, averaged_params


class CompletionsCallback(Callback):
  """Writes what `maxlite.generate` would complete to completions.jsonl and to the trackers."""

  def on_start(self, context: CallbackContext) -> None:
    cfg, self._context = context.cfg, context
    if not cfg.checkpoint.enable_checkpointing or jax.process_count() > 1:
      raise UserError("callbacks=completions needs one process and enable_checkpointing=true")
    self._prompts = read_prompts(cfg.generate)

  def on_checkpoint(self, step: int, state: TrainState) -> None:
    context, averages = self._context, averaged_params(state)
    params = state.params if averages is None else averages
    texts = complete(context.trainer, params, self._prompts)
    pairs = list(zip(self._prompts, texts, strict=True))
    rows = [{"step": step, "prompt": prompt, "text": text} for prompt, text in pairs]
    with (context.folder / "completions.jsonl").open("a", encoding="utf-8") as file:
      file.writelines(f"{json.dumps(row)}\n" for row in rows)
    code = "\n\n".join(textwrap.indent(f"{prompt}{text}", "    ") for prompt, text in pairs)
    for tracker in context.writers.trackers:
      tracker.write_text("completions", code, step)
