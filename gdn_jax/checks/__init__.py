"""Proofs that the rule is right: oracle, accuracy, cases, `gdn check`."""
