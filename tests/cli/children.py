"""Processes of a command that should be gone with it; that of the planner's engine stays for the next question."""

import multiprocessing


def workers():
    return [child for child in multiprocessing.active_children() if child.name != "highs"]
