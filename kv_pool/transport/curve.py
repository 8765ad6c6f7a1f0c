"""CURVE for zmq sockets off loopback: who we are, and whom we let in.

Each process has a key pair in a file and a list of public keys that it talks to. An endpoint carries the public key of who
listens there (``tcp://host:port?key=<64 hex digits>``), so that everything that hands on an endpoint hands on the key too; it is
believed only if it is on the list. Key files are those of zmq (``zmq.auth``); ``moonpool pool keys DIR`` makes a pair.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from kv_pool.settings import CurveSettings

KEY_FILE_BYTES_MAX: Final = 64 * 1024
ALLOWED_KEYS_MAX: Final = 4096
ANYBODY_ELSE: Final = stat.S_IRWXG | stat.S_IRWXO
KEY_MARK: Final = "?key="
PAIR_NAME: Final = "pool"
DOMAIN: Final = b"pool"

_quiet = logging.getLogger("kv_pool.zap")
_quiet.setLevel(logging.ERROR)  # whoever knocks must not fill the log


class CurveKeyError(ValueError):
    """Keys are missing, or a key file cannot be used. The text names the setting or the file, never a secret."""


class ConnectionRefusedByPolicyError(zmq.ZMQError):
    """This endpoint is not one that may be talked to: in the clear off loopback, or of an unknown key."""

    def __init__(self, why: str) -> None:
        super().__init__(zmq.EPROTONOSUPPORT, why)


@dataclass(frozen=True)
class CurveKeys:
    """Keys in zmq's text form (Z85). ``allowed`` always has our own: one pair for a whole cluster is the least there can be."""

    public: bytes
    secret: bytes
    allowed: frozenset[bytes]

    def __repr__(self) -> str:
        return f"CurveKeys({to_hex(self.public)[:8]}..., {len(self.allowed)} allowed)"

    @classmethod
    def load(cls, settings: CurveSettings) -> CurveKeys | None:
        """None where no key file is named. Raises :class:`CurveKeyError`."""
        if not settings.secret_key_file:
            if settings.allowed_keys:
                raise CurveKeyError("pool.curve_allowed_keys: needs pool.curve_secret_key_file too")
            return None
        path = Path(settings.secret_key_file)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise CurveKeyError(f"pool.curve_secret_key_file: {path}: {error.strerror}") from None
        if mode & ANYBODY_ELSE:
            raise CurveKeyError(f"pool.curve_secret_key_file: {path} can be read by others than its owner (chmod 600)")
        public, secret = _read(path, "pool.curve_secret_key_file")
        if secret is None:
            raise CurveKeyError(f"pool.curve_secret_key_file: {path} holds no secret key (the file ends in .key_secret)")
        return cls(public, secret, frozenset({public, *_allowed(settings.allowed_keys)}))

    def serve(self, socket: zmq.Socket[Any]) -> None:
        """Let in only whom a :class:`Gatekeeper` of the socket's context allows. Before the bind."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)

    def visit(self, socket: zmq.Socket[Any], server: bytes) -> None:
        """Talk to nobody but the owner of the key ``server``. Before the connect."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


class Gatekeeper:
    """Answers zmq's question "may this key come in?" for all sockets of one context, on a thread of its own. Made before the
    first bind, closed before the context."""

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        self._allowed = keys.allowed
        self._authenticator = ThreadAuthenticator(context, log=_quiet)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=DOMAIN.decode(), credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """zmq.auth calls it, on its thread."""
        return key in self._allowed

    def close(self) -> None:
        self._authenticator.stop()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_host(host: str, keys: CurveKeys | None) -> None:
    """Raises :class:`CurveKeyError` where sockets on ``host`` could be reached by strangers."""
    if keys is None and not is_loopback(host):
        raise CurveKeyError(
            f"pool.host: {host} is not loopback, so pool.curve_secret_key_file must name a key file "
            "('moonpool pool keys DIR' makes one)"
        )


def announced(address: str, keys: CurveKeys | None) -> str:
    """The endpoint under which others find a socket bound to ``address``."""
    return address if keys is None else f"{address}{KEY_MARK}{to_hex(keys.public)}"


def address_of(endpoint: str) -> str:
    """The part of an endpoint that zmq understands."""
    return endpoint.partition(KEY_MARK)[0]


def connect(socket: zmq.Socket[Any], endpoint: str, keys: CurveKeys | None) -> None:
    """Connect to an announced endpoint. Raises zmq.ZMQError, :class:`ConnectionRefusedByPolicyError` among them."""
    address, _, hexadecimal = endpoint.partition(KEY_MARK)
    if hexadecimal:
        server = from_hex(hexadecimal)
        if keys is None:
            raise ConnectionRefusedByPolicyError("it wants CURVE, and we have no keys (pool.curve_secret_key_file)")
        if server not in keys.allowed:
            raise ConnectionRefusedByPolicyError("its key is not among pool.curve_allowed_keys")
        keys.visit(socket, server)
    elif not is_loopback(address.removeprefix("tcp://").rpartition(":")[0]):
        raise ConnectionRefusedByPolicyError("it is off loopback and announces no key")
    socket.connect(address)


def make_pair(directory: Path) -> tuple[Path, Path]:
    """Write a new pair into ``directory`` (made where it is missing): (public file, secret file). Raises OSError, FileExistsError
    where there is a pair already."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    public, secret = directory / f"{PAIR_NAME}.key", directory / f"{PAIR_NAME}.key_secret"
    for path in (public, secret):
        if path.exists():
            raise FileExistsError(17, "there is a key already", str(path))
    before = os.umask(0o077)
    try:
        zmq.auth.create_certificates(directory, PAIR_NAME)
    finally:
        os.umask(before)
    public.chmod(0o644)
    return public, secret


def to_hex(key: bytes) -> str:
    return z85.decode(key).hex()


def from_hex(text: str) -> bytes:
    """Raises :class:`ConnectionRefusedByPolicyError` where it is no key."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise ConnectionRefusedByPolicyError("the key that it announces is none")
    return z85.encode(raw)


def _allowed(path: str) -> set[bytes]:
    if not path:
        return set()
    where = Path(path)
    files = sorted(where.glob("*.key")) if where.is_dir() else [where]
    if not files or len(files) > ALLOWED_KEYS_MAX:
        raise CurveKeyError(
            f"pool.curve_allowed_keys: {where} has {len(files)} files named *.key, 1 .. {ALLOWED_KEYS_MAX} are needed"
        )
    return {_read(file, "pool.curve_allowed_keys")[0] for file in files}


def _read(path: Path, setting: str) -> tuple[bytes, bytes | None]:
    try:
        if path.stat().st_size > KEY_FILE_BYTES_MAX:
            raise CurveKeyError(f"{setting}: {path} is no key file")
        public, secret = zmq.auth.load_certificate(path)
        if len(z85.decode(public)) != 32 or (secret is not None and len(z85.decode(secret)) != 32):
            raise ValueError
    except CurveKeyError:
        raise
    except OSError as error:
        raise CurveKeyError(f"{setting}: {path}: {error.strerror or 'cannot be read'}") from None
    except Exception:
        raise CurveKeyError(f"{setting}: {path} is no key file") from None
    return public, secret
