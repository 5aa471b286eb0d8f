"""`python -m interpose.cli` is the `interpose` command."""

import sys

from interpose.cli import main

sys.exit(main())
