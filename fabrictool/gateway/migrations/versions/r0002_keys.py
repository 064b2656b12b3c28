"""Keys that the key API made; what was released is never changed: a new layout is a new file."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "fabrictool_keys",
        sa.Column("sha256", sa.String, primary_key=True),
        sa.Column("digits", sa.String, nullable=False),
        sa.Column("fabric", sa.String, nullable=False),
        sa.Column("alias", sa.String),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("ended", sa.Boolean, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_index("fabrictool_keys_revision", "fabrictool_keys", ["fabric", "revision"])
    op.create_index("fabrictool_keys_digits", "fabrictool_keys", ["digits"], unique=True)
    op.create_index("fabrictool_keys_alias", "fabrictool_keys", ["fabric", "alias"], unique=True)
