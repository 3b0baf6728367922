"""`python -m maxlite.ensemble export RUN member=NAME [run_name=NEW]`: a member as a plain run.

`python -m maxlite.ensemble worker RUN ROWS NAME ...` is what strategy `processes` starts.
"""

import sys

from maxlite.ensemble.cli import main

if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
