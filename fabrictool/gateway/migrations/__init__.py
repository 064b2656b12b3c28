"""Layouts of a store of records, one after the other; Alembic reads this folder."""
