"""``serve``: many users, one cache, over HTTP."""
