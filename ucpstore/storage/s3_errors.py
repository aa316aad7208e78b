"""What an S3 request's failure means to the user.

obstore gives one text per failure, with the server's XML answer in it. Servers put key ids and
session tokens into that XML, so nothing of the text is shown but the error's code and, where the
code is not known here, the server's message without the credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ucpstore.errors import StorageError

_REGION_CODES = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
)
_EXPIRED_CODES = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
_KEY_CODES = ("InvalidAccessKeyId", "InvalidToken", "InvalidClientTokenId", "AuthFailure")
_BUSY_CODES = (
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "ServiceUnavailable",
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
)
_QUOTA_CODES = ("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "XMinioDiskFull")


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed request: the HTTP status and S3 code, if a server answered, and the text."""

    status: int | None
    code: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = str(error)
        status = re.search(r"status code: (\d{3})", text)
        code = re.search(r"<Code>([^<]*)</Code>", text)
        if status is None:
            # The answer to a deletion of many keys is 200, with an error per key.
            code = re.search(r"\(code: (\w+)\)", text)
            return cls(
                (403 if code[1] == "AccessDenied" else 400) if code else None,
                code[1] if code else "",
                text,
            )
        return cls(int(status[1]), code[1] if code else "", text)

    @property
    def answered(self) -> bool:
        """Whether a server answered, so that the endpoint is right."""
        return self.status is not None

    @property
    def certain(self) -> bool:
        """Whether the request surely had no effect: refused, or never sent."""
        answered = self.status is not None and 300 <= self.status < 500
        return answered or self.refused or self.not_sent

    @property
    def refused(self) -> bool:
        """Whether the server answered that it was too busy to begin."""
        return self.status == 429 or (self.status == 503 and self.code in _BUSY_CODES)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way any more: S3 itself answered and has ended the request.

        502 and 504 come from what stands in between, behind which it may still run.
        """
        return self.refused or self.status in (500, 503)

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later."""
        if self.status is None:
            return "kind: " in self.text and "certificate" not in self.text
        return self.status == 429 or self.status >= 500

    @property
    def missing_object(self) -> bool:
        return self.status == 404

    @property
    def not_sent(self) -> bool:
        return self.status is None and (
            "kind: Connect" in self.text or "kind: Builder" in self.text
        )

    @property
    def missing_bucket(self) -> bool:
        return self.code == "NoSuchBucket"

    @property
    def stale_credentials(self) -> bool:
        """Whether newer credentials could help."""
        return self.code in _EXPIRED_CODES + _KEY_CODES or self.code == "SignatureDoesNotMatch"

    def refusal(
        self, action: str, url: str, bucket: str, endpoint: str, secrets: Iterable[str]
    ) -> StorageError:
        """The error to raise, for `cannot <action> <url>`."""
        return StorageError(f"cannot {action} {url}: {self._reason(bucket, endpoint, secrets)}")

    def _reason(self, bucket: str, endpoint: str, secrets: Iterable[str]) -> str:
        if self.status is None:
            return self._unanswered(endpoint, secrets)
        code = self.code or f"status {self.status}"
        if self.missing_bucket:
            return (
                f"bucket {bucket!r} does not exist at {endpoint}; create it first (no bucket is "
                "created on the way), or correct the URL or the endpoint"
            )
        if self.code in _EXPIRED_CODES:
            return f"the session token has expired ({code}); get new credentials and try again"
        if self.code in _KEY_CODES:
            return f"{endpoint} does not know the access key ({code}); check the credentials"
        if self.code == "SignatureDoesNotMatch":
            return f"the secret does not belong to the access key ({code}); check the credentials"
        if self.code == "RequestTimeTooSkewed":
            return f"this machine's clock differs from the server's ({code}); set the clock"
        if self.code in _REGION_CODES or self.status == 301:
            return (
                f"bucket {bucket!r} is in another region ({code}); set AWS_REGION or "
                "client_kwargs={'region_name': ...}"
            )
        if self.code in _QUOTA_CODES or self.status == 507:
            return f"the server has no space left ({code}); free some, or choose another place"
        if self.status in (401, 403):
            return (
                f"access denied ({code}); grant these credentials the right to do so on bucket "
                f"{bucket!r}, or use others"
            )
        if self.status in (429, 503):
            return (
                f"the server kept answering that it is too busy ({code}), also when asked again "
                "with growing waits; try later, or with fewer threads"
            )
        if self.status == 501 or self.code == "NotImplemented":
            return f"the server cannot do this ({code}); it must support S3's conditional puts"
        message = re.search(r"<Message>([^<]*)</Message>", self.text)
        said = f": {_redact(message[1], secrets)}" if message else ""
        return f"the server answered {code}{said}; look there for the cause"

    def _unanswered(self, endpoint: str, secrets: Iterable[str]) -> str:
        if "dns error" in self.text:
            return f"the host of {endpoint} is not known; correct the endpoint"
        if "certificate" in self.text:
            return f"the certificate of {endpoint} is not accepted; check the endpoint"
        if self.not_sent:
            return f"nothing answers at {endpoint}; check the endpoint and the network"
        if "kind: Timeout" in self.text or "timed out" in self.text:
            return f"{endpoint} did not answer in time; check the server and the network"
        first = _redact(self.text.split("\n", 1)[0], secrets)
        return f"the connection to {endpoint} failed ({first[:300]}); check the server"


def _redact(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return text
