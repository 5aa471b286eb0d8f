"""The certificates of the gRPC port, read again when their files change."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import grpc

from serve_app.settings import TlsSettings

logger = logging.getLogger(__name__)


class Certificates:
    """The files of `TlsSettings` on this node.

    Args:
        settings: the paths.

    Raises:
        ValueError: a file cannot be read.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self._stamp = self._stamped()
        self._configuration = self._read()

    def now(self) -> grpc.ServerCertificateConfiguration:
        """Return the certificates as they were read last."""
        return self._configuration

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return new certificates, or None if the files are as before.

        gRPC asks for each new connection. Files that cannot be read leave the certificates as they are.
        """
        try:
            stamp = self._stamped()
            if stamp == self._stamp:
                return None
            self._configuration = self._read()
        except ValueError as error:
            logger.error("the certificates stay as they are: %s", error)
            return None
        self._stamp = stamp
        logger.warning("the certificates were read again")
        return self._configuration

    def _read(self) -> grpc.ServerCertificateConfiguration:
        settings = self._settings
        pair = (_bytes(settings.key), _bytes(settings.certificate))
        roots = _bytes(settings.client_ca) if settings.client_ca else None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def _stamped(self) -> tuple[tuple[int, int, int], ...]:
        settings = self._settings
        paths = [path for path in (settings.certificate, settings.key, settings.client_ca) if path]
        try:
            stats = [os.stat(path) for path in paths]
        except OSError as error:
            raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from None
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in stats)


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
