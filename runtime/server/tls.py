"""Whether a certificate and a key can serve TLS, in our words: OpenSSL says "PEM lib"."""

from __future__ import annotations

import ssl
from pathlib import Path

from llmc.regular_file import read_regular

_MOST_BYTES = 16 << 20


def why_unusable(certfile: Path, keyfile: Path) -> str | None:
    """One sentence, or None where they are a certificate (PEM, with its chain) and its key without a pass phrase."""
    texts = list[bytes]()
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            texts.append(read_regular(path, _MOST_BYTES))
        except OSError as error:
            return f"cannot read {flag} {path}: {error.strerror}"
    certificate, key = texts
    if b"-----BEGIN CERTIFICATE-----" not in certificate:
        return f"--ssl-certfile {certfile} holds no certificate in PEM: give a file with BEGIN CERTIFICATE"
    if b"PRIVATE KEY-----" not in key:
        return f"{keyfile} holds no private key in PEM: give the certificate's key as --ssl-keyfile"
    locked = False

    def pass_phrase() -> str:
        nonlocal locked
        locked = True
        return ""

    try:
        # Without a function, OpenSSL would ask the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, pass_phrase)
    except (OSError, ssl.SSLError) as error:
        if locked:
            return f"the key {keyfile} has a pass phrase, which nobody can type: save one without (openssl pkey)"
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            return f"the key {keyfile} is not that of the certificate {certfile}: give the one it was made with"
        return f"OpenSSL cannot use the certificate {certfile} with the key {keyfile}: are both whole? ({error})"
    return None
