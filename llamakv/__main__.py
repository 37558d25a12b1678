"""The ``llamakv`` command, and ``python -m llamakv``."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line. Ctrl-C while it is being imported ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from llamakv.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
