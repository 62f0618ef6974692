"""Run the command as `python -m paceline.cli`."""

import sys

from paceline.cli import main

if __name__ == "__main__":
    sys.exit(main())
