"""A container of an image: its program is the first process of a namespace, on the network of this machine."""

import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.images.builder import Builder, Image

USER = "1000:1000"  # of the images
ANYONE = "4321:4321"  # a user that no image knows
_START = """\
set -e
touch {root}/etc/hosts {root}/etc/resolv.conf
mount --bind {root} {root}
mount -t proc proc {root}/proc
mount --rbind /dev {root}/dev
mount --bind /etc/hosts {root}/etc/hosts
mount --bind /etc/resolv.conf {root}/etc/resolv.conf
mount -t tmpfs -o mode=1777 tmp {root}/tmp
{mounts}
mount -o remount,bind,{access} {root}
exec chroot --userspec={user} {root} /usr/bin/env -i {environment} /bin/sh -c 'cd {folder} && exec "$@"' - {words}
"""


class Container:
    """A container whose root is in `root`; `mounts` are folders of this machine that it has at the same places."""

    def __init__(self, root: Path, image: Image, mounts: Sequence[Path]) -> None:
        self.root = root
        self.image = image
        self.mounts = mounts

    def run(
        self, *words: str | Path, user: str = USER, entry: Sequence[str] | None = None, seconds: float = 600
    ) -> subprocess.CompletedProcess:
        """Run the image, or another program of its, with arguments `words`; for ANYONE the root is read alone."""
        command = self._command(words, user, entry)
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)

    @contextmanager
    def started(self, log: Path, *words: str) -> Iterator[subprocess.Popen]:
        """Run the image with arguments `words` until the block ends; what it writes goes to `log`."""
        with log.open("w") as output:
            process = subprocess.Popen(self._command(words, USER, None), stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.kill()  # everything in the container ends with it
            process.wait()

    def check_health(self, pid: int) -> subprocess.CompletedProcess:
        """Run the image's health check in a started container, whose first process is `pid` on this machine."""
        inside = ["nsenter", f"--target={pid}", "--mount", "--pid", "--root", "env", "-i", *self.image.config["Env"]]
        command = [*inside, *self.image.config["Healthcheck"]["Test"][1:]]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def _command(self, words: Sequence[str | Path], user: str, entry: Sequence[str] | None) -> list[str]:
        program = self.image.config["Entrypoint"] if entry is None else entry
        mounts = [f"mkdir -p {self.root}{each}; mount --bind {each} {self.root}{each}" for each in self.mounts]
        script = _START.format(
            root=self.root,
            mounts="\n".join(mounts),
            access="ro" if user == ANYONE else "rw",
            user=user,
            environment=shlex.join([*self.image.config["Env"], "OMP_NUM_THREADS=1"]),
            folder=self.image.config["WorkingDir"],
            words=shlex.join(map(str, [*program, *words])),
        )
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]


@contextmanager
def container(builder: Builder, image: Image, *mounts: Path) -> Iterator[Container]:
    """Yield a container of `image`; it is gone at the block's end."""
    with builder.root(image.name) as root:
        yield Container(root, image, mounts)
