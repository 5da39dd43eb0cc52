"""``python -m razona`` is ``razona``."""

import sys

from razona.cli import main

sys.exit(main())
