"""Rewards of sorted words, for configs/rl/sort.yml."""


def right_letters(*, completions: list[str], answer: list[str], **_) -> list[float]:
  """The share of the letters of the answer that a completion has in their places."""
  rewards = []
  for text, wanted in zip(completions, answer, strict=True):
    right = sum(letter == other for letter, other in zip(text, wanted, strict=False))
    rewards.append(right / max(len(text), len(wanted)))
  return rewards
