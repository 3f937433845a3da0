"""Print a list of what an image is made of, CycloneDX 1.5: Python distributions and Debian packages. sbom.py NAME"""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import quote


def distributions() -> Iterator[dict]:
    """Yield this Python's distributions."""
    for found in importlib.metadata.distributions():
        name, version = found.metadata["Name"], found.version
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{quote(version)}"
        licence = found.metadata.get("License-Expression")
        yield component(name, version, purl) | ({"licenses": [{"expression": licence}]} if licence else {})


def packages() -> Iterator[dict]:
    """Yield Debian's packages; none elsewhere."""
    if shutil.which("dpkg-query"):
        form = "${Package}\t${Version}\t${Architecture}\n"
        listed = subprocess.run(["dpkg-query", "-W", "-f", form], capture_output=True, text=True, check=True).stdout
        for line in listed.splitlines():
            name, version, machine = line.split("\t")
            yield component(name, version, f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={machine}")


def component(name: str, version: str, purl: str) -> dict:
    """Return an entry of the list."""
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


components = {each["purl"]: each for each in (*distributions(), *packages())}
subject = {"type": "container", "name": f"extremis-{sys.argv[1]}", "version": importlib.metadata.version("extremis-xc")}
listing = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": subject}}
json.dump(listing | {"components": [components[purl] for purl in sorted(components)]}, sys.stdout, indent=1)
print()
