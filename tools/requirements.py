"""Print the requirements of extras and dependency groups of pyproject.toml, one a line:
``python tools/requirements.py NAME ...``.

It runs in a fresh environment: neither a newer pip, which has ``--group``, nor tomllib, which came
with Python 3.11, is needed.
"""

import re
import sys
from pathlib import Path

text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
for name in sys.argv[1:]:
    found = re.search(rf"^{re.escape(name)} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"requirements: pyproject.toml has no extra and no dependency group {name!r}")
    print(*re.findall(r'"([^"]+)"', found[1]), sep="\n")
