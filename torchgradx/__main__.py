"""`python -m torchgradx`: the facts of the installation; with arguments, the command line."""

import sys

from torchgradx.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["info"]))
