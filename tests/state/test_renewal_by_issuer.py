"""A joined session gets another certificate for its key, of the issuer that signed it, as long as its token allows."""

import asyncio
import errno
import logging
import os
import time

import pytest

from fabrictool.agent.admission import ask_renewal
from fabrictool.agent.renewing import RENEW_BEFORE_S, RenewalWatch
from fabrictool.base.errors import FabrictoolError
from fabrictool.base.runfolder import RunFolder
from fabrictool.mesh.identity import (
    Credential,
    IdentityVerifier,
    certify,
    describe_chain,
    issue_provider,
    issue_session,
    raw_key,
)
from fabrictool.mesh.issuing import AFTER_END_S, MAX_SESSION_S, SESSION_S
from fabrictool.mesh.jointoken import read_token
from fabrictool.mesh.transport.tls import IdentityFiles
from tests.manual_clock import ManualClock
from tests.state.test_issuer import Door

HOUR, DAY = 3600.0, 86400.0

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio]


@pytest.fixture
def door(tmp_path):
    return Door(tmp_path)


class Joined:
    """An agent's run folder, of a session that the door's issuer signed, or somebody else."""

    def __init__(self, door, folder, session, text):
        self.door, self.token = door, read_token(text).token
        self.folder = RunFolder(folder)
        self.files = IdentityFiles(self.folder.identity)
        self.files.write(session, door.root)
        self.folder.spec.write_text("{}")

    @classmethod
    async def of(cls, door, folder, *, lasts=7 * DAY, **changes):
        if lasts is not None:
            changes["renewable_until"] = door.clock.wall() + lasts
        text = door.token(**changes)
        return cls(door, folder, await door.ask(text), text)

    async def renew(self, ends_at=None):
        return await asyncio.to_thread(ask_renewal, self.token, self.files, ends_at=ends_at)

    async def refusal(self):
        with pytest.raises(FabrictoolError) as refused:
            await self.renew()
        return refused.value.problems[0].code

    @property
    def end(self):
        return describe_chain(self.files.chain.read_bytes()).end

    def as_if_signed(self, *, ends, began=None):
        """Its certificate, as it would have been signed at another time."""
        session, _ = self.files.read()
        now = self.door.clock.wall()
        chain = certify(
            self.door.beta, session.key.public_key(), "agent", now=now, seconds=ends, models=("m",), began_at=began
        )
        self.files.write(Credential(session.key, chain), self.door.root)


async def test_the_same_key_is_signed_again_and_no_use_of_the_token_is_spent(door, tmp_path, caplog):
    caplog.set_level("INFO", "fabrictool.issuer")
    async with door.open():
        joined = await Joined.of(door, tmp_path / "run")
        began = door.clock.wall() - 2 * DAY
        joined.as_if_signed(ends=HOUR, began=began)
        chain = await joined.renew()
        before, root = joined.files.read()
        after = IdentityVerifier(root).verify(chain, now=door.clock.wall())
        assert raw_key(after.public_key) == raw_key(before.key.public_key())
        assert after.models == ("m",)
        assert after.not_after == pytest.approx(door.clock.wall() + SESSION_S, abs=90)
        assert f"renewed session {after.claims.session[:8]}" in caplog.text
        ends_at = door.clock.wall() + 3 * DAY
        chain = await joined.renew(ends_at)
        longer = IdentityVerifier(root).verify(chain, now=door.clock.wall())
        assert longer.not_after == pytest.approx(ends_at + AFTER_END_S, abs=90)


async def test_a_restart_of_the_issuer_forgets_none_of_its_sessions(door, tmp_path):
    async with door.open():
        joined = await Joined.of(door, tmp_path / "run")
    joined.as_if_signed(ends=HOUR)
    later = Door(tmp_path)
    later.root, later.beta = door.root, door.beta
    later.issuer = type(door.issuer)(door.beta, later.uses, later.clock, door.root.chain[0])
    async with later.open():
        joined.token = read_token(later.token()).token
        assert await joined.renew()


async def test_whom_an_issuer_does_not_renew(door, tmp_path):
    async with door.open():
        for name, changes in (("never", {"lasts": None}), ("over", {"lasts": HOUR / 2}), ("past", {"lasts": -HOUR})):
            joined = await Joined.of(door, tmp_path / name, **changes)
            joined.as_if_signed(ends=HOUR)
            assert await joined.refusal() == "FT6417", name
        old = await Joined.of(door, tmp_path / "old")
        old.as_if_signed(ends=HOUR, began=door.clock.wall() - MAX_SESSION_S - 1)
        assert await old.refusal() == "FT6010"
        revoked = await Joined.of(door, tmp_path / "revoked")
        revoked.as_if_signed(ends=HOUR)
        door.revoked.add(revoked.files.read()[0].claims.session)
        assert await revoked.refusal() == "FT6007"
        applied = issue_session(door.beta, "agent", now=door.clock.wall())
        assert await Joined(door, tmp_path / "applied", applied, door.token()).refusal() == "FT6417"
        gateway = issue_session(door.beta, "gateway", now=door.clock.wall())
        assert await Joined(door, tmp_path / "gateway", gateway, door.token()).refusal() == "FT6417"
        alpha = issue_provider(door.root, "alpha", now=door.clock.wall())
        foreign = issue_session(alpha, "agent", now=door.clock.wall())
        assert await Joined(door, tmp_path / "alpha", foreign, door.token()).refusal() == "FT6417"
        rate = await Joined.of(door, tmp_path / "rate")
        rate.as_if_signed(ends=HOUR)
        assert [await rate.renew() for _ in range(21)]
        assert await rate.refusal() == "FT6409"


