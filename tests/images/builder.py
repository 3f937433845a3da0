"""Images built by buildah, which needs root and no daemon; their base is pulled, or stood in for."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.command import ROOT

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
BASE = f"python:{PYTHON}-slim"
_SECONDS = 3600
_POLICY = {"default": [{"type": "insecureAcceptAnything"}]}
# What Python's own modules are linked with, beside the least of Debian.
_LIBRARIES = (
    "ca-certificates,libssl3,libffi8,libsqlite3-0,zlib1g,libbz2-1.0,liblzma5,libreadline8,libexpat1,libncursesw6,"
    "libuuid1,tzdata,netbase"
)
_UNNEEDED = ("lib/python*/site-packages", "lib/python*/test", "lib/python*/config-*", "lib/*.a", "share")


class BuildError(Exception):
    """An image cannot be built."""


def missing() -> str:
    """Return what building needs and this machine has not; empty: nothing."""
    lacking = [name for name in ("buildah", "debootstrap", "unshare") if shutil.which(name) is None]
    return ", ".join(lacking + ["root"] * (os.geteuid() != 0))


@dataclass
class Image:
    """A built image: its name in the store, how it is run, and the bytes of its files and of its base's."""

    name: str
    config: dict[str, Any]
    bytes: int
    base_bytes: int


class Builder:
    """A store of images in a `folder` of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.close()  # a run that was killed leaves its images
        folder.mkdir(parents=True)
        self._policy = ["--signature-policy", str(folder / "policy.json")]
        (folder / "policy.json").write_text(json.dumps(_POLICY))
        self._options = self._store("store", self._driver())
        self.base = ""  # where the base is from

    def build(self, target: str, **arguments: str) -> Image:
        """Build a target of the Dockerfile; `arguments` are its build arguments. Raises BuildError."""
        self.prepare()
        name = f"localhost/extremis-{target}"
        stated = [f"--build-arg={key}={value}" for key, value in {"PYTHON": PYTHON, **arguments}.items()]
        how = ["--isolation=chroot", "--pull-never", "--network=host", "--format=docker"]
        self.buildah("bud", *self._policy, *how, f"--target={target}", *stated, "-t", name, str(ROOT))
        with self.root(name) as root, self.root(f"localhost/{BASE}") as base:
            sizes = [int(_out("du", "-sxB1", str(place)).split()[0]) for place in (root, base)]
        config = json.loads(self.buildah("inspect", "--type", "image", name))["Docker"]["config"]
        return Image(name, config, *sizes)

    @contextmanager
    def root(self, name: str) -> Iterator[Path]:
        """Yield the root of a container of an image; it is gone at the block's end."""
        container = self.buildah("from", "--pull-never", name).strip()
        try:
            yield Path(self.buildah("mount", container).strip())
        finally:
            self.buildah("rm", container)

    def buildah(self, *arguments: str) -> str:
        """Run buildah on this store; return what it prints. Raises BuildError."""
        done = subprocess.run(
            ["buildah", *self._options, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        if done.returncode:
            raise BuildError(f"buildah {' '.join(arguments)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def close(self) -> None:
        """Remove all images and containers."""
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            if (place := Path(line.split()[1])).is_relative_to(self.folder):
                _out("umount", "--lazy", str(place))
        _out("rm", "-rf", str(self.folder))

    def _store(self, name: str, driver: str) -> list[str]:
        place = self.folder / name
        return ["--root", str(place), "--runroot", str(place / "run"), "--storage-driver", driver]

    def _driver(self) -> str:
        """Return how layers are stacked: as overlays where this machine can mount one, as copies elsewhere."""
        self._options = self._store("probe", "overlay")
        try:
            self.buildah("mount", self.buildah("from", "scratch").strip())
            self.buildah("rm", "--all")
        except BuildError:
            return "vfs"
        finally:
            shutil.rmtree(self.folder / "probe", ignore_errors=True)
        return "overlay"

    def prepare(self) -> None:
        """Get the base: pulled, or the least of Debian with this machine's Python. Raises BuildError."""
        if self.base:
            return
        try:
            self.buildah("pull", *self._policy, f"docker.io/library/{BASE}")
            self.base = "Docker Hub"
        except BuildError:
            self._stand_in(self.folder / "base")
            self.base = "a stand-in"

    def _stand_in(self, root: Path) -> None:
        made = ["debootstrap", "--variant=minbase", f"--include={_LIBRARIES}", "bookworm", str(root)]
        try:
            _out(*made)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"neither {BASE} nor a Debian to stand in for it ({error})") from None
        local = root / "usr" / "local"
        shutil.copytree(sys.base_prefix, local, symlinks=True, dirs_exist_ok=True)
        unneeded = [path for pattern in _UNNEEDED for path in local.glob(pattern)]
        for path in (*unneeded, root / "var/cache/apt", root / "var/lib/apt/lists"):
            _out("rm", "-rf", str(path))
        for setting in (Path("/etc/pip.conf"), Path("/etc/ssl/certs/ca-certificates.crt")):
            if setting.exists():
                shutil.copy(setting, root / setting.relative_to("/"))
        (root / "etc/ld.so.conf.d/local.conf").write_text("/usr/local/lib\n")
        # As in Docker Hub's: tens of MB that apt-get would leave.
        (root / "etc/apt/apt.conf.d/docker-clean").write_text('Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n')
        _out("chroot", str(root), "ldconfig")
        _out("chroot", str(root), f"/usr/local/bin/python{PYTHON}", "-m", "ensurepip")
        for name in ("python", "pip"):
            (local / "bin" / name).unlink(missing_ok=True)
            (local / "bin" / name).symlink_to(f"{name}{PYTHON}")
        container = self.buildah("from", "scratch").strip()
        self.buildah("add", "--quiet", container, str(root), "/")
        self.buildah("commit", "--quiet", "--rm", *self._policy, container, f"localhost/{BASE}")
        _out("rm", "-rf", str(root))


def _out(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
