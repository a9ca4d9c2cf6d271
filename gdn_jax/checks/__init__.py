"""What proves the rule and times it: oracle, accuracy, cases, `gdn check`, `gdn bench`."""