async def test_a_certificate_ends_with_the_time_of_its_token_and_with_the_week_of_its_key(door, tmp_path):
    async with door.open():
        now = door.clock.wall()
        joined = await Joined.of(door, tmp_path / "token", lasts=5 * HOUR)
        joined.as_if_signed(ends=HOUR)
        verifier = IdentityVerifier(door.root.chain[0])
        assert verifier.verify(await joined.renew(), now=now).not_after == pytest.approx(now + 5 * HOUR, abs=90)
        joined = await Joined.of(door, tmp_path / "key")
        joined.as_if_signed(ends=HOUR, began=now - MAX_SESSION_S + 3 * HOUR)
        assert verifier.verify(await joined.renew(), now=now).not_after == pytest.approx(now + 3 * HOUR, abs=90)


async def test_who_shows_no_certificate_gets_none(door):
    async with door.open():
        answer = await door.raw(b"POST /v1/renewal HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}")
    assert b"FT6408" in answer


async def test_an_agent_asks_in_time_and_writes_what_it_got(door, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "fabrictool.agent")
    async with door.open():
        joined = await Joined.of(door, tmp_path / "run")
        joined.as_if_signed(ends=10 * HOUR)
        end, seen = joined.end, joined.folder.spec.stat().st_mtime_ns
        watch = RenewalWatch(joined.token, joined.folder, door.clock, None)
        assert await watch.look() == 60.0
        assert joined.end == end
        joined.as_if_signed(ends=RENEW_BEFORE_S / 2)
        watch = RenewalWatch(joined.token, joined.folder, door.clock, None)
        assert await watch.look() == 60.0, "a short one is young until two thirds of it are over"
        assert joined.end < time.time() + RENEW_BEFORE_S
        door.clock.advance(RENEW_BEFORE_S / 2 * 0.7)
        os.utime(joined.folder.spec, ns=(0, 0))
        assert await watch.look() == 60.0
        assert joined.end > door.clock.wall() + 20 * HOUR
        assert joined.folder.spec.stat().st_mtime_ns > seen
        assert await RenewalWatch(joined.token, joined.folder, door.clock, door.clock.wall() + HOUR).look() is None
    joined.as_if_signed(ends=60.0)
    door.clock.advance(50.0)
    for _ in range(2):
        assert 300 <= await watch.look() <= 900, "nobody answers: again and again"
    assert caplog.text.count("the certificate was not renewed, and is asked for again: FT6411") == 1


async def test_an_agent_that_could_not_write_what_it_got_asks_again(door, tmp_path, caplog, monkeypatch):
    """And leaves what it had."""

    def full(*_args, **_more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    caplog.set_level(logging.WARNING, "fabrictool.agent")
    async with door.open():
        joined = await Joined.of(door, tmp_path / "run")
        watch = RenewalWatch(joined.token, joined.folder, door.clock, None)
        joined.as_if_signed(ends=HOUR)
        door.clock.advance(0.8 * HOUR)
        end = joined.end
        with monkeypatch.context() as disk:
            disk.setattr("fabrictool.agent.renewing.write_atomic", full)
            for _ in range(2):
                assert 300 <= await watch.look() <= 900
        assert joined.end == end
        assert caplog.text.count("the certificate was not renewed, and is asked for again: FT43") == 1
        assert await watch.look() == 60.0
        assert joined.end > end


async def test_an_agent_that_was_refused_asks_again_for_its_clock_may_have_been_wrong(door, tmp_path, caplog):
    async with door.open():
        joined = await Joined.of(door, tmp_path / "run")
        watch = RenewalWatch(joined.token, joined.folder, door.clock, None)
        joined.as_if_signed(ends=SESSION_S)
        real, watch._clock = door.clock, ManualClock(wall=door.clock.wall() + SESSION_S)  # set a day on
        assert 300 <= await watch.look() <= 900
        assert caplog.text.count("the certificate was not renewed, and is asked for again: FT6417") == 1
        watch._clock = real
        real.advance(20 * HOUR)
        assert await watch.look() == 60.0
        assert joined.end > real.wall() + 20 * HOUR
