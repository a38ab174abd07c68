"""Flower's SuperLink, with a Control API that accepts only users with the deployment's secret.

``python -m fedprune_app.engine.superlink ...`` takes the arguments of ``flower-superlink``. Flower itself has accounts,
but no open way to check them. Without a check anyone who reaches the port may start runs, and so run code on every
node. The ``flwr`` command sends the secret as an account's token, from the file that :func:`credentials` returns.
"""

import base64
import hmac
import json
import os
from collections.abc import Sequence
from pathlib import Path

from fedprune_app.engine import flower_private
from fedprune_app.engine.flower_private import (
    ACCESS_TOKEN_KEY,
    ACCESS_TOKEN_STORE_KEY,
    AUTHN_TYPE_STORE_KEY,
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    REFRESH_TOKEN_STORE_KEY,
    AccountInfo,
    AuthnType,
    ControlAuthnPlugin,
)
from fedprune_app.engine.printable import keep_logs_printable

SECRET_VARIABLE = "FEDPRUNE_CONTROL_SECRET_FILE"
CREDENTIALS = "credentials.yaml"  # in FLWR_HOME
_LEAST_BYTES = 16  # of a secret, so that the empty token of a call without one never matches


def read_secret(path: Path) -> str:
    """Return the secret in a file, without surrounding space.

    Raises ``ValueError`` for a secret that is too short, so that strangers could guess it, or not ASCII.
    """
    secret = path.read_bytes().strip()
    if len(secret) < _LEAST_BYTES or not secret.isascii():
        raise ValueError(
            f"{str(path)!r} has a secret of {len(secret)} bytes, allowed: at least {_LEAST_BYTES} bytes of ASCII"
        )
    return secret.decode()


def credentials(address: str, secret: str) -> bytes:
    """Return the ``credentials.yaml`` with which ``flwr`` sends the secret to the SuperLink at ``address``."""
    values = {
        AUTHN_TYPE_STORE_KEY: AuthnType.OIDC,  # accounts of this type send a token
        ACCESS_TOKEN_STORE_KEY: secret,
        REFRESH_TOKEN_STORE_KEY: secret,
    }
    entries = {key % address: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    return json.dumps(entries).encode()  # JSON is YAML


class SecretAuthn(ControlAuthnPlugin):
    """Authentication of Flower's Control API by one account, whose token is the secret in the environment's file."""

    def __init__(self) -> None:
        self._secret = read_secret(Path(os.environ[SECRET_VARIABLE])).encode()

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        """Return whether a call's metadata have the secret, and the account."""
        token = str(dict(metadata).get(ACCESS_TOKEN_KEY, "")).encode()
        if not hmac.compare_digest(token, self._secret):
            return False, None
        return True, AccountInfo(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME)

    def get_login_details(self) -> None:
        """Return nothing, because there is no login: a user has the secret or does not have it."""

    def get_auth_tokens(self, device_code: str) -> None:
        """Return nothing, because there is no login."""

    def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[None, None]:
        """Return nothing, because the secret does not expire."""
        return None, None


def main() -> None:
    keep_logs_printable()
    flower_private.replace("load_control_authn_plugin", SecretAuthn)
    flower_private.flower_superlink()


if __name__ == "__main__":
    main()
