"""`python -m cpnorm`: the command, for launchers such as torchrun."""

import sys

from cpnorm.cli import main

sys.exit(main())
