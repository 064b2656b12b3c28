"""Whose word counts when a session is told what to serve. Pure, so that every replica of the registry says the same.

The signer is a *controller* of the session's own provider, by its certificate. That certificate must not end before the
session's: so an assignment is kept exactly as long as its subject, and no older one can come back in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.base.clock import duration_text
from fabrictool.mesh.identity import claims_of, validity_of
from fabrictool.mesh.issuing import MAX_SESSION_S
from fabrictool.mesh.records import AssignmentBody, RecordError, seal

if TYPE_CHECKING:
    from fabrictool.mesh.identity import Credential, VerifiedSession
    from fabrictool.mesh.records import Record


def sign_assignment(controller: Credential, body: AssignmentBody) -> Record:
    """`body` as the controller says it; raises FT6101 when it is too large."""
    return seal(body, controller.sign, controller.chain)


def check_assignment(body: AssignmentBody, signer: VerifiedSession, subject: VerifiedSession) -> None:
    """Whether `signer` may say this of `subject`.

    Raises
    ------
    RecordError
        FT6103 somebody else than a controller of its provider, FT6104 it can serve no such thing, FT6105 the
        controller's certificate ends before the session's.
    """
    claims, whose = signer.claims, subject.claims
    if claims.role != "controller" or claims.provider != whose.provider or signer.session != body.by:
        message = f"{claims.role} of {claims.provider} may not assign anything to a session of {whose.provider}"
        raise RecordError.of("FT6103", message, hint=f"only a controller of {whose.provider} may")
    if whose.role != "agent":
        raise RecordError.of("FT6104", f"{whose.session[:8]} is no agent, so it serves no model")
    if body.model and subject.models and body.model not in subject.models:
        message = f"the certificate of {whose.session[:8]} names {', '.join(subject.models)}, not {body.model}"
        raise RecordError.of("FT6104", message)
    if signer.not_after < subject.not_after:
        message = "the controller's certificate ends before that of the session"
        hint = "`fabrictool trust controller PROVIDER` makes a new one; renew the provider's own first, if that ends"
        raise RecordError.of("FT6105", message, hint=hint)


def early_end(chain: tuple[bytes, ...], *, now: float) -> str:
    """What to tell whoever assigns with a controller that ends before a session of its provider may; "": it does not.

    `now` is wall time, `chain` the controller's own.
    """
    end, provider_end = (validity_of(certificate)[1] for certificate in chain[:2])
    if end >= min(now + MAX_SESSION_S, provider_end):
        return ""
    provider = claims_of(chain[0]).provider
    return (
        f"the controller of {provider} ends in {duration_text(max(0.0, end - now))}, and its sessions may be renewed "
        f"beyond that: such a one serves on, but only another controller can tell it something else; "
        f"`fabrictool trust controller {provider}` makes one"
    )
