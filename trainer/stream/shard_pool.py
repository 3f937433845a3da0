"""Pool of open shards: each footer or index is read and parsed once, and dropped when others are needed more."""

import threading
from collections import OrderedDict
from concurrent.futures import Future

from schemas.manifest import Shard, shard_url
from schemas.shard_files.ranges import Access
from schemas.shard_files.shards import OpenShard, open_shard


class ShardPool:
    """Shards used last: at most FILES, and at most BYTES of what was parsed. Safe to use from several threads."""

    FILES = 256
    BYTES = 256 << 20

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Future[OpenShard]] = OrderedDict()
        self._bytes = 0

    def get(self, url: str, shard: Shard) -> OpenShard:
        """Return `shard` of the table at `url`, opened by one thread for all. Raises TableError, StorageError."""
        place = shard_url(url, shard)
        with self._lock:
            is_new = place not in self._open
            future = self._open.setdefault(place, Future())
            self._open.move_to_end(place)
        if not is_new:
            return future.result()
        try:
            opened = open_shard(url, shard, self._access)
        except BaseException as error:
            with self._lock:
                self._open.pop(place, None)
            future.set_exception(error)
            raise
        future.set_result(opened)
        with self._lock:
            self._bytes += opened.memory
            self._evict()
        return opened

    def close(self) -> None:
        """Close local files; what was parsed of remote ones is kept."""
        with self._lock:
            for place, future in list(self._open.items()):
                if future.done() and future.result().local:
                    self._bytes -= self._open.pop(place).result().memory

    def _evict(self) -> None:
        """Drop the shards used longest ago; a thread that still reads one keeps it."""
        for place in list(self._open):
            if (len(self._open) <= self.FILES and self._bytes <= self.BYTES) or len(self._open) == 1:
                return
            if self._open[place].done():
                self._bytes -= self._open.pop(place).result().memory
