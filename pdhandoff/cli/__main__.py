"""`python -m pdhandoff.cli`."""

import sys

from pdhandoff.cli.main import main

sys.exit(main())
