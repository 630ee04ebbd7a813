"""A real Sentinel, which knows where a server is."""

from pathlib import Path

from redis_server import RedisServer


class Sentinel(RedisServer):
    """Watches `master` under the name mymaster."""

    def __init__(self, folder: Path, master: RedisServer) -> None:
        super().__init__(folder)
        self.url = f"redis+sentinel://127.0.0.1:{self.port}/mymaster/0"
        self._config = folder / f"sentinel-{self.port}.conf"
        self._config.write_text(
            f"port {self.port}\nbind 127.0.0.1\nsentinel monitor mymaster 127.0.0.1 {master.port} 1\n"
        )

    def _command(self) -> list[str]:
        return [self.program(), str(self._config), "--sentinel"]
