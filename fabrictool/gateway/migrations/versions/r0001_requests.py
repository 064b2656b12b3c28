"""Requests and budgets; what was released is never changed: a new layout is a new file."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_TEXTS = ("fabric", "gateway", "path", "end", "tenant", "key", "model", "provider", "replica")
_NUMBERS = ("hour", "status", "retries")
_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")


def upgrade() -> None:
    op.create_table(
        "fabrictool_requests",
        sa.Column("id", sa.String, primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in _TEXTS),
        *(sa.Column(name, sa.Integer, nullable=False) for name in _NUMBERS),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _COUNTS),
        *(sa.Column(name, sa.Boolean, nullable=False) for name in ("stream", "counted")),
        *(sa.Column(name, sa.Float, nullable=False) for name in ("at", "e2e_s")),
        *(sa.Column(name, sa.Float) for name in ("ttft_s", "tpot_s")),
    )
    op.create_index("fabrictool_requests_at", "fabrictool_requests", ["at"])
    op.create_table(
        "fabrictool_budgets",
        sa.Column("account", sa.String, primary_key=True),
        sa.Column("period", sa.String, primary_key=True),
        sa.Column("taken", sa.BigInteger, nullable=False),
    )
