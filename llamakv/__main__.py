"""``python -m llamakv`` is the ``llamakv`` command."""

from llamakv.cli.app import main

if __name__ == "__main__":
    main()
