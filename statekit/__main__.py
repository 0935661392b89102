"""`python -m statekit`: the command line."""

import sys

from statekit.cli.main import main

sys.exit(main())
