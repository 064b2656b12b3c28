"""Why a placement looks as it does, what else there was, and why there may be none."""
