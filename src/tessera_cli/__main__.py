"""The program's start; Ctrl-C while it is still being imported is no traceback either."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the program on the process's arguments and exit."""
    try:
        from tessera_cli.cli import app
    except KeyboardInterrupt:
        sys.exit(130)
    app.main()


if __name__ == "__main__":
    main()
