"""The job's secret: records that ranks exchange carry an HMAC of it, with a nonce.

``COLLECTIVES_SECRET`` has the secret, or ``COLLECTIVES_SECRET_FILE`` the name of a file of it, which
only its owner may read. Without either, records are sent as they are. docs/reliability.md says what
is open then.
"""

from __future__ import annotations

import hmac
import os
import stat
from hashlib import sha256

from .errors import InvalidArgument, TransportError

__all__ = ["read_secret", "seal", "unseal"]

_MAGIC = b"CSEAL1\0\0"
_NONCE_BYTES = 16
_MAC_BYTES = 32
_SHORTEST = 16  # bytes
_LONGEST = 4096


def read_secret() -> bytes | None:
    """Return the job's secret, None where none is set.

    Raises `InvalidArgument` where both variables are set, the secret has fewer than 16 bytes, or
    the file can't be read, isn't this user's, or others may read it.
    """
    text, path = os.environ.get("COLLECTIVES_SECRET"), os.environ.get("COLLECTIVES_SECRET_FILE")
    if text is not None and path is not None:
        raise InvalidArgument("COLLECTIVES_SECRET and COLLECTIVES_SECRET_FILE are both set: unset one of them")
    if text is not None:
        return _check_length(text.encode("utf-8", "surrogateescape").strip(), "COLLECTIVES_SECRET")
    return None if path is None else _check_length(_read_file(path), f"COLLECTIVES_SECRET_FILE={path}")


def _read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(_LONGEST + 1).strip()
    except OSError as error:
        raise InvalidArgument(f"COLLECTIVES_SECRET_FILE={path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise InvalidArgument(
            f"COLLECTIVES_SECRET_FILE={path}: it must be a file of this user that no other may read: chmod 600 {path}"
        )
    return secret


def _check_length(secret: bytes, name: str) -> bytes:
    if not _SHORTEST <= len(secret) <= _LONGEST:
        raise InvalidArgument(f"{name}: a secret has {_SHORTEST} to {_LONGEST} bytes, not {len(secret)}")
    return secret


def seal(record: bytes, purpose: str) -> bytes:
    """Return a record with a nonce and its HMAC; the record itself where no secret is set.

    ``purpose``: what the record is for, such as its key in a store. It is part of what the HMAC
    covers, so that a record can't be passed off as another one.
    """
    secret = read_secret()
    if secret is None:
        return record
    nonce = os.urandom(_NONCE_BYTES)
    return _MAGIC + nonce + _mac(secret, nonce, purpose, record) + record


def unseal(record: bytes, purpose: str) -> bytes:
    """Return the record that `seal` was given, for the same purpose.

    Raises `TransportError` where the HMAC is missing or isn't this secret's, or where a record has
    one and this process has no secret.
    """
    secret = read_secret()
    sealed = record.startswith(_MAGIC)
    if secret is None:
        if sealed:
            raise TransportError(f"{purpose}: it was written with a COLLECTIVES_SECRET, and this process has none")
        return record
    body = len(_MAGIC) + _NONCE_BYTES + _MAC_BYTES
    if not sealed or len(record) < body:
        raise TransportError(f"{purpose}: it was written without the job's COLLECTIVES_SECRET")
    nonce, mac = record[len(_MAGIC) : len(_MAGIC) + _NONCE_BYTES], record[body - _MAC_BYTES : body]
    if not hmac.compare_digest(mac, _mac(secret, nonce, purpose, record[body:])):
        raise TransportError(f"{purpose}: it was written with another COLLECTIVES_SECRET, or changed since")
    return record[body:]


def _mac(secret: bytes, nonce: bytes, purpose: str, record: bytes) -> bytes:
    name = purpose.encode()
    return hmac.digest(secret, nonce + len(name).to_bytes(4, "big") + name + record, sha256)
