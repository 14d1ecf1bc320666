"""Compiled programs, kept on disk between starts.

JAX's own persistent cache checks neither a key nor the content of an entry, so jserve keeps its own. A serialized
executable is unpickled to load it, and unpickling runs code: an entry is read only if an HMAC over its key and body,
made with a key file that only this user can read, is right. Anything odd counts as absent, and is compiled anew.

Other settings, sources and versions have other keys, so entries come and are never overwritten. Each time a store is
opened, those used longest ago go until the rest is within a bound.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import pickle
import secrets
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

__all__ = ["ProgramStore"]

_MAGIC = b"jserve-program-1\n"
_MAC_BYTES = 32
_MAX_BYTES = 2 * 2**30
"""Entries together, when a store is opened: a few hundred programs of a CPU."""
_STALE_S = 3600.0
"""Older drafts are of processes that died while they wrote."""
log = logging.getLogger(__name__)


class ProgramStore:
    """A folder (mode 0700) of authenticated executables. Safe for several processes at once.

    Raises OSError for a folder that cannot be made, written to, or that belongs to another user.
    """

    def __init__(self, folder: Path, *, max_bytes: int = _MAX_BYTES) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
        if owner != os.geteuid():  # such as root's, in a home that is not root's
            raise PermissionError(f"{folder} belongs to user {owner}; programs are loaded from one's own folder only")
        folder.chmod(0o700)
        self._secret = _secret(folder / "key")
        _prune(folder, max_bytes)

    @classmethod
    def open(cls, folder: Path) -> ProgramStore | None:
        """The store in ``folder``, or None (and a warning) where there can be none: a start does without."""
        try:
            return cls(folder)
        except OSError as error:
            log.warning("compiled programs are not kept: %s", error)
            return None

    def path(self, key: str) -> Path:
        """Where the program with this key (any text that names all that it depends on) lies."""
        return self.folder / (hashlib.sha256(key.encode()).hexdigest() + ".program")

    def load(self, key: str, devices: list[jax.Device]) -> Compiled | None:
        """The program, or None where there is none that can be trusted."""
        path = self.path(key)
        try:
            data = path.read_bytes()
            with suppress(OSError):
                os.utime(path)  # used now: pruning goes by it
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("stored program %s cannot be read; compiling it anew: %s", path.name, error.strerror)
            return None
        head = len(_MAGIC) + _MAC_BYTES
        body = data[head:]
        known = data[: len(_MAGIC)] == _MAGIC
        if not known or not hmac.compare_digest(data[len(_MAGIC) : head], self._mac(key, body)):
            log.warning("stored program %s is damaged or not ours; compiling it anew", path.name)
            return None
        try:
            payload, in_tree, out_tree = pickle.loads(body)  # noqa: S301  (authenticated above)
            return serialize_executable.deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)
        except Exception:  # whatever the runtime dislikes about it, compiling anew is right
            log.warning("stored program %s does not load; compiling it anew", path.name, exc_info=True)
            return None

    def save(self, key: str, program: Compiled) -> None:
        """Write the program, whole or not at all. A full disk costs the entry, never the start; so does a device
        whose programs cannot be written down."""
        try:
            body = pickle.dumps(serialize_executable.serialize(program))
        except Exception:  # whatever the runtime raises about it
            log.warning("a compiled program cannot be stored", exc_info=True)
            return
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False, suffix=".tmp") as file:
                draft = Path(file.name)
                try:
                    file.write(_MAGIC + self._mac(key, body) + body)
                    file.flush()
                    draft.replace(self.path(key))
                except BaseException:
                    draft.unlink(missing_ok=True)
                    raise
        except OSError as error:
            log.warning("cannot store a compiled program in %s: %s", self.folder, error)

    def _mac(self, key: str, body: bytes) -> bytes:
        mac = hmac.new(self._secret, digestmod=hashlib.sha256)
        mac.update(len(key.encode()).to_bytes(8, "big") + key.encode() + body)
        return mac.digest()


def _prune(folder: Path, max_bytes: int) -> None:
    """Remove drafts that nobody finishes, and entries beyond ``max_bytes``, those used longest ago first.

    Other processes may do the same, or load and save, at any moment: a file that is gone already is no error, and an
    entry that one of them wanted is compiled anew.
    """
    entries = []
    for path in folder.iterdir():
        with suppress(OSError):
            stat = path.stat()
            draft = path.suffix == ".tmp" or path.name.startswith("key.")
            if draft and time.time() - stat.st_mtime > _STALE_S:
                path.unlink()
            elif path.suffix == ".program" and path.is_file():
                entries.append((stat.st_mtime, stat.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= max_bytes:
            return
        with suppress(OSError):
            path.unlink(missing_ok=True)
            total -= size


def _secret(path: Path) -> bytes:
    """This user's key, made once. A key file that others could have read or made is replaced; entries made with it
    count as absent from then on."""
    try:
        stat = path.stat()
        own = stat.st_uid == os.geteuid() and stat.st_mode & 0o077 == 0
        if own and len(secret := path.read_bytes()) == 32:
            return secret
        path.unlink()
    except FileNotFoundError:
        pass
    secret = secrets.token_bytes(32)
    draft = path.with_name(f"key.{os.getpid()}.{secrets.token_hex(4)}")
    draft.touch(mode=0o600)
    draft.write_bytes(secret)
    try:
        os.link(draft, path)  # fails where another process was first; then its key counts
    except FileExistsError:
        secret = path.read_bytes()
    finally:
        draft.unlink()
    return secret
