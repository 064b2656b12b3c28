"""What went wrong between two TLS peers, in words: OpenSSL's own end in the line of a C file."""

from __future__ import annotations

import ssl

CLOCKS = "or one of the two clocks is wrong (`fabrictool doctor` compares them)"
_VERIFY = {
    9: f"the other side's certificate is not valid yet, {CLOCKS}",
    10: f"the other side's certificate has expired, {CLOCKS}",
}
"""OpenSSL's number of a failed verification (X509_V_ERR_…) → what it means."""
_STRANGERS = frozenset({18, 19, 20, 21})
"""The numbers of chains that lead to no authority of ours."""
_ALERTS = {
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": f"the other side finds our certificate expired, {CLOCKS}",
    "SSLV3_ALERT_BAD_CERTIFICATE": f"the other side does not accept our certificate: not valid yet, {CLOCKS}",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the other side does not accept our certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "the other side does not know the root of our certificate: it is of another federation",
    "WRONG_VERSION_NUMBER": "what listens there does not speak TLS",
    "UNEXPECTED_EOF_WHILE_READING": "the other side closed the connection in the middle of the greeting",
}
"""OpenSSL's name of what was received → what it means."""


def spoken(error: BaseException, stranger: str = "is signed by no authority that is trusted here") -> str:
    """`error`, or the TLS error that it came from, as a sentence; others as they are. `stranger`: what is to be said of
    a certificate whose chain leads to nobody we know.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError) and cause.verify_code in _STRANGERS:
        return f"the other side's certificate {stranger}"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return _VERIFY.get(cause.verify_code, f"the other side's certificate is refused: {cause.verify_message}")
    if isinstance(cause, ssl.SSLError):
        name = str(getattr(cause, "reason", "") or "unknown")
        return _ALERTS.get(name, f"TLS failed: {name.replace('_', ' ').lower()}")
    return str(error) or type(error).__name__
