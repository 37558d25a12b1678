"""``bench``: whether keeping what was read pays, measured on this machine."""
