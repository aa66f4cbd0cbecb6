"""`python -m common.cli` is `sparrow`."""

import sys

from common.cli.command_line import main

sys.exit(main())
