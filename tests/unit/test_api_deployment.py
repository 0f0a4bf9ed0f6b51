"""Where the HTTP side listens, and what is refused before Ray is asked."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from longprefill.orchestrator.api.deployment import LazyApp, start, url_of
from longprefill.orchestrator.config import ConfigError, ServiceConfig, TlsSection

from .api_support import config_for


def certificate(directory: Path, name: str) -> TlsSection:
    """A certificate that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    files = TlsSection(certificate=str(directory / f"{name}.pem"), key=str(directory / f"{name}.key"))
    Path(files.certificate).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    Path(files.key).write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


def test_an_address_that_is_taken_or_not_ours(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port} cannot be listened on: Address already in use"):
            start(config_for(tmp_path, port=port))
    for host in ("localhost.nowhere.invalid", "127.0.0.1.5"):
        config = config_for(tmp_path)
        with pytest.raises(ConfigError, match="cannot be listened on"):
            start(_listening_at(config, host))


def _listening_at(config: ServiceConfig, host: str) -> ServiceConfig:
    service = dataclasses.replace(config.service)
    object.__setattr__(service, "host", host)  # which a configuration without keys would refuse
    changed = dataclasses.replace(config)
    object.__setattr__(changed, "service", service)
    return changed


def test_certificates_are_looked_at_first(tmp_path: Path) -> None:
    one, other = certificate(tmp_path, "one"), certificate(tmp_path, "other")
    for tls, reason in (
        (TlsSection(certificate=str(tmp_path / "no"), key=one.key), "is not a file"),
        (TlsSection(certificate=one.certificate, key=other.key), "do not work together"),
        (TlsSection(certificate=one.key, key=one.key), "do not work together"),
    ):
        with pytest.raises(ConfigError, match=reason):
            start(dataclasses.replace(config_for(tmp_path, port=0), tls=tls))


def test_addresses(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    assert url_of(config, 8000) == "http://127.0.0.1:8000"
    assert url_of(config_for(tmp_path, host="::1"), 80) == "http://[::1]:80"
    assert url_of(dataclasses.replace(config, tls=TlsSection(certificate="a", key="b")), 1).startswith("https://")


def test_what_travels_to_a_replica_is_the_configuration(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    assert pickle.loads(pickle.dumps(LazyApp(config)))._config == config


def test_replicas_load_no_torch() -> None:
    code = "import sys; import longprefill.orchestrator.api.app; print({'torch', 'ray'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "set()\n"
