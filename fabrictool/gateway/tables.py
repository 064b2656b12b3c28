"""The tables of a store of records; `migrations` makes them, version by version."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text

from fabrictool.gateway.records import LAYOUT

READABLE = frozenset({"0001", "0002", LAYOUT})
"""Layouts whose requests can be added up as they are."""
_metadata = MetaData()
LAYOUT_TABLE = Table("fabrictool_layout", _metadata, Column("version_num", String(32), primary_key=True))
"""Alembic's own, by our name: a database may have other tenants."""

REQUESTS = Table(
    "fabrictool_requests",
    _metadata,
    Column("id", String, primary_key=True),
    Column("fabric", String, nullable=False),
    Column("gateway", String, nullable=False),
    Column("hour", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("path", String, nullable=False),
    Column("status", Integer, nullable=False),
    Column("end", String, nullable=False),
    Column("e2e_s", Float, nullable=False),
    Column("tenant", String, nullable=False),
    Column("key", String, nullable=False),
    Column("model", String, nullable=False),
    Column("provider", String, nullable=False),
    Column("replica", String, nullable=False),
    Column("retries", Integer, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("counted", Boolean, nullable=False),
    Column("prefix_of", String, nullable=False, server_default=""),
    Column("prefix_tokens", BigInteger, nullable=False, server_default="0"),
    Column("ttft_s", Float),
    Column("tpot_s", Float),
)
"""The fields of `RequestRecord`, who wrote it, and the hour of `at` since 1970: hours and days are sums of whole
numbers in any database."""
COLUMNS = tuple(column.name for column in REQUESTS.columns)
"""In the order in which a row has them."""
Index("fabrictool_requests_at", REQUESTS.c.at)
_of = REQUESTS.c
IS_DEMAND = (_of.status < 400) & _of.end.in_(("answered", "cancelled"))
"""Whether a request was answered, or cancelled in mid-answer."""
DEMANDED = (_of.model, _of.at, _of.prompt_tokens, _of.completion_tokens, _of.prefix_tokens, _of.cached_tokens)
"""The columns that are the fields of `workload.profile.Demanded`."""

BUDGETS = Table(
    "fabrictool_budgets",
    _metadata,
    Column("account", String, primary_key=True),
    Column("period", String, primary_key=True),
    Column("taken", BigInteger, nullable=False),
)
"""Tokens of a budget that gateways hold or that were used, by its period."""

KEYS = Table(
    "fabrictool_keys",
    _metadata,
    Column("sha256", String, primary_key=True),
    Column("digits", String, nullable=False),
    Column("fabric", String, nullable=False),
    Column("alias", String),
    Column("revision", BigInteger, nullable=False),
    Column("ended", Boolean, nullable=False),
    Column("document", Text, nullable=False),
)
"""A row for each secret of a key that the key API made, for ever: records name it by its first digits. `alias` is that
of a live key, which no other has; `document` is an `IssuedKey` in JSON."""
Index("fabrictool_keys_revision", KEYS.c.fabric, KEYS.c.revision)
Index("fabrictool_keys_digits", KEYS.c.digits, unique=True)
Index("fabrictool_keys_alias", KEYS.c.fabric, KEYS.c.alias, unique=True)

PROFILES = Table(
    "fabrictool_profiles",
    _metadata,
    Column("fabric", String, primary_key=True),
    Column("model", String, primary_key=True),
    Column("hour", Integer, primary_key=True),
    Column("document", Text, nullable=False),
)
"""Of records that are forgotten: a `DemandSketch` in JSON."""
