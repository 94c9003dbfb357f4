# SPDX-License-Identifier: Apache-2.0
"""Print the shell command of README.md that follows the marker <!-- ci: NAME -->, word for word.

python scripts/readme_command.py test
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def main() -> int:
    """Print the command that the command line names; return the exit status."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    pattern = rf"<!-- ci: {re.escape(sys.argv[1])} -->\s*```(?:bash|sh|console)\n(.*?)```"
    commands = re.findall(pattern, README.read_text(encoding="utf-8"), re.DOTALL)
    if len(commands) != 1:
        print(
            f"README.md has {len(commands)} commands marked <!-- ci: {sys.argv[1]} -->; wanted 1",
            file=sys.stderr,
        )
        return 1
    print(commands[0], end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
