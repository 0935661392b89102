"""The command line: `statekit`, and `python -m statekit`."""

import signal
import sys


def main() -> int:
    """Runs the command line and returns its exit code; Ctrl-C ends its imports without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nobody has said what it does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from statekit.cli.main import main as statekit

    return statekit()


if __name__ == "__main__":
    sys.exit(main())
