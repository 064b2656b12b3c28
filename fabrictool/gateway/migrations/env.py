"""Alembic runs this for every migration; `RecordStore` gives it the connection."""

from __future__ import annotations

from alembic import context

from fabrictool.gateway.tables import LAYOUT_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=LAYOUT_TABLE.name)
context.run_migrations()
