"""The delta rule with a decay for each key channel, and with what is erased apart from what is written."""
