# SPDX-License-Identifier: Apache-2.0
"""``python -m tiledattn``: the command line."""

import sys

from tiledattn.cli import main

sys.exit(main())
