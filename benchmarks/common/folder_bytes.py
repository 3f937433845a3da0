"""Bytes below a folder while another process writes to it."""

import os
import threading
from pathlib import Path


class FolderWatch:
    """Watch of the bytes of all files below `folder`, counted every `interval` seconds; `peak` is the maximum."""

    def __init__(self, folder: Path, interval: float = 1.0) -> None:
        self.peak = 0
        self._folder, self._interval = folder, interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "FolderWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(self._interval):
            self.peak = max(self.peak, folder_bytes(self._folder))


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below `folder`; files that disappear during the count are not counted."""
    total, folders = 0, [os.fspath(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += _size(entry)
        except FileNotFoundError:
            continue
    return total


def _size(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
