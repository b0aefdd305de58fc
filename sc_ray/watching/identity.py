"""The name under which a service knows a run, kept in the run's directory for its next start."""

from __future__ import annotations

import secrets
from pathlib import Path

from sc_ray.run_directory import LOGS


class Identity:
    """One id of one service. A run that starts afresh gets a new one."""

    def __init__(self, run_dir: Path, service: str, *, afresh: bool) -> None:
        self._path = run_dir / LOGS / f"{service}.id"
        self._afresh = afresh

    def kept(self) -> str | None:
        """The id that an earlier start kept, if this one goes on from it."""
        if self._afresh or not self._path.is_file():
            return None
        return self._path.read_text().strip() or None

    def keep(self, identity: str) -> None:
        """Have later starts find it."""
        staged = self._path.with_suffix(".tmp")
        staged.write_text(f"{identity}\n")
        staged.replace(self._path)
        self._afresh = False

    def kept_or_new(self) -> str:
        """The kept one, or a random one, which is kept from now on."""
        identity = self.kept()
        if identity is None:
            identity = self.new()
            self.keep(identity)
        return identity

    def new(self) -> str:
        """Another one, at random; not kept."""
        return secrets.token_hex(8)
