"""Rows of the records' store that a test writes by the names of their columns."""

from fabrictool.gateway.tables import COLUMNS


def put(store, rows):
    store.put([tuple(row[name] for name in COLUMNS) for row in rows])
