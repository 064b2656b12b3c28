"""Clusters behind a login node. This release looks whether they answer; it does not start anything there yet.

A login node that cannot be reached, or whose host key is not the pinned one, makes the cluster *unknown*. So does one
that answers: what runs behind it cannot be listed yet, and unknown is not absent.
"""

from __future__ import annotations

import asyncio
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.domain.observed import ClusterFacts

if TYPE_CHECKING:
    from fabrictool.domain.observed import UnitState
    from fabrictool.domain.specs import UnitSpec

CONNECT_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Login:
    """One login node; host keys are pinned in the inventory, there is no trust on first use."""

    host: str
    port: int
    user: str
    host_keys: tuple[str, ...]


class SshCluster:
    """A cluster of kind ``ssh`` or ``slurm``."""

    def __init__(self, name: str, kind: str, logins: tuple[Login, ...]) -> None:
        self.name = name
        self._kind = kind
        self._logins = logins

    def observe(self) -> ClusterFacts:
        """Always unknown: with the reason why."""
        reasons = [f"{login.host}:{login.port} {self._probe(login)}" for login in self._logins]
        hint = "check the login node, its pinned host keys and your network; nothing on this cluster is touched"
        return ClusterFacts(cluster=self.name, known=False, reason="; ".join(reasons) or "no login node", hint=hint)

    def _probe(self, login: Login) -> str:
        """What the login node says to a connection that never authenticates."""
        import asyncssh  # noqa: PLC0415 - 0.2 s that a local fabric need not pay

        async def handshake() -> None:
            async with asyncio.timeout(CONNECT_SECONDS):
                connection = await asyncssh.connect(
                    login.host,
                    login.port,
                    username=login.user,
                    known_hosts=([asyncssh.import_public_key(key) for key in login.host_keys], [], []),
                    config=None,
                    agent_path=None,
                    client_keys=[],
                    preferred_auth="none",
                )
                connection.close()

        try:
            asyncio.run(handshake())
        except asyncssh.HostKeyNotVerifiable:
            return "shows another host key than the inventory pins"
        except asyncssh.PermissionDenied:
            return f"answers, but this release does not manage units on clusters of kind {self._kind}"
        except TimeoutError:
            return f"did not answer within {CONNECT_SECONDS:.0f} s"
        except (OSError, asyncssh.Error) as error:
            return f"cannot be reached: {error}"
        except (ValueError, binascii.Error, asyncssh.KeyImportError):
            return "has a pinned host key that is not a public key"
        return f"answers, but this release does not manage units on clusters of kind {self._kind}"

    # -- nothing is ever done to a cluster that is unknown -----------------------------------------------------

    def prepare(self, operation: str, spec: UnitSpec, secrets: dict[str, bytes]) -> None:
        """Refused."""
        raise self._refusal()

    def start(self, operation: str) -> None:
        """Refused."""
        raise self._refusal()

    def stop(self, operation: str) -> None:
        """Refused."""
        raise self._refusal()

    def kill(self, operation: str) -> None:
        """Refused."""
        raise self._refusal()

    def forget(self, operation: str) -> None:
        """Refused."""
        raise self._refusal()

    def spec(self, operation: str) -> UnitSpec:
        """Refused."""
        raise self._refusal()

    def state(self, operation: str) -> UnitState | None:
        """No unit of ours can be there."""
        return None

    def status_url(self, operation: str) -> str:
        """None."""
        return ""

    def log_tail(self, operation: str, lines: int) -> list[str]:
        """None."""
        return []

    def exit_reason(self, operation: str) -> str:
        """None."""
        return ""

    def _refusal(self) -> FabrictoolError:
        message = f"units on clusters of kind {self._kind} are not managed by this release"
        return FabrictoolError.of("FT5107", message, thing=f"cluster/{self.name}")
