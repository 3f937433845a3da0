"""Print what an image with EXTRA,EXTRA installs, of locked.txt: requirements.py EXTRAS [--without PATTERN]"""

import re
import sys
from pathlib import Path

wanted, without = set(sys.argv[1].split(",")), sys.argv[3] if sys.argv[2:] else ""
entries = re.split(r"\n\n# ", (Path(__file__).parent / "locked.txt").read_text())[1:]
known = set(" ".join(entry.partition("\n")[0] for entry in entries).split())
if unknown := sorted(wanted - known):
    sys.exit(f"no extra of locked.txt: {', '.join(unknown)}; expected some of {', '.join(sorted(known))}")
for entry in entries:
    extras, _, package = entry.partition("\n")
    if wanted & set(extras.split()) and not re.fullmatch(without, package.partition("==")[0]):
        print(package.rstrip("\n"))
