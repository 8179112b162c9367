"""Authorities and certificates for tests, made when they are needed."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path
from typing import Final, final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdhandoff import TlsConfig

__all__ = ["EXPIRED", "NOT_YET", "VALID", "Authority"]

_Key = ec.EllipticCurvePrivateKey
_Days = tuple[int, int]

VALID: Final = (-2, 30)
"days from now"
EXPIRED: Final = (-2, -1)
NOT_YET: Final = (10, 20)


@final
class Authority:
    """Signs certificates. Files go to a folder of the test's."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self.name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        self._certificate = (
            _builder(subject, self._key, VALID)
            .issuer_name(subject)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = _write(folder / f"{name}.pem", self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *hosts: str,
        days: _Days = VALID,
        client_only: bool = False,
        password: bytes | None = None,
        names: tuple[str, ...] | None = None,
        trust: Authority | None = None,
    ) -> TlsConfig:
        """A certificate for some hosts (default: 127.0.0.1 and the name), and settings that use it.

        Args:
            name: of the files, and in the certificate.
            hosts: names, addresses and URIs in the certificate.
            days: from when to when it is valid.
            client_only: it is not good for a server.
            password: locks the key.
            names: whom this side lets connect.
            trust: whose certificates this side takes. Default: this authority's.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([] if client_only else [ExtendedKeyUsageOID.SERVER_AUTH])]
        certificate = (
            _builder(_name(name), key, days)
            .issuer_name(_name(self.name))
            .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts or ("127.0.0.1", name)]), False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        stem = f"{self.name}-{name}"
        lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        return TlsConfig(
            ca=(trust or self).ca,
            certificate=_write(self.folder / f"{stem}.pem", certificate.public_bytes(encoding)),
            key=_write(self.folder / f"{stem}.key", key.private_bytes(encoding, form, lock)),
            names=names,
        )


def _builder(subject: x509.Name, key: _Key, days: _Days) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + dt.timedelta(days=days[0]))
        .not_valid_after(now + dt.timedelta(days=days[1]))
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    if "://" in host:
        return x509.UniformResourceIdentifier(host)
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)
