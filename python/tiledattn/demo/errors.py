# SPDX-License-Identifier: Apache-2.0
"""The one error of the demo that is shown as a message instead of a traceback."""

from __future__ import annotations


class DemoError(Exception):
    """Something that the user of the demo can put right; the message says how."""
