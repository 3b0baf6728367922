"""The figures that plotting functions draw, instead of their files."""

import sys


def figures_of(monkeypatch, draw, *arguments):
  """The figures that `draw` saves with these arguments."""
  figures = []
  module = sys.modules[draw.__module__]
  monkeypatch.setattr(module, "save_figure", lambda figure, _: figures.append(figure))
  draw(*arguments)
  return figures


def figure_of(monkeypatch, draw, *arguments):
  """The figure of a function whose last argument is a path, which is not needed."""
  (figure,) = figures_of(monkeypatch, draw, *arguments, None)
  return figure
