"""What prompts shared, and the demand of forgotten hours; a layout that was released is never changed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    # Defaults: a gateway of the former release that is still connected goes on writing its rows.
    op.add_column("fabrictool_requests", sa.Column("prefix_of", sa.String, nullable=False, server_default=""))
    op.add_column("fabrictool_requests", sa.Column("prefix_tokens", sa.BigInteger, nullable=False, server_default="0"))
    op.create_table(
        "fabrictool_profiles",
        sa.Column("fabric", sa.String, primary_key=True),
        sa.Column("model", sa.String, primary_key=True),
        sa.Column("hour", sa.Integer, primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
    )
