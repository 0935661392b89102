"""`python -m statekit`: the command line."""

import sys

from statekit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
