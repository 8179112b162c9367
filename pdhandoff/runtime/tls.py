"""TLS for the control link: both sides show a certificate of the deployment's own authority."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError, RemoteError
from pdhandoff.protocol.link import Side

__all__ = ["Tls", "TlsConfig", "certificate_names", "failure_sentence"]

_SHOWN: Final = 256
"characters of names that an error shows"


@final
class TlsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """TLS of one endpoint. The files are PEM and are read once, when the endpoint is made."""

    ca: str
    "file with the authorities that may have signed a peer's certificate, and that signed this side's"
    certificate: str
    "file with this side's certificate, then any between it and the authority"
    key: str
    "file with this side's private key, without a pass phrase"
    names: tuple[str, ...] | None = None
    """a peer's certificate must carry one of these (DNS name, IP address or URI, whole, no wildcards). None: that of a
    consumer must carry the host that was dialled, and of producers any that an authority in `ca` has signed will do"""


@final
class Tls:
    """What `TlsConfig` names, read and tried out.

    Raises LocalError (CONFIG) that names the file when one cannot be read or used, and when peers with the same `ca`
    would refuse this side's certificate: it has expired, say.
    """

    def __init__(self, config: TlsConfig) -> None:
        if config.names == ():
            raise LocalError(ErrorCode.CONFIG, "TlsConfig.names is empty: name somebody, or leave it out")
        self.names = None if config.names is None else frozenset(name.lower() for name in config.names)
        self._listener = _context(ssl.PROTOCOL_TLS_SERVER, config)
        self._dialler = _context(ssl.PROTOCOL_TLS_CLIENT, config)
        self._dialler.check_hostname = False  # this side's own name is nobody's business here
        _try_out(self._listener, self._dialler, config)
        self._dialler.check_hostname = config.names is None

    def wrap(self, side: Side, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *, host: str = "") -> ssl.SSLObject:
        """One end of a connection; `host` is what is dialled. Raises LocalError where no certificate can name it."""
        if side is Side.LISTENER:
            return self._listener.wrap_bio(incoming, outgoing, server_side=True)
        try:
            return self._dialler.wrap_bio(incoming, outgoing, server_hostname=host.removesuffix(".") or "localhost")
        except ValueError as error:
            raise LocalError(ErrorCode.CONFIG, f"no certificate can be for the host {host!r}: {error}") from error

    def check_name(self, side: Side, certificate: Mapping[str, object] | None) -> None:
        """Check the verified certificate of the peer, which is on `side`.

        Raises RemoteError (NOT_ALLOWED) that tells the names it carries, in words that are right on both ends.
        """
        if self.names is None:
            return
        carried = certificate_names(certificate or {})
        if not any(name.lower() in self.names for name in carried):
            raise RemoteError(
                ErrorCode.NOT_ALLOWED,
                f"the {side.value}'s certificate is for {', '.join(carried)[:_SHOWN] or 'nobody'}, which "
                "TlsConfig.names of the other end does not list",
            )


def certificate_names(certificate: Mapping[str, object]) -> list[str]:
    """DNS names, IP addresses and URIs that a certificate (as `SSLObject.getpeercert` gives it) is for."""
    found = certificate.get("subjectAltName")
    pairs = found if isinstance(found, tuple) else ()
    return [str(value) for kind, value in pairs if kind in {"DNS", "IP Address", "URI"}]


def _context(protocol: int, config: TlsConfig) -> ssl.SSLContext:
    for what, path in (("ca", config.ca), ("certificate", config.certificate), ("key", config.key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise LocalError(
                ErrorCode.CONFIG, f"cannot read the file that TlsConfig.{what} names, {path}: {error.strerror}"
            ) from error
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # of 1.2: a key that is stolen later opens no recorded link
    # every link shows its certificate anew: no session lives on after its certificate has been withdrawn
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    try:
        context.load_verify_locations(config.ca)
    except ssl.SSLError as error:
        raise LocalError(ErrorCode.CONFIG, f"{config.ca} holds no certificate of an authority in PEM") from error
    try:
        # without a password OpenSSL would ask at the terminal
        context.load_cert_chain(config.certificate, config.key, password="")
    except ssl.SSLError as error:
        raise LocalError(
            ErrorCode.CONFIG,
            f"{config.certificate} and {config.key} are no certificate and its key in PEM, without a pass phrase: "
            f"{error.reason or error}",
        ) from error
    return context


def _try_out(listener: ssl.SSLContext, dialler: ssl.SSLContext, config: TlsConfig) -> None:
    """Shake hands with oneself: what a peer would refuse is better known before it connects."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = dialler.wrap_bio(back, there)
    far = listener.wrap_bio(there, back, server_side=True)
    complete = {near: False, far: False}
    while not all(complete.values()):
        for end in (near, far):
            try:
                end.do_handshake()
                complete[end] = True
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                raise LocalError(
                    ErrorCode.CONFIG,
                    f"every peer would refuse the certificate in {config.certificate}: {error.verify_message}"
                    f"{_advice(error.verify_code)}",
                ) from error
            except ssl.SSLError as error:
                raise LocalError(
                    ErrorCode.CONFIG, f"the TLS settings work not even with themselves: {error.reason or error}"
                ) from error


_ADVICE: Final = {
    9: "; look at the clocks of both machines",
    10: "; make a new one",
    18: "; let an authority in the ca file sign it",
    19: "; let an authority in the ca file sign it",
    20: "; let an authority in the ca file sign it",
    21: "; let an authority in the ca file sign it",
    26: "; it must be good for clients and servers both (extendedKeyUsage)",
    62: "; make one that carries the host as it is dialled, or list its name in TlsConfig.names",
    64: "; make one that carries the address as it is dialled, or list its name in TlsConfig.names",
}
"what to do, by the verification codes of OpenSSL's x509_vfy.h"

_OURS: Final = "the peer refuses this side's certificate: "

_REASONS: Final = (
    ("CERTIFICATE_EXPIRED", _OURS + "it has expired; make a new one"),
    ("UNKNOWN_CA", _OURS + "no authority that the peer knows has signed it; give both sides the same ca file"),
    ("UNSUPPORTED_CERTIFICATE", _OURS + "it must be good for clients and servers both (extendedKeyUsage)"),
    ("BAD_CERTIFICATE", _OURS + "it is damaged, or not for the host that the peer dialled"),
    ("CERTIFICATE_REQUIRED", "the peer has got no certificate from this side"),
    ("DID_NOT_RETURN_A_CERTIFICATE", "the peer shows no certificate: give it TLS settings with one"),
    ("PROTOCOL_VERSION", "the peer and this side have no TLS version in common, 1.2 or newer"),
    ("UNSUPPORTED_PROTOCOL", "the peer and this side have no TLS version in common, 1.2 or newer"),
)
"by what OpenSSL's name of an error contains: the names grow prefixes from version to version"


def _advice(code: int) -> str:
    return _ADVICE.get(code, "")


def failure_sentence(error: ssl.SSLError) -> str:
    """Why a TLS connection failed, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}{_advice(error.verify_code)}"
    reason = error.reason or ""
    return next((sentence for part, sentence in _REASONS if part in reason), f"TLS failed: {reason or error}")
