"""TLS of the control link, as subcommands take it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pdhandoff.errors import ErrorCode, LocalError

if TYPE_CHECKING:
    from pdhandoff.runtime.tls import TlsConfig

__all__ = ["add_tls_options", "read_tls"]


def add_tls_options(parser: argparse._ActionsContainer) -> None:
    """Declare them."""
    parser.add_argument("--tls-ca", metavar="FILE", help="authorities of the control link; with it, TLS is spoken")
    parser.add_argument("--tls-certificate", metavar="FILE", help="certificate to show to the peer")
    parser.add_argument("--tls-key", metavar="FILE", help="its private key")
    parser.add_argument(
        "--tls-name",
        action="append",
        metavar="NAME",
        help="a name that the peer's certificate may carry (default: the host that is dialled); may be repeated",
    )


def read_tls(options: argparse.Namespace) -> TlsConfig | None:
    """What was given, None for nothing. Raises LocalError (CONFIG) when it is not whole."""
    given = (options.tls_ca, options.tls_certificate, options.tls_key)
    if not any(given) and not options.tls_name:
        return None
    if not all(given):
        raise LocalError(ErrorCode.CONFIG, "--tls-ca, --tls-certificate and --tls-key belong together: give all three")
    from pdhandoff.runtime.tls import TlsConfig

    names = None if options.tls_name is None else tuple(options.tls_name)
    return TlsConfig(ca=options.tls_ca, certificate=options.tls_certificate, key=options.tls_key, names=names)
