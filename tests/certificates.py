"""Certificates for tests: an authority, and what it signs, as PEM files in a folder."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_NOW = dt.datetime.now(dt.timezone.utc)
_DAY = dt.timedelta(days=1)


class Authority:
    """Its certificate is the file `pem`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._builder(self._name, self._key.public_key(), _NOW - _DAY, _NOW + _DAY).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.pem = folder / f"{name}.pem"
        self.pem.write_bytes(certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *uris: str,
        days: tuple[int, int] = (-1, 1),
        separate_key: bool = False,
        password: str = "",
        extensions: Iterable[x509.ExtensionType] = (),
    ) -> dict[str, str]:
        """A certificate whose alternative names are these URIs, valid between these days from now, as the options of a
        node that trusts this authority. With `extensions` in place of URIs, or beside them.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key(), _NOW + days[0] * _DAY, _NOW + days[1] * _DAY)
        if uris:
            names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
            builder = builder.add_extension(names, critical=False)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        secret = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
        path = self._folder / f"{name}.pem"
        options = {"tls_certificate": str(path), "tls_authority": str(self.pem)}
        if separate_key:
            own = self._folder / f"{name}.key"
            own.write_bytes(private)
            path.write_bytes(certificate)
            return options | {"tls_key": str(own)}
        path.write_bytes(private + certificate)
        return options

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, begins: dt.datetime, ends: dt.datetime
    ) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        return builder.serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(ends)


def cluster(*ids: int | str) -> tuple[str, ...]:
    """The URIs that speak for these clusters; "*" for all."""
    return tuple(f"kvpull:cluster:{cluster_id}" for cluster_id in ids)
