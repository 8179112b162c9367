"""`python -m pdhandoff`."""

import sys

from pdhandoff.cli.main import main

sys.exit(main())
