"""The tasks of evaluations, as records."""

from maxlite.config.schema import Config
from maxlite.config.schema.entries import EvalTaskEntry
from maxlite.config.values import parse_entry
from maxlite.errors import UserError


def eval_tasks_of(cfg: Config) -> list[EvalTaskEntry]:
  """The tasks in order.

  Raises:
    UserError: an entry is wrong, or two have one name.
  """
  tasks: list[EvalTaskEntry] = []
  for n, raw in enumerate(cfg.observe.eval_tasks):
    source = raw.located(f"eval_tasks[{n}]")
    task = parse_entry(EvalTaskEntry, raw, source)
    if task.name in [other.name for other in tasks]:
      raise UserError(f"{source}: name={task.name} is also the name of another task")
    longest = cfg.data.max_target_length
    if task.max_new_tokens >= longest:
      raise UserError(
        f"{source}: max_new_tokens={task.max_new_tokens} leaves no room for a prompt in "
        f"max_target_length={longest}; write max_new_tokens: {max(longest // 2, 1)}"
      )
    tasks.append(task)
  return tasks
