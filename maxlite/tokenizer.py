"""`python -m maxlite.tokenizer`: another name of `python -m maxlite.data train_tokenizer`."""

import sys

from maxlite.data.__main__ import main

if __name__ == "__main__":
  sys.exit(main(["train_tokenizer", *sys.argv[1:]]))
